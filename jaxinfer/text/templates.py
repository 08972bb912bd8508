"""Runs chat templates in a child process that lasts (`template_worker.py`), so that each is bounded."""

import atexit
import marshal
import os
import signal
import subprocess
import sys
import threading
from datetime import datetime
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from jaxinfer.text import template_worker

# Of the clock, should the alarm of the child fail to end it (it is stopped, or the machine swaps).
MAX_SECONDS = 60.0
# The child ended by itself to be made anew, or somebody else ended it: the request is tried once more.
_NOT_THE_TEMPLATE = (0, -signal.SIGKILL, -signal.SIGTERM)


class ChatTemplateError(ValueError):
    """The template refused the conversation, or failed on it; the message is the template's own."""


def run(template: str, variables: dict[str, Any], now: datetime, content_format: str = "auto") -> str:
    """The text that a chat template makes of plain data (nested less than 2,000 deep).

    content_format: how content that comes as parts is given to it; see `template_worker.render`.

    Raises ChatTemplateError when the template refuses or fails, or takes more time, memory or text than
    `template_worker` allows it.
    """
    request = marshal.dumps((template, variables, now.replace(tzinfo=None).isoformat(), content_format))
    answer = _worker.ask(request)
    text = answer[1:].decode("utf-8", "surrogatepass")
    if answer[:1] == template_worker.TEXT:
        return text
    if answer[:1] == template_worker.OVER_LIMIT:
        raise ChatTemplateError(f"the chat template was stopped: {text}")
    raise ChatTemplateError(text)


class _Worker:
    """Holds the child process; starts it when it is first asked, and anew when it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def ask(self, request: bytes) -> bytes:
        """The answer to one request. Raises ChatTemplateError if the child ends over it."""
        with self._lock:
            try:
                code = None
                for _ in range(2):
                    answer = self._try(request)
                    if answer is not None:
                        return answer
                    code = self._end()
                    if code not in _NOT_THE_TEMPLATE:
                        break
            except BaseException:  # Ctrl-C: an answer to this request must not be taken for one to the next
                self._end()
                raise
        if code == -signal.SIGPROF:
            raise ChatTemplateError(
                f"the chat template was stopped: it ran for over {template_worker.MAX_CPU_SECONDS:g} s"
            )
        if code == 1:  # Python's for an exception; those of a template are caught
            raise ChatTemplateError(
                f"the process that runs chat templates does not start; {sys.executable} must be able to import jinja2"
            )
        raise ChatTemplateError(f"the chat template was stopped: it ended its process (exit code {code})")

    def close(self) -> None:
        """Ends the child, if there is one."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """In a child of `os.fork`: the process is the parent's, and its lock may have been held."""
        self.__init__()  # type: ignore[misc]

    def _try(self, request: bytes) -> bytes | None:
        """The answer, or None if the child has ended."""
        if self._process is None:
            self._process, self._connection = _start()
        assert self._connection is not None
        try:
            self._connection.send_bytes(request)
            if self._connection.poll(MAX_SECONDS):
                return self._connection.recv_bytes()
        except (EOFError, OSError):
            return None
        raise ChatTemplateError(f"the chat template was stopped: no answer in {MAX_SECONDS:g} s")

    def _end(self) -> int | None:
        """Closes the child and returns its exit code (None: there was none)."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        try:
            # It has ended, or ends at once now that the connection is closed, unless a template is under way.
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _start() -> tuple["subprocess.Popen[bytes]", Connection]:
    """A child with our search path and no other file of ours than its end of the connection."""
    if not sys.executable:
        raise ChatTemplateError(
            "chat templates run in a process of their own, and sys.executable names no Python"
        )
    home = str(Path(__file__).parents[2])
    paths = [*(path for path in sys.path if isinstance(path, str)), home]
    ours, theirs = Pipe()
    with theirs:
        program = (
            f"import sys; sys.dont_write_bytecode = True; sys.path[:] = {paths!r}; "
            f"from jaxinfer.text.template_worker import main; main({theirs.fileno()})"
        )
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,  # the terminal's Ctrl-C does not reach it
        )
    return process, ours


_worker = _Worker()
atexit.register(_worker.close)
os.register_at_fork(after_in_child=_worker.forget)
