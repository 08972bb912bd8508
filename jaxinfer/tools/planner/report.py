"""A plan, a measurement or a simulation as text for people."""

from collections.abc import Iterable, Mapping, Sequence

from jaxinfer.text.wording import size
from jaxinfer.tools.planner.plan import Plan
from jaxinfer.tools.planner.roofline import AttentionKind, Bound, EndToEnd, OperatorGroup
from jaxinfer.tools.planner.simulate import Simulation


def plan_text(plan: Plan) -> str:
    """Memory, roofline, bounds, levers and end-to-end times of a plan."""
    parts = [_heading(plan), _memory(plan)]
    parts.append(
        _phase(
            f"prefill, {plan.prompt_tokens} tokens of one sequence", plan.prefill_groups, plan.prefill_bound
        )
    )
    rows = f"{plan.load.batch} row{'s' if plan.load.batch > 1 else ''} of {plan.load.context} tokens"
    parts.append(_phase(f"decode, one step of {rows}", plan.decode_groups, plan.decode_bound))
    parts += [
        _bounds(plan),
        _levers(plan),
        end_to_end_text((k.share, k.prompt_tokens, k.bound) for k in plan.mix),
    ]
    parts.append(_sources(plan))
    return "\n\n".join(parts)


def attention_text(kinds: Sequence[AttentionKind], context: int, batch: int) -> str:
    """MHA, GQA and MQA side by side."""
    rows = [
        (
            kind.name,
            f"{kind.num_kv_heads}",
            size(kind.kv_bytes_per_token),
            size(kind.kv_bytes_per_sequence),
            f"{kind.saving:.1%}",
            time(kind.tpot_s),
        )
        for kind in kinds
    ]
    return table(
        f"attention kinds at {context} tokens, decode of {batch}",
        ("", "KV heads", "KV per token", "per sequence", "saving", "TPOT at least"),
        rows,
    )


def end_to_end_text(
    kinds: Iterable[tuple[float, int | None, EndToEnd]], title: str = "end to end, at best"
) -> str:
    """Latency of requests, summed both ways."""
    kinds = list(kinds)
    rows = [
        (
            f"{share:.0%}",
            "" if prompt is None else f"{prompt}",
            f"{e2e.num_tokens}",
            time(e2e.ttft_s),
            time(e2e.tpot_s),
            f"{e2e.tokens_per_second:,.1f}",
            time(e2e.total_s),
            time(e2e.circulated_s),
        )
        for share, prompt, e2e in kinds
    ]
    if len(kinds) > 1:
        weight = sum(share for share, _, _ in kinds)
        mean, other = (
            sum(share * value for (share, _, _), value in zip(kinds, values, strict=True)) / weight
            for values in ([e.total_s for _, _, e in kinds], [e.circulated_s for _, _, e in kinds])
        )
        rows.append(("mean", "", "", "", "", "", time(mean), time(other)))
    return table(
        title,
        (
            "share",
            "prompt",
            "output",
            "TTFT",
            "TPOT",
            "tok/s",
            "TTFT + (n-1) TPOT",
            "TTFT + n/TPS (one TPOT too much)",
        ),
        rows,
    )


def simulation_text(result: Simulation) -> str:
    """Percentiles and pages of a simulated run."""
    rows = [
        (name.removesuffix("_s").upper(), *(time(values[p]) for p in ("p50", "p90", "p99")))
        for name, values in result.percentiles().items()
    ]
    total = sum(times.num_tokens for times in result.times)
    pairs = [
        ("requests", f"{len(result.times):,}"),
        (
            "simulated time",
            f"{time(result.duration_s)}, the device busy {result.busy_s / result.duration_s:.0%} of it",
        ),
        ("output tokens", f"{total:,}, {result.output_tokens_per_second:,.0f} per second"),
        ("programs run", f"{result.num_steps:,}"),
        ("pages", f"{result.peak_pages:,} of {result.num_pages - 1:,} at the most"),
        ("preemptions", f"{result.num_preemptions:,}"),
    ]
    return table("latency", ("", "p50", "p90", "p99"), rows) + "\n\n" + _pairs("run", pairs)


def measurement_text(
    comparisons: Sequence[tuple[str, float, float]],
    planned: Mapping[str, int],
    allocated: Mapping[str, int],
    source: str,
) -> str:
    """Bounds (name, bound s, measured s) and bytes as planned, beside what was measured and allocated."""
    times = table(
        "measured here",
        ("", "bound", "measured", "measured / bound"),
        [(name, time(bound), time(found), f"{found / bound:.2f}x") for name, bound, found in comparisons],
    )
    sizes = table(
        "allocated",
        ("", "planned", "allocated"),
        [(name, f"{planned[name]:,}", f"{allocated[name]:,}") for name in planned],
    )
    return f"{times}\npeaks: {source}\n\n{sizes}"


def _heading(plan: Plan) -> str:
    setting = plan.setting
    shape, hardware = setting.shape, setting.hardware
    chips = f"{setting.chips} x {hardware.title}"
    if hardware.devices_per_chip > 1:
        chips += (
            f" ({setting.num_devices} JAX devices: chips are counted, each is {hardware.devices_per_chip})"
        )
    quantized = f", projections and MLPs in {setting.quantize}" if setting.quantize else ""
    return (
        f"{shape.name}: {shape.num_params:,} parameters in {shape.dtype}{quantized}, {shape.num_layers} "
        f"layers, {shape.num_q_heads} query and {shape.num_kv_heads} KV heads of {shape.head_dim}, pages in "
        f"{setting.kv_dtype}\n"
        f"on {chips}"
    )


