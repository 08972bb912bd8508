"""`jaxinfer plan`: what fits, how fast it can be, and why. No weights are read."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxinfer.cli.command import command
from jaxinfer.options.llm_options import LLMOptions

ACCEPTANCE = 0.7

Model = Annotated[
    str,
    typer.Argument(help="Folder, config.json, .gguf file, catalog name or org/name; weights are not read."),
]
HardwareName = Annotated[
    str,
    typer.Option(
        help="h200, h100, b200, a100, v5e, v5p, v6e, tpu7x, cpu (this one, measured once), auto (the device "
        "here), or a .toml file.",
        metavar="NAME|FILE",
    ),
]
Chips = Annotated[int, typer.Option(help="Chips that share the model; a tpu7x chip is two JAX devices.")]
Dtype = Annotated[str, typer.Option(help="Of weights and activations: auto, float32, bfloat16, float16.")]
Quantize = Annotated[str | None, typer.Option(help="Of projections and MLPs: int8 or int4.")]
KVDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype", help="Of pages: auto (that of the model), bfloat16, float8_e4m3fn, int8, int4."
    ),
]
PageSize = Annotated[
    int | None, typer.Option(help="Tokens per page; what the engine takes there, when left out.")
]
MaxTokens = Annotated[
    int, typer.Option("--max-num-batched-tokens", help="Tokens of one step; bounds a prefill chunk.")
]
Utilization = Annotated[float | None, typer.Option(help="Share of the device's memory that is used, 0 to 1.")]
Plot = Annotated[Path | None, typer.Option(help="Write a picture to this file; needs the extra `plot`.")]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object; bytes are integers.")]


@command()
def run(
    model: Model,
    hardware: HardwareName = "auto",
    chips: Chips = 1,
    context: Annotated[int | None, typer.Option(help="Prompt and output tokens of each sequence.")] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Sequences at the same time; 1 when left out, with --here what the engine takes."),
    ] = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    kv_cache_dtype: KVDtype = "auto",
    page_size: PageSize = None,
    max_num_batched_tokens: MaxTokens = LLMOptions.max_num_batched_tokens,
    utilization: Utilization = None,
    output_tokens: Annotated[int | None, typer.Option(help="Part of the context that is output.")] = None,
    mix: Annotated[
        str | None, typer.Option(help="Request mix, PROMPT:OUTPUT:SHARE with commas between.", metavar="MIX")
    ] = None,
    observed: Annotated[
        str | None,
        typer.Option(
            help="TTFT_MS:TOKENS_PER_SECOND:TOKENS that you saw: their latency, summed both ways.",
            metavar="SEEN",
        ),
    ] = None,
    compare_attention: Annotated[
        bool, typer.Option("--compare-attention", help="MHA, GQA and MQA side by side.")
    ] = False,
    gqa_heads: Annotated[int | None, typer.Option(help="KV heads of GQA in that comparison.")] = None,
    acceptance: Annotated[
        float, typer.Option(help="Share of draft tokens accepted, for that lever.")
    ] = ACCEPTANCE,
    compile_step: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile the largest steps for the device here and read their temporaries."
        ),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Run the engine here: bound, measured and ratio of prefill and decode."
        ),
    ] = False,
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="Print only the plan that an engine started on this machine runs, or why it would refuse to.",
        ),
    ] = False,
    remeasure_cpu: Annotated[
        bool, typer.Option("--remeasure-cpu", help="Measure the CPU's peaks again.")
    ] = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Show memory, roofline, bounds and levers of a model on hardware that need not be here."""
    from jaxinfer.tools.planner import hardware as facts
    from jaxinfer.tools.planner import make_plan, report

    if here:
        others = {
            "--hardware": hardware != "auto",
            "--chips": chips != 1,
            "--quantize": quantize is not None,
            "--kv-cache-dtype": kv_cache_dtype != "auto",
            "--output-tokens": output_tokens is not None,
            "--mix": mix is not None,
            "--observed": observed is not None,
            "--compare-attention": compare_attention,
            "--gqa-heads": gqa_heads is not None,
            "--acceptance": acceptance != ACCEPTANCE,
            "--compile": compile_step,
            "--measure": measure,
            "--remeasure-cpu": remeasure_cpu,
            "--plot": plot is not None,
        }
        if any(others.values()):
            given = ", ".join(name for name, is_given in others.items() if is_given)
            raise typer.BadParameter(f"--here shows what the engine allocates; leave out {given}")
        _print_engine_plan(
            model,
            as_json,
            dtype=dtype,
            max_model_len=context,
            max_num_seqs=batch,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            gpu_memory_utilization=utilization,
        )
        return
    options: dict[str, Any] = {
        "hardware": hardware,
        "chips": chips,
        "context": context,
        "batch": 1 if batch is None else batch,
        "dtype": dtype,
        "quantize": quantize,
        "kv_cache_dtype": kv_cache_dtype,
        "page_size": page_size,
        "max_num_batched_tokens": max_num_batched_tokens,
        "utilization": utilization,
        "output_tokens": output_tokens,
        "mix": None if mix is None else _mix(mix),
        "gqa_heads": gqa_heads,
        "acceptance": acceptance,
    }
    if remeasure_cpu:
        facts.cpu(again=True)
    plan = make_plan(model, **options)
    if compile_step:
        plan = make_plan(model, **options, temporaries_bytes=_compiled_temporaries(model, plan))
    extra: dict[str, Any] = {}
    texts = [report.plan_text(plan)]
    if compare_attention:
        texts.append(report.attention_text(plan.attention, plan.load.context, plan.load.batch))
    if observed is not None:
        seen = _observed(observed)
        texts.append(report.end_to_end_text([(1.0, None, seen)], "end to end, of the figures you saw"))
        extra["observed"] = {"total_s": seen.total_s, "ttft_plus_n_over_tps_s": seen.circulated_s}
    if measure:
        texts.append(_measured(model, plan, extra))
    if plot is not None:
        from jaxinfer.tools.planner import plots

        plots.plot_roofline(plan, plot)
        texts.append(f"wrote {plot}")
    print(json.dumps(plan.to_json() | extra) if as_json else "\n\n".join(texts))


