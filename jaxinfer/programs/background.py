"""Compiles programs on a thread of its own, behind the weights that are read or the steps that run."""

import ctypes
import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from jaxinfer.programs.buckets import Program
from jaxinfer.programs.compile import Programs

logger = logging.getLogger(__name__)


class BackgroundCompiler:
    """Gets one program after the other, in the order asked. A step that needs the one under way waits for it."""

    def __init__(self, programs: Programs) -> None:
        # An engine that is dropped takes its programs along: the thread does not keep them.
        self._programs, self._queue = weakref.ref(programs), deque[Program]()
        self._lock, self._thread = threading.Lock(), threading.Thread()
        self._closed = self._runs = False

    def add(self, wanted: Iterable[Program]) -> None:
        """More programs to compile."""
        with self._lock:
            self._queue.extend(wanted)
            if not self._runs and not self._closed:
                self._runs = True
                # No daemon, since a thread inside the compiler must not outlive the interpreter: the process ends
                # after the program under way.
                self._thread = threading.Thread(target=self._run, name="jaxinfer-compile")
                self._thread.start()

    def _run(self) -> None:
        while (program := self._next()) is not None:
            programs = self._programs()
            try:
                if programs is not None:
                    programs.get(program)
            except Exception as error:  # the step that needs the program will raise it where it is seen
                logger.warning("compiling %s behind the steps failed: %s", program, error)
            del programs
        give_back_memory()

    def _next(self) -> Program | None:
        """None ends the thread: nothing is left, or nothing more is to be begun."""
        with self._lock:
            ends = self._closed or self._programs() is None or not threading.main_thread().is_alive()
            self._runs = bool(self._queue) and not ends
            return self._queue.popleft() if self._runs else None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits, at most so many seconds, until nothing is left to compile. Returns whether that is so."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._runs

    def close(self) -> None:
        """Begins no further program, and waits for the one under way."""
        with self._lock:
            self._closed = True
        self.wait()


def give_back_memory() -> None:
    """Gives what was freed back to the system, where the C library is glibc: it keeps much of it otherwise.

    After a compiler has run that is some 30 MB, after a model was closed nearly its size.
    """
    with suppress(AttributeError, OSError, TypeError):  # other libraries have no such function, or no handle
        ctypes.CDLL(None).malloc_trim(0)
