"""`jaxinfer batch`: a file of requests, a file of results, and everything between that can go wrong."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.command import command, fail, print_pairs
from jaxinfer.cli.options import (
    SAMPLING,
    THROUGHPUT_ENGINE,
    MetricsJson,
    Model,
    engine_options,
    sampling_params,
    without,
    write_json,
)
from jaxinfer.request import TopK
from jaxinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.tools.batch_runner.progress import Totals

Input = Annotated[Path, typer.Argument(help="Requests: JSON lines, .csv or .parquet.", metavar="IN")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Results, as JSON lines.", metavar="OUT")]
Errors = Annotated[
    Path | None, typer.Option(help="Write lines that failed here, not to OUT.", metavar="FILE")
]
Seed = Annotated[
    int, typer.Option(help="Of lines that name none: each draws from a hash of this and its id.", min=0)
]
PromptColumn = Annotated[str | None, typer.Option(help="Of a .csv or .parquet file.", metavar="NAME")]
AsChat = Annotated[
    bool, typer.Option("--chat", help="Answer each text of the column through the chat template.")
]
Shard = Annotated[
    str, typer.Option(help="Do part i of n, from 1/n to n/n; then jaxinfer merge.", metavar="i/n")
]
Ordered = Annotated[
    bool, typer.Option("--ordered", help="Write results in the order of the input, not as they finish.")
]
DumpTopk = Annotated[
    int | None,
    typer.Option(help="Write so many top tokens of each token of prompts and outputs to OUT.dump.", min=1),
]
Dump = Annotated[
    bool,
    typer.Option(
        "--dump", help="Write what --logprobs and --prompt-logprobs ask for to OUT.dump, as arrays."
    ),
]
MaxFailures = Annotated[int | None, typer.Option(help="Stop when more lines than this have failed.", min=0)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on, or fail if there is nothing to go on with.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete OUT and begin anew.")]
# Options of the engine that decide what a finished job would have answered; `engine_facts` checks the rest.
DECIDING = (
    "dtype",
    "quantize",
    "few_rows",
    "max_model_len",
    "matmul_precision",
    "logprobs_mode",
    "implementation",
)
Price = Annotated[float | None, typer.Option(help="Of the machine; shows cost per million tokens.", min=0.0)]
Exact = Annotated[
    bool, typer.Option("--exact", help="A resumed job has the same bits as one that ran through; slower.")
]


@command(*without(SAMPLING, "seed"), *without(THROUGHPUT_ENGINE, "batch_invariant"))
def run(
    *,
    input: Input,
    output: Output,
    model: Model,
    errors: Errors = None,
    seed: Seed = 0,
    prompt_column: PromptColumn = None,
    chat: AsChat = False,
    shard: Shard = "1/1",
    ordered: Ordered = False,
    dump_topk: DumpTopk = None,
    dump: Dump = False,
    max_failures: MaxFailures = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    metrics_json: MetricsJson = None,
    price_per_hour: Price = None,
    exact: Exact = False,
    **options: Any,
) -> None:
    """Answer every line of a file; run the same command again to go on after an interruption.

    A line is a request in OpenAI's batch form, or a plain object with prompt or messages and sampling fields
    beside. Results come in OpenAI's batch output form, in the order in which they finish. The sampling options
    are for lines that leave a field out; greedy unless --temperature or the line says otherwise.

    Exit code 0: every line has its answer; 1: some failed; 130, 143: interrupted.
    """
    if resume and overwrite:
        raise typer.BadParameter("--resume goes on and --overwrite begins anew; give one of them")
    part = _shard(shard)
    topk, defaults = _dump(dump_topk, dump, sampling_params(options))

    from jaxinfer.checkpoints import fetch
    from jaxinfer.tools.batch_runner import runner
    from jaxinfer.tools.batch_runner.interruption import Interruption
    from jaxinfer.tools.batch_runner.manifest import model_hash
    from jaxinfer.tools.batch_runner.progress import Totals

    def open_llm() -> Any:
        from jaxinfer.llm import LLM

        engine = engine_options(options)
        return LLM(model, batch_invariant=exact, **engine)

    totals = Totals()
    go_on = f"Results so far are in {output}; the same command goes on."
    with Interruption(f"Interrupted. {go_on}") as interruption:
        job = runner.Job(
            input=input,
            output=output,
            model=model,
            model_hash=model_hash(fetch.resolve(model, options.get("revision"), options.get("token"))),
            exact=exact,
            engine_options=tuple((name, options[name]) for name in DECIDING if name in options),
            defaults=defaults,
            seed=seed,
            prompt_column=prompt_column,
            as_chat=chat,
            errors=errors,
            shard=part,
            ordered=ordered,
            dump=topk,
            max_failures=max_failures,
            resume=resume,
            overwrite=overwrite,
        )
        try:
            runner.run(job, open_llm, totals, interrupted=lambda: bool(interruption))
        finally:
            if metrics_json is not None:
                write_json(metrics_json, totals.metrics(price_per_hour))
    _summarize(totals, price_per_hour)
    if totals.num_left:
        fail(f"Interrupted. {go_on}")
        raise typer.Exit(interruption.exit_code)
    if totals.num_failed:
        raise typer.Exit(1)


def _shard(text: str) -> tuple[int, int]:
    part, _, of = text.partition("/")
    if not (part.isdecimal() and of.isdecimal() and 1 <= int(part) <= int(of)):
        raise typer.BadParameter(f"--shard {text} must be i/n with i from 1 to n")
    return int(part), int(of)


def _dump(dump_topk: int | None, dump: bool, defaults: SamplingParams) -> tuple[TopK | None, SamplingParams]:
    """What is dumped, and what is left for the lines themselves."""
    if dump_topk is not None:
        if dump:
            raise typer.BadParameter("--dump-topk says what is dumped; leave out --dump")
        return TopK(dump_topk, dump_topk), defaults
    if not dump:
        return None, defaults
    topk = TopK(defaults.prompt_logprobs, defaults.logprobs)
    if topk == TopK(None, None) or -1 in topk:
        raise typer.BadParameter(
            "--dump needs --logprobs or --prompt-logprobs, of 0 to 20; --dump-topk takes more"
        )
    return topk, dataclasses.replace(defaults, logprobs=None, prompt_logprobs=None)


def _summarize(totals: "Totals", price_per_hour: float | None) -> None:
    metrics = totals.metrics(price_per_hour)
    before = f", {totals.num_before:,} by earlier runs" if totals.num_before else ""
    pairs = [("lines", f"{totals.num_lines:,}, {totals.num_before + totals.num_done:,} done{before}")]
    if totals.num_damaged:
        pairs.append(("damaged", f"{totals.num_damaged:,} lines of earlier runs, answered again"))
    for code, count in totals.failures.most_common():
        pairs.append(("failed", f"{count:,} {code}, such as {totals.examples[code]}"))
    for name, count in totals.inert.most_common():
        pairs.append(("no effect", f"{name} in {count:,} lines"))
    if totals.num_done:
        pairs.append(
            (
                "tokens",
                f"{totals.num_prompt_tokens:,} prompt ({totals.num_cached_tokens:,} cached) + "
                f"{totals.num_output_tokens:,} output in {totals.seconds:,.1f} s, "
                f"{metrics['output_tokens_per_s']:,.1f} tok/s out",
            )
        )
    if totals.compile_seconds >= 1:  # sums over threads, beside which other programs run
        pairs.append(
            ("compiled", f"programs, which took {totals.compile_seconds:,.1f} s of all threads together")
        )
    if metrics["cost_per_million_tokens"] is not None:
        pairs.append(
            (
                "cost",
                f"{metrics['cost']:,.4f}, {metrics['cost_per_million_tokens']:,.4f} per million tokens of "
                f"prompt and output",
            )
        )
    print_pairs(pairs, stderr=True)
