"""`jaxinfer chat`: a conversation of several turns, at a terminal or from a pipe."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from jaxinfer.cli.command import command, fail, read_utf8
from jaxinfer.cli.options import (
    ENGINE,
    JSON_ONLY,
    SAMPLING,
    Model,
    System,
    engine_options,
    sampling_params,
    without,
)
from jaxinfer.cli.report import follow, line, text_of
from jaxinfer.sampling.params import SamplingParams, check_characters

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

COMMANDS = "/reset begins anew, /system TEXT sets the system message, /quit ends"


@command(*without(SAMPLING, "n", "detokenize", *JSON_ONLY), *ENGINE)
def run(model: Model, system: System = None, **options: Any) -> None:
    """Talk with a model; each line is one message.

    /reset begins anew, /system TEXT sets the system message, /quit (or the end of the input) ends. A message
    that begins with a slash needs a space before it. Greedy unless --temperature says otherwise.
    """
    params = sampling_params(options)
    check_characters("--system", system or "")

    from jaxinfer.llm import LLM

    with LLM(model, **engine_options(options, 1)) as llm:
        if sys.stdin.isatty():
            fail(f"Chat with {model}. {COMMANDS}.")
        if not _converse(llm, params, system):
            raise typer.Exit(1)


def _converse(llm: "LLM", params: SamplingParams, system: str | None) -> bool:
    """All turns. False if one of them failed; the others go on without it."""
    turns: list[dict[str, str]] = []
    done = True
    for number, content in enumerate(_lines(), start=1):
        try:
            text = read_utf8(content, f"line {number}")
        except ValueError as error:
            fail(f"Error: {error}")
            done = False
            continue
        word, _, rest = text.partition(" ")
        if word == "/quit":
            break
        elif word == "/reset":
            turns = []
        elif word == "/system":
            system = rest.strip() or None
        elif word.startswith("/"):
            fail(f"Error: there is no {word}: {COMMANDS}; put a space before text with a slash")
            done = False
        elif text.strip():
            before = [] if system is None else [{"role": "system", "content": system}]
            message = {"role": "user", "content": text.strip()}
            try:
                result = follow(llm, llm.stream_chat([*before, *turns, message], params), text_of)
            except (
                ValueError,
                RuntimeError,
            ) as error:  # this turn cannot run: too long, or not for the template
                fail(f"Error: {error}")
                done = False
                continue
            turns += [message, {"role": "assistant", "content": result.output.outputs[0].text}]
            fail(f"[{line(llm, result)}]")
    return done


def _lines() -> Iterator[bytes]:
    """Lines of standard input; at a terminal with a prompt and line editing."""
    if not sys.stdin.isatty():
        yield from (line.rstrip(b"\r\n") for line in sys.stdin.buffer)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() its history and editing)
    while True:
        try:
            yield input("> ").encode(errors="surrogatepass")
        except EOFError:
            print()
            return
