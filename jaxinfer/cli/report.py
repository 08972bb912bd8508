"""An answer as it is written, and what it took."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxinfer.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from jaxinfer.llm import LLM


@dataclass(frozen=True)
class Run:
    """A finished request, and the seconds spent compiling before its first token and in all."""

    output: RequestOutput
    compile_before_first: float
    compile_seconds: float

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.output.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.output.outputs)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all samples, after the first token."""
        metrics, more = self.output.metrics, self.num_output_tokens - len(self.output.outputs)
        if metrics is None or metrics.first_token_time is None or metrics.last_token_time is None:
            return None
        seconds = metrics.last_token_time - metrics.first_token_time
        return more / seconds if more > 0 and seconds > 0 else None


def follow(
    llm: "LLM", outputs: Iterable[RequestOutput], show: Callable[[CompletionOutput], str] | None
) -> Run:
    """Reads a stream to its end; writes what `show` makes of its first sample to stdout as it grows.

    Raises RuntimeError if the request failed or was aborted.
    """
    before = llm.engine.programs.compile_seconds
    compile_before_first, written, output = None, 0, None
    for output in outputs:
        if compile_before_first is None:
            compile_before_first = llm.engine.programs.compile_seconds - before
        if show is not None:
            text = show(output.outputs[0])
            sys.stdout.write(text[written:])
            sys.stdout.flush()
            written = len(text)
    if show is not None:
        print(flush=True)
    if output is not None and output.error is not None:
        raise RuntimeError(output.error)
    if output is None or any(sample.finish_reason == "abort" for sample in output.outputs):
        raise RuntimeError("the request was aborted before it was done")
    return Run(output, compile_before_first or 0.0, llm.engine.programs.compile_seconds - before)


def text_of(sample: CompletionOutput) -> str:
    return sample.text


def ids_of(sample: CompletionOutput) -> str:
    return " ".join(map(str, sample.token_ids))


def block(llm: "LLM", run: Run) -> list[tuple[str, str]]:
    """What ran where and how fast, as pairs of name and value."""
    spec, choice, programs = llm.engine.spec, llm.resolved.choices["attention"], llm.engine.programs
    ends = [sample.finish_reason for sample in run.output.outputs]
    length = " (ended by --max-tokens or the model's context)" if "length" in ends else ""
    return [
        ("device", llm.device_choice),
        ("attention", f"{choice.value}: {choice.reason}"),
        ("tokens", f"{run.num_prompt_tokens} prompt + {run.num_output_tokens} output{length}"),
        ("TTFT", _ttft(run)),
        ("TPOT", _tpot(run)),
        (
            "KV pages",
            f"{llm.stats().peak_pages_used} of {llm.stats().pages_total} used, {spec.page_size} tokens each",
        ),
        ("programs", f"{len(programs)} compiled in {programs.compile_seconds:.2f} s"),
    ]


def line(llm: "LLM", run: Run) -> str:
    """The same in one line, for one turn of a chat."""
    ended = ", ended by length" if run.output.outputs[0].finish_reason == "length" else ""
    return (
        f"{run.num_prompt_tokens} prompt + {run.num_output_tokens} output tokens{ended}, TTFT {_ttft(run)}, "
        f"TPOT {_tpot(run)}, {llm.stats().peak_pages_used} of {llm.stats().pages_total} pages"
    )


def _ttft(run: Run) -> str:
    seconds = run.output.metrics.ttft_s if run.output.metrics else None
    if seconds is None:
        return "no token"
    compiling = run.compile_before_first
    return f"{seconds:.3f} s" + (f" ({compiling:.2f} s of it compiling)" if compiling >= 0.005 else "")


def _tpot(run: Run) -> str:
    seconds = run.output.metrics.tpot_s if run.output.metrics else None
    if seconds is None or run.tokens_per_second is None:
        return "only one token"
    return f"{seconds * 1000:.1f} ms ({run.tokens_per_second:.1f} tok/s)"
