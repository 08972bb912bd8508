"""Compiles the programs that no step has asked for yet, behind the steps that run."""

import atexit
import ctypes
import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from jaxinfer.programs.buckets import Program
from jaxinfer.programs.compile import Programs

logger = logging.getLogger(__name__)


class BackgroundCompiler:
    """One thread that gets one program after the other. A step that needs the one under way waits for it.

    Args:
      programs: where they are kept.
      jobs: (program, arguments of its shapes), the most urgent first. Shapes, not arrays: steps give theirs away.
      hold: the interpreter is the caller's: the first program is traced here and now, and then nothing until
        `release`. Two threads that want the interpreter take it from each other every 5 ms.
    """

    def __init__(
        self, programs: Programs, jobs: Iterable[tuple[Program, tuple]], *, hold: bool = False
    ) -> None:
        self._programs, self._jobs = programs, list(jobs)
        self._stopped, self._released = threading.Event(), threading.Event()
        self._begun: Callable[[], Any] | None = None  # the second half of the first program
        if hold and self._jobs:
            self._begun = self._attempt(self._jobs[0][0], programs.begin, *self._jobs[0])
        if not hold:
            self.release()
        self._thread = threading.Thread(target=self._run, name="jaxinfer-compile", daemon=True)
        # A thread inside the compiler must not outlive the interpreter: the process ends after the program under way.
        atexit.register(self.close)
        self._thread.start()

    def _run(self) -> None:
        if self._begun is not None:
            self._attempt(self._jobs[0][0], self._begun)
        self._released.wait()
        for program, arguments in self._jobs:
            if self._stopped.is_set():
                return
            self._attempt(program, self._programs.get, program, arguments)
        give_back_memory()

    def _attempt(self, program: Program, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # the step that needs the program will raise it where it is seen
            logger.warning("compiling %s behind the steps failed: %s", program, error)
            return None

    @property
    def under_way(self) -> bool:
        return self._thread.is_alive()

    def release(self) -> None:
        """Ends `hold`."""
        self._released.set()

    def stop(self) -> None:
        """Begins no further program; does not wait for the one under way."""
        self._stopped.set()
        self.release()

    def close(self) -> None:
        """Stops, and waits for the program under way."""
        self.stop()
        self._thread.join()
        atexit.unregister(self.close)


def give_back_memory() -> None:
    """Gives what compilers have freed back to the system, where the C library is glibc.

    It keeps freed memory for what this process asks for next; pages and weights never come from there.
    """
    with suppress(AttributeError, OSError, TypeError):  # other libraries have no such function, or no handle
        ctypes.CDLL(None).malloc_trim(0)
