"""Compiles the programs that no step has asked for yet, behind the steps that run."""

import ctypes
import logging
import threading
import weakref
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
        # An engine that is dropped takes its programs along: this thread does not keep them.
        self._programs, self._jobs = weakref.ref(programs), list(jobs)
        self._stopped, self._released = threading.Event(), threading.Event()
        self._begun: Callable[[], Any] | None = None  # the second half of the first program
        if hold and self._jobs:
            self._begun = self._attempt(self._jobs[0][0], programs.begin, *self._jobs[0])
        if not hold:
            self.release()
        # No daemon, since a thread inside the compiler must not outlive the interpreter: the process ends after the
        # program under way.
        self._thread = threading.Thread(target=self._run, name="jaxinfer-compile")
        self._thread.start()

    def _run(self) -> None:
        if self._begun is not None:
            self._attempt(self._jobs[0][0], self._begun)
            self._begun = None
        while not self._released.wait(0.1) and not self._ends:
            pass
        for program, arguments in self._jobs:
            if self._ends or (programs := self._programs()) is None:
                break
            self._attempt(program, programs.get, program, arguments)
            del programs
        give_back_memory()

    @property
    def _ends(self) -> bool:
        """Whether nothing more is to be begun: after `stop`, and once the main thread has ended."""
        return self._stopped.is_set() or not threading.main_thread().is_alive()

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


def give_back_memory() -> None:
    """Gives what was freed back to the system, where the C library is glibc: it keeps much of it otherwise.

    After a compiler has run that is some 30 MB, after a model was closed nearly its size.
    """
    with suppress(AttributeError, OSError, TypeError):  # other libraries have no such function, or no handle
        ctypes.CDLL(None).malloc_trim(0)