def _memory(plan: Plan) -> str:
    memory, load = plan.memory, plan.load
    rows = [
        ("weights", memory.weights_bytes, ""),
        ("  of them embedding and head", memory.embedding_bytes, ""),
        ("KV cache per token", memory.kv_bytes_per_token, ""),
        (f"KV cache per sequence of {load.context}", memory.kv_bytes_per_sequence, ""),
        (f"KV cache of {load.batch}", memory.kv_bytes_total, ""),
        (
            "page pool",
            memory.pool_bytes,
            f"{memory.num_pages} pages of {load.page_size} tokens, the null page too",
        ),
        ("row state", memory.row_state_bytes, ""),
        ("temporaries", memory.temporaries_bytes, memory.temporaries_source),
        ("total", memory.total_bytes, f"{size(memory.total_bytes_per_device)} per device"),
        (
            "usable",
            memory.usable_bytes,
            f"{load.utilization:.0%} of {size(memory.memory_bytes_per_device)} per device",
        ),
        ("left", memory.left_bytes, "" if memory.fits else "DOES NOT FIT"),
    ]
    text = table("memory", ("", "bytes", "", ""), [(a, f"{b:,}", size(b), c) for a, b, c in rows])
    return (
        f"{text}\nlargest batch at {load.context} tokens: {memory.largest_batch:,}; longest context at batch "
        f"{load.batch}: {memory.longest_context:,} (the model's own maximum is {memory.model_max_context:,})"
    )


def _phase(title: str, groups: Sequence[OperatorGroup], bound: Bound) -> str:
    rows = [
        (
            group.name,
            f"{group.flops / 1e9:,.3f}",
            size(group.weight_bytes),
            size(group.kv_bytes),
            f"{group.intensity:,.1f}",
        )
        for group in groups
    ]
    rows.append(
        ("total", f"{bound.flops / 1e9:,.3f}", size(bound.bytes), "(both)", f"{bound.intensity:,.1f}")
    )
    text = table(title, ("", "GFLOP", "weights", "KV", "FLOP/byte"), rows)
    sent = f", between chips {time(bound.interconnect_s)}" if bound.interconnect_s else ""
    return (
        f"{text}\ncompute {time(bound.compute_s)}, memory {time(bound.memory_s)}{sent}: bound by "
        f"{bound.binds}, at least {time(bound.time_s)}"
    )


def _bounds(plan: Plan) -> str:
    batch = plan.compute_bound_batch
    turns = (
        f"at batch {batch:,}"
        if batch
        else "at no batch: at this context K and V of each row take longer than its products"
    )
    return _pairs(
        "bounds",
        [
            (
                "TTFT at least",
                f"{time(plan.ttft_s)} ({plan.prompt_tokens} tokens in chunks of {plan.load.max_num_batched_tokens})",
            ),
            ("TPOT at least", time(plan.decode_bound.time_s)),
            ("tok/s per user at most", f"{plan.tokens_per_second_per_user:,.1f}"),
            ("tok/s in total at most", f"{plan.tokens_per_second:,.1f}"),
            ("decode turns compute-bound", turns),
        ],
    )


def _levers(plan: Plan) -> str:
    first = plan.levers[0]
    rows = [
        (
            lever.name,
            time(lever.tpot_s),
            f"{first.tpot_s / lever.tpot_s:.2f}x",
            f"{lever.tokens_per_second:,.0f}",
            f"{lever.tokens_per_second / first.tokens_per_second:.2f}x",
            size(lever.kv_bytes_per_sequence),
            lever.note,
        )
        for lever in plan.levers
    ]
    header = ("", "TPOT at least", "faster", "tok/s at most", "more", "KV per sequence", "")
    return table("levers, each alone", header, rows)


def _sources(plan: Plan) -> str:
    hardware = plan.setting.hardware
    used = ["memory_bytes", "memory_bandwidth", f"peak.{plan.setting.shape.dtype}"]
    if plan.setting.chips > 1:
        used.append("interconnect_bandwidth")
    return _pairs("facts used", [(name, hardware.sources[name]) for name in used if name in hardware.sources])


# Layout


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns under a title: the first to the left, numbers to the right, notes (no header) to the left."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def cell(i: int, text: str) -> str:
        left = i == 0 or (i == len(header) - 1 and not header[i])
        return text.ljust(widths[i]) if left else text.rjust(widths[i])

    body = ["  ".join(cell(i, text) for i, text in enumerate(line)).rstrip() for line in lines]
    return "\n".join([title, "-" * len(title), *body])


def _pairs(title: str, pairs: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in pairs)
    return "\n".join([title, "-" * len(title), *(f"{name.ljust(width)}  {value}" for name, value in pairs)])


def time(seconds: float | None) -> str:
    """In s, ms or us."""
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:,.3f} s"
    return f"{seconds * 1e3:,.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} us"
