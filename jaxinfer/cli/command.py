"""What all commands share: generated options, errors in one sentence, exit codes, quiet logs."""

import errno
import functools
import inspect
import io
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Debug = Annotated[bool, typer.Option("--debug", help="Show log lines, and the traceback of an error.")]


class SectionedHelp(TyperCommand):
    """Plain help with the options under the title of their `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                title = getattr(param, "rich_help_panel", None) or (
                    "Arguments" if param.param_type_name == "argument" else "Options"
                )
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def command(
    *options: inspect.Parameter,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function with `**options` a command: `options` become its own, `--debug` too.

    The function is called with what was given on the command line, and with nothing for the rest.
    Its exceptions become one sentence on stderr and exit code 1; Ctrl-C one line and 130.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def wrapped(*, debug: bool, **given: Any) -> None:
            _set_up_streams()
            _set_up_logs(debug)
            with _reported(debug):
                function(**{name: value for name, value in given.items() if value not in (None, [], ())})

        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
        wrapped.__signature__ = inspect.Signature([*own, debug, *options])  # type: ignore[attr-defined]
        return wrapped

    return decorate


@contextmanager
def _reported(debug: bool) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        fail("Interrupted.", prefix="\n" if sys.stderr.isatty() else "")  # behind the terminal's ^C
        raise typer.Exit(130) from None
    except Exception as error:
        # Typer's own (wrong usage, exit) and a closed pipe are typer's business.
        if type(error).__module__.startswith(("typer", "click")) or _is_closed_pipe(error):
            raise
        if debug:
            traceback.print_exc()
        fail(f"Error: {_sentence(error)}")
        raise typer.Exit(1) from None


def _is_closed_pipe(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EPIPE


def _sentence(error: Exception) -> str:
    """The first line of the message; the type where the message alone would say nothing."""
    lines = str(error).strip().splitlines()
    if not lines:
        return f"{type(error).__name__}; --debug shows where"
    if isinstance(error, LookupError | AttributeError | AssertionError):  # nobody's message: a fault of ours
        return f"{type(error).__name__}: {lines[0]}; --debug shows where"
    return lines[0]


def fail(sentence: str, *, prefix: str = "") -> None:
    """One line on stderr, after whatever has been written to stdout."""
    sys.stdout.flush()
    print(f"{prefix}{sentence}", file=sys.stderr)


def read_utf8(content: bytes, name: str) -> str:
    """Text of `content`. Raises ValueError if it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: byte {error.start} is wrong") from None


def print_json(value: Any) -> None:
    """One line of JSON on stdout; in ASCII where stdout is not UTF-8."""
    print(json.dumps(value, ensure_ascii=sys.stdout.encoding.lower() not in ("utf-8", "utf8")))


def print_pairs(pairs: Sequence[tuple[str, str]], *, stderr: bool = False) -> None:
    """Lines of name and value, the values aligned. Styled on a terminal only; never cut or wrapped."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=stderr, highlight=False)
    width = max(len(name) for name, _ in pairs)
    sys.stdout.flush()
    for name, value in pairs:
        line = Text.assemble((name.ljust(width), "bold"), "  ", (value, "dim" if stderr else ""))
        console.print(line, soft_wrap=True)


def _set_up_streams() -> None:
    """Makes stdout take any text, escaped where its encoding lacks a character, and closed streams empty ones."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (for as long as the process)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        print("Error: standard output is closed; redirect it, to /dev/null if need be", file=sys.stderr)
        raise typer.Exit(1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _set_up_logs(debug: bool) -> None:
    """Warnings of this project on stderr; of the libraries errors only. Everything with `--debug`."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("%(name)s: %(message)s" if debug else "%(levelname)s: %(message)s")
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("jaxinfer").setLevel(logging.DEBUG if debug else logging.WARNING)
    if not debug:
        logging.getLogger("jax").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's own lines, read when jax is imported
