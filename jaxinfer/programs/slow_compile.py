"""Says, once in a process, that a program is being compiled where that takes long."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax

logger = logging.getLogger(__name__)

SECONDS = 2.0  # a program that is read from the compilation cache takes a tenth of this
_lock = threading.Lock()
_is_said = False


@contextmanager
def said(program: str) -> Iterator[None]:
    """Logs one warning if the block, which compiles `program`, takes over SECONDS, unless one was logged before."""
    if _is_said:
        yield
        return
    timer = threading.Timer(SECONDS, _say, [program])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(program: str) -> None:
    global _is_said
    with _lock:  # two programs may be compiled at a time
        if _is_said:
            return
        _is_said = True
    if folder := jax.config.jax_compilation_cache_dir:
        why = f"a first start compiles its programs, later ones read them from {folder}"
    else:
        why = "every start compiles its programs, since no compilation_cache_dir is in use"
    logger.warning("compiling %s: %s", program, why)  # a level that a script without logging shows too
