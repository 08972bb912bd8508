"""`jaxinfer bench`: throughput and latency on a load, beside what the device allows."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jaxinfer.cli.command import command
from jaxinfer.cli.options import (
    MAX_ROWS,
    SAMPLING,
    THROUGHPUT_ENGINE,
    MetricsJson,
    engine_options,
    flag,
    sampling_fields,
    without,
    write_json,
)

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.tools.bench.workload import Offer

Model = Annotated[
    str, typer.Argument(help="Catalog name, Hugging Face folder, or .gguf file.", metavar="MODEL")
]
Mode = Annotated[
    Literal["throughput", "latency"],
    typer.Option(help="Offer requests as they come, or one after the other."),
]
LENGTHS = "N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"
Requests = Annotated[
    int | None,
    typer.Option(help="Requests in all; 64, or all lines of --dataset.", min=1, show_default=False),
]
PromptLen = Annotated[str, typer.Option(help=f"Tokens of random prompts: {LENGTHS}.", metavar="LENGTHS")]
OutputLen = Annotated[str, typer.Option(help=f"Tokens of outputs: {LENGTHS}.", metavar="LENGTHS")]
Dataset = Annotated[
    Path | None,
    typer.Option(help="JSON lines with prompt or prompt_token_ids, and max_tokens or not.", metavar="FILE"),
]
Rate = Annotated[float, typer.Option(help="Requests per second (Poisson); inf: all at once.")]
Seed = Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.", min=0)]
NoCache = Annotated[
    bool, typer.Option("--compare-no-cache", help="Also with everything recomputed for each token (greedy).")
]
Contiguous = Annotated[
    bool, typer.Option("--compare-contiguous", help="Also with max_model_len slots reserved per sequence.")
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object instead of tables.")]
Trace = Annotated[
    Path | None,
    typer.Option(help="Write a timeline for ui.perfetto.dev or chrome://tracing.", metavar="FILE"),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        help="Write a picture of latencies, rows and pages; needs the extra `plot`.", metavar="FILE"
    ),
]
Profile = Annotated[
    Path | None, typer.Option(help="Write a profile of JAX for XProf.", metavar="FOLDER", file_okay=False)
]


@command(*without(SAMPLING, "n", "seed", "max_tokens"), *THROUGHPUT_ENGINE)
def run(
    *,
    model: Model,
    mode: Mode = "throughput",
    requests: Requests = None,
    prompt_len: PromptLen = "uniform:32:512",
    output_len: OutputLen = "uniform:16:256",
    dataset: Dataset = None,
    rate: Rate = float("inf"),
    seed: Seed = 0,
    compare_no_cache: NoCache = False,
    compare_contiguous: Contiguous = False,
    as_json: Json = False,
    metrics_json: MetricsJson = None,
    trace: Trace = None,
    plot: Plot = None,
    profile: Profile = None,
    **options: Any,
) -> None:
    """Measure an engine that is warm: tokens per second, TTFT, TPOT, ITL, E2E, and how near that is to the limit.

    Greedy unless --temperature says otherwise; end tokens are ignored, so that each output has its length.
    A comparison runs instead of the plain benchmark.
    """
    alone = [name for name, given in {
        "--trace": trace, "--plot": plot, "--profile": profile, "--metrics-json": metrics_json,
    }.items() if given is not None]  # fmt: skip
    if compare_no_cache and compare_contiguous:
        raise typer.BadParameter(
            "--compare-no-cache and --compare-contiguous are runs of their own; give one"
        )
    if (compare_no_cache or compare_contiguous) and alone:
        raise typer.BadParameter(f"{alone[0]} goes with the plain benchmark, not with a comparison")
    if mode == "latency" and rate != float("inf"):
        raise typer.BadParameter("--mode latency offers one request after the other; leave --rate out")
    if compare_no_cache:
        names = {option.name for option in SAMPLING} | {"decode_steps", "enable_prefix_caching"}
        inert = sorted(names & options.keys())
        if inert or mode == "latency" or rate != float("inf"):
            raise typer.BadParameter(
                "--compare-no-cache is greedy, one step at a time, without a prefix cache, all requests at once; leave "
                f"{', '.join(map(flag, inert)) or '--mode and --rate'} out"
            )
    fields = sampling_fields(options)

    from rich.console import Console

    from jaxinfer.tools.bench import report
    from jaxinfer.tools.bench.workload import Lengths, at_rate, random_offers, read_offers

    try:
        lengths = Lengths.parse(prompt_len), Lengths.parse(output_len)
        at_rate([], rate)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if dataset is not None and not dataset.is_file():
        raise typer.BadParameter(f"there is no file {dataset}")
    console = Console(highlight=False)
    engine = engine_options(options)
    max_num_seqs = engine.get("max_num_seqs", MAX_ROWS)

    def open_llm(**changes: Any) -> "LLM":
        from jaxinfer.llm import LLM

        return LLM(model, **engine | changes, background_compile=False)

    def offers_for(vocab_size: int, max_model_len: int, count: int) -> "list[Offer]":
        if dataset is not None:
            found = read_offers(dataset, lengths[1], count=requests, seed=seed)
        else:
            found = random_offers(
                requests or count, *lengths, vocab_size=vocab_size, max_model_len=max_model_len, seed=seed
            )
        return at_rate(found, rate, seed)

    if compare_contiguous or compare_no_cache:
        from jaxinfer.tools.bench import compare
        from jaxinfer.tools.bench.run import measured_hardware

        if compare_no_cache:
            with open_llm(decode_steps=1, enable_prefix_caching=False) as llm:
                facts = measured_hardware(llm)
                rows = min(4, max_num_seqs)
                cached = compare.no_cache(
                    llm, offers_for(llm.config.vocab_size, llm.max_model_len, rows), facts
                )
            print(json.dumps(cached.to_json())) if as_json else report.print_no_cache(console, cached)
        else:
            with open_llm() as llm:
                offers = offers_for(llm.config.vocab_size, llm.max_model_len, MAX_ROWS)
            reserved = compare.contiguous(
                lambda **changes: open_llm(**_pool(engine, changes)), offers, fields, max_num_seqs
            )
            print(json.dumps(reserved.to_json())) if as_json else report.print_contiguous(console, reserved)
        return

    with open_llm() as llm:
        import jax

        from jaxinfer import metrics
        from jaxinfer.tools import timeline
        from jaxinfer.tools.bench import run as bench

        bench.measured_hardware(llm)
        offers = offers_for(llm.config.vocab_size, llm.max_model_len, MAX_ROWS)
        bench.warm(llm, offers, fields)
        recording = metrics.Recording(llm.engine.clock) if trace or plot else None
        llm.engine.recording = recording
        with jax.profiler.trace(profile) if profile is not None else contextlib.nullcontext():
            result = bench.run(llm, offers, fields, max_under_way=1 if mode == "latency" else None)
        if recording is not None:
            recording.close()
        if recording is not None and trace is not None:
            timeline.write(recording, trace)
        if recording is not None and plot is not None:
            from jaxinfer.tools.planner import plots

            title = f"{model} on {llm.device_choice}, {llm.config.dtype}: {mode}, {len(offers):,} requests"
            plots.plot_recording(recording, llm.engine.spec.num_pages - 1, plot, title=title)
        if metrics_json is not None:
            each = [metrics.request_json(o.metrics) for o in result.outputs if o.metrics is not None]
            write_json(metrics_json, {"requests": each, "stats": metrics.to_json(llm.stats())})
        where = {
            "model": model,
            "mode": mode,
            "device": llm.device_choice,
            "dtype": llm.config.dtype,
            "kv_cache": llm.engine.spec.describe(),
        }
    if as_json:
        print(json.dumps(where | result.to_json()))
    else:
        console.print(
            f"{model} on {where['device']}, {where['dtype']}, KV cache {where['kv_cache']}", soft_wrap=True
        )
        report.print_result(console, result)


def _pool(engine: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The options that change; pages given by number replace what set the size of the pool."""
    if changes["num_pages"] is None:
        return {"max_num_seqs": changes["max_num_seqs"], "enable_prefix_caching": False}
    others = ("kv_cache_memory_bytes", "gpu_memory_utilization")
    return changes | {"enable_prefix_caching": False} | {name: None for name in others if name in engine}
