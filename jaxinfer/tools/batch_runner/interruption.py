"""SIGINT and SIGTERM as something the loop asks for, and an end to the process if it does not ask in time."""

import os
import signal
import socket
import threading
from types import FrameType

GRACE_SECONDS = 4.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While entered (in the main thread), the two signals set `signum` instead of ending the process.

    Python's handlers wait for the main thread, which may be compiling for minutes. So a thread listens too:
    GRACE_SECONDS after the first signal, or at the second, it ends the process. Results are in the file
    already, and a torn last line is repaired by the next run.
    """

    def __init__(self, last_words: str) -> None:
        self.signum: int | None = None
        self._last_words = last_words

    def __bool__(self) -> bool:
        return self.signum is not None

    @property
    def exit_code(self) -> int:
        return 128 + (self.signum or 0)

    def __enter__(self) -> "Interruption":
        self._listening, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._old = {signum: signal.signal(signum, self._note) for signum in SIGNALS}
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._wakeup.close()
        self._thread.join()
        self._listening.close()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum

    def _listen(self) -> None:
        while byte := self._next_byte():
            if byte[0] not in SIGNALS:
                continue
            if self._listening.gettimeout() is not None:  # the second
                self._end()
            self.signum = byte[0]
            self._listening.settimeout(GRACE_SECONDS)

    def _next_byte(self) -> bytes:
        try:
            return self._listening.recv(1)
        except TimeoutError:
            self._end()
            raise

    def _end(self) -> None:
        os.write(2, f"{self._last_words}\n".encode())
        os._exit(self.exit_code)
