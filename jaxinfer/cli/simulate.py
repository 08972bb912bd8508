"""`jaxinfer simulate`: latency under load, with the real scheduler and allocator and no device."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from jaxinfer.cli.command import command
from jaxinfer.cli.plan import (
    Chips,
    Dtype,
    HardwareName,
    Json,
    KVDtype,
    MaxTokens,
    Model,
    PageSize,
    Plot,
    Quantize,
    Utilization,
)
from jaxinfer.options.llm_options import LLMOptions


@command()
def run(
    model: Model,
    hardware: HardwareName = "auto",
    workload: Annotated[str, typer.Option(help="Lengths as in the Azure traces: conv or code.")] = "conv",
    requests: Annotated[int, typer.Option(help="Requests in all.")] = 20_000,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second (Poisson); what the traced service saw, when left out."),
    ] = None,
    chips: Chips = 1,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    kv_cache_dtype: KVDtype = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longer requests are cut to it, prompt first.")
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Rows that run at the same time.")
    ] = LLMOptions.max_num_seqs,
    max_num_batched_tokens: MaxTokens = 2048,
    num_pages: Annotated[int | None, typer.Option(help="Of the pool; what fits, when left out.")] = None,
    page_size: PageSize = None,
    utilization: Utilization = None,
    efficiency: Annotated[
        float | None,
        typer.Option(help="Share of the roofline that steps reach, 0 to 1; an estimate when left out."),
    ] = None,
    overhead_us: Annotated[float, typer.Option(help="Added to each step, in microseconds.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Simulate queueing: TTFT, TPOT, latency, pages and preemptions under an arrival rate."""
    from jaxinfer.options.model_source import named_facts
    from jaxinfer.options.resolve import resolve
    from jaxinfer.tools.planner import make_plan, report
    from jaxinfer.tools.planner import simulate as simulation
    from jaxinfer.tools.planner.workload import LENGTHS, arrivals

    if workload not in LENGTHS:
        raise typer.BadParameter(f"--workload {workload!r} must be one of {', '.join(LENGTHS)}")
    lengths = LENGTHS[workload]
    plan_options: dict[str, Any] = {
        "hardware": hardware,
        "chips": chips,
        "dtype": dtype,
        "quantize": quantize,
        "kv_cache_dtype": kv_cache_dtype,
        "page_size": page_size,
        "max_num_batched_tokens": max_num_batched_tokens,
        "utilization": utilization,
    }
    plan = make_plan(model, **plan_options)
    length = max_model_len or min(plan.memory.model_max_context, lengths.prompt[-1] + lengths.output[-1])
    plan = make_plan(model, **plan_options, context=length, batch=max_num_seqs)
    pages = num_pages or simulation.pages_that_fit(plan)
    rate = lengths.requests_per_second if rate is None else rate
    share = simulation.EFFICIENCY if efficiency is None else efficiency
    tokens = max(max_num_batched_tokens, max_num_seqs)
    options = {
        "dtype": plan.setting.shape.dtype,
        "max_model_len": length,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": tokens,
        "num_pages": pages,
        "page_size": plan.load.page_size,
    }
    # Pages are those of all chips together, so what fits is the plan's business.
    engine = resolve(
        LLMOptions.from_keywords(options),
        named_facts(model),
        plan.setting.hardware.device_facts,
        must_fit=False,
    )
    result = simulation.simulate(
        arrivals(lengths, requests, rate, max_model_len=length, seed=seed),
        simulation.StepTime(plan.setting, share, overhead_us / 1e6),
        engine.scheduler,
        engine.buckets,
        num_pages=engine.spec.num_pages,
        page_size=engine.spec.page_size,
    )
    if plot is not None:
        from jaxinfer.tools.planner import plots

        plots.plot_simulation(
            result,
            plot,
            title=f"{plan.setting.shape.name} on {chips} x {plan.setting.hardware.name}, "
            f"{plan.setting.shape.dtype}: {requests:,} requests of {workload}, {rate:g} per second",
        )
    if as_json:
        facts = {key: value for key, value in asdict(result).items() if key != "times"}
        facts |= {
            "percentiles": result.percentiles(),
            "output_tokens_per_second": result.output_tokens_per_second,
        }
        facts |= {"efficiency": share, "requests": requests, "rate": rate, "lengths": lengths.source}
        print(json.dumps(facts))
        return
    print(
        f"{requests:,} requests at {rate:g} per second, lengths as in: {lengths.source}\n"
        f"{plan.setting.shape.name} on {plan.setting.chips} x {plan.setting.hardware.title}, {max_num_seqs} "
        f"rows, {tokens} tokens per step, max_model_len={length}\n"
        f"steps take the roofline's time / {share:g}"
        + (" (an estimate; jaxinfer plan --measure says what it is here)" if efficiency is None else "")
        + "\n\n"
        + report.simulation_text(result)
    )