def _print_engine_plan(model: str, as_json: bool, **options: Any) -> None:
    """Options that are None are left to the engine."""
    import jax

    from jaxinfer.options.device_facts import facts_of
    from jaxinfer.options.model_source import named_facts
    from jaxinfer.options.resolve import resolve

    given = {name: value for name, value in options.items() if value is not None}
    resolved = resolve(LLMOptions.from_keywords(given), named_facts(model), facts_of(jax.devices()[0]))
    if not as_json:
        print("\n".join(resolved.lines()))
        return
    assert resolved.plan is not None
    choices = {name: asdict(choice) for name, choice in resolved.choices.items()}
    print(json.dumps(asdict(resolved.plan) | {"choices": choices, "programs": list(resolved.programs())}))


def _mix(text: str) -> list[tuple[int, int, float]]:
    kinds = []
    for part in text.split(","):
        try:
            prompt, output, share = part.split(":")
            kinds.append((int(prompt), int(output), float(share)))
        except ValueError:
            raise typer.BadParameter(
                f"--mix {part!r} is not PROMPT:OUTPUT:SHARE, such as 512:128:0.7"
            ) from None
    if any(prompt < 1 or output < 1 or share <= 0 for prompt, output, share in kinds):
        raise typer.BadParameter(f"--mix {text!r}: tokens must be at least 1 and shares more than 0")
    return kinds


def _observed(text: str) -> Any:
    from jaxinfer.tools.planner.roofline import EndToEnd

    try:
        ttft, rate, tokens = text.split(":")
        return EndToEnd(float(ttft) / 1e3, 1 / float(rate), int(tokens))
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(
            f"--observed {text!r} is not TTFT_MS:TOKENS_PER_SECOND:TOKENS, such as 800:8:256"
        ) from None


def _compiled_temporaries(model: str, plan: Any) -> int:
    """Bytes of temporaries of the programs that the engine would run here under this load."""
    import jax

    from jaxinfer.options.device_facts import facts_of
    from jaxinfer.options.model_source import named_facts
    from jaxinfer.options.resolve import resolve
    from jaxinfer.tools.planner import temporaries

    device, setting, load = facts_of(jax.devices()[0]), plan.setting, plan.load
    if device.platform != setting.hardware.platform:
        raise typer.BadParameter(
            f"--compile reads the program for the {device.platform} here, and --hardware "
            f"{setting.hardware.name} is a {setting.hardware.platform}; leave one of them out"
        )
    if setting.quantize is not None or setting.kv_dtype != setting.shape.dtype:
        raise typer.BadParameter(
            "--compile compiles programs of the engine, which has no weights in int8 or int4 alone and no quantized "
            "pages yet; leave out --quantize and --kv-cache-dtype"
        )
    options = LLMOptions(
        dtype=setting.shape.dtype,
        max_model_len=load.context,
        max_num_seqs=load.batch,
        max_num_batched_tokens=max(load.max_num_batched_tokens, load.batch),
        num_pages=plan.memory.num_pages,
        page_size=load.page_size,
    )
    # What does not fit is compiled all the same: it is what shows by how much.
    return temporaries.compiled(resolve(options, named_facts(model), device, must_fit=False))


def _measured(model: str, plan: Any, extra: dict[str, Any]) -> str:
    from jaxinfer.tools.planner import report
    from jaxinfer.tools.planner.measure import measure

    found = measure(
        model,
        batch=plan.load.batch,
        prompt=plan.prompt_tokens,
        output=plan.output_tokens,
        dtype=plan.setting.shape.dtype,
    )
    extra["measured"] = [
        {"name": c.name, "bound_s": c.bound_s, "measured_s": c.measured_s, "ratio": c.ratio}
        for c in found.comparisons
    ]
    extra["allocated_bytes"] = found.allocated_bytes
    rows = [(c.name, c.bound_s, c.measured_s) for c in found.comparisons]
    source = found.hardware.sources["memory_bandwidth"]
    return report.measurement_text(rows, found.planned_bytes, found.allocated_bytes, source)
