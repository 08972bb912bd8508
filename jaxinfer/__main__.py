"""The entry point of the command, and of `python -m jaxinfer`.

It imports next to nothing, so that Ctrl-C ends the command with one line from its first moments on, also while the rest
is being imported.
"""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Runs the command `jaxinfer`; see `jaxinfer.cli.main` for its exit codes."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from jaxinfer import cli

    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


def _leave(signum: int, frame: FrameType | None) -> None:
    os.write(sys.stderr.fileno(), b"Interrupted.\n")
    os._exit(130)


if __name__ == "__main__":
    main()
