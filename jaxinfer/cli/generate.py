"""`jaxinfer generate`: one prompt, its completion as it is written, and what it took."""

import dataclasses
import math
import sys
from typing import Annotated, Any

import typer

from jaxinfer.cli.command import command, print_json, print_pairs, read_utf8
from jaxinfer.cli.options import (
    ENGINE,
    GENERATE_SAMPLING,
    JSON_ONLY,
    MetricsJson,
    Model,
    System,
    engine_options,
    flag,
    sampling_params,
    write_json,
)
from jaxinfer.cli.report import Run, block, follow, ids_of, text_of
from jaxinfer.sampling.params import check_characters

Prompt = Annotated[
    str | None,
    typer.Argument(
        help="Text to continue; - reads it from standard input.", metavar="PROMPT", show_default=False
    ),
]
Chat = Annotated[
    str | None,
    typer.Option("--chat", help="A message to answer through the chat template; - as above.", metavar="TEXT"),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object per sample instead of text.")]


@command(*GENERATE_SAMPLING, *ENGINE)
def run(
    *,
    prompt: Prompt = None,
    model: Model,
    chat: Chat = None,
    system: System = None,
    as_json: Json = False,
    metrics_json: MetricsJson = None,
    **options: Any,
) -> None:
    """Complete a prompt, or answer one message with --chat.

    The text goes to standard output token by token, what it took to standard error. Sampling is greedy
    (temperature 0) unless --temperature says otherwise. The last newline of standard input is no part of the
    prompt.
    """
    if (prompt is None) == (chat is None):
        raise typer.BadParameter("give a prompt (- for standard input) or --chat TEXT, and not both")
    if system is not None and chat is None:
        raise typer.BadParameter("--system goes with --chat: a plain prompt has no roles")
    wanted = [name for name in JSON_ONLY if name in options]
    if wanted and not as_json:
        raise typer.BadParameter(f"{flag(wanted[0])} is written in JSON only; add --json")
    params = sampling_params(options)
    text = prompt or chat or ""
    if text == "-":
        text = read_utf8(sys.stdin.buffer.read(), "standard input").removesuffix("\n")
    check_characters("the prompt" if chat is None else "the message", text)
    check_characters("--system", system or "")

    from jaxinfer.llm import LLM

    with LLM(model, **engine_options(options, params.n), background_compile=False) as llm:
        if chat is None:
            outputs = llm.stream(text, params)
        else:
            messages = [{"role": "user", "content": text}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            outputs = llm.stream_chat(messages, params)
        show = text_of if params.detokenize else ids_of
        result = follow(llm, outputs, show if params.n == 1 and not as_json else None)
        if as_json:
            for record in _records(result):
                print_json(record)
        elif params.n > 1:
            for sample in result.output.outputs:
                print(f"[{sample.index}] {show(sample)}")
        sys.stdout.flush()  # the answer stands before the block, also where both go to one file
        print_pairs(block(llm, result), stderr=True)
        if metrics_json is not None:
            from jaxinfer import metrics

            times = result.output.metrics
            each = [] if times is None else [metrics.request_json(times)]
            write_json(metrics_json, {"requests": each, "stats": metrics.to_json(llm.stats())})


def _records(result: Run) -> list[dict[str, Any]]:
    """One JSON object per sample; the fields of RequestOutput and CompletionOutput under their names."""
    output, metrics = result.output, result.output.metrics
    request = {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": output.prompt_logprobs,
        "num_cached_tokens": output.num_cached_tokens,
        "metrics": {
            "ttft_s": metrics and metrics.ttft_s,
            "tpot_s": metrics and metrics.tpot_s,
            "e2e_s": metrics and metrics.e2e_s,
            "queue_s": metrics and metrics.queue_s,
            "compile_s": result.compile_seconds,
            "tok_per_s": result.tokens_per_second,
        },
    }
    return [_plain(request | vars(sample)) for sample in output.outputs]


def _plain(value: Any) -> Any:
    """What JSON can hold: dataclasses as objects, infinities as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
