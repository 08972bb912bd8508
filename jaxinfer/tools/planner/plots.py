"""Pictures of plans and simulations, with matplotlib from the extra `plot`."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxinfer.metrics import Recording
from jaxinfer.outputs import RequestMetrics
from jaxinfer.tools.planner.plan import Plan
from jaxinfer.tools.planner.simulate import Simulation


class PlotError(RuntimeError):
    """matplotlib is missing."""


def plot_roofline(plan: Plan, path: str | Path) -> None:
    """Draws the roof of one device, and where prefill, decode and their operator groups lie under it.

    Groups of one phase whose points coincide share a marker, and their names a line of the legend.

    Raises:
      PlotError: matplotlib is not installed.
    """
    plt = _pyplot()
    hardware, dtype = plan.setting.hardware, plan.setting.shape.dtype
    peak, bandwidth = hardware.peak(dtype), hardware.memory_bandwidth
    ridge = peak / bandwidth
    figure, axes = plt.subplots(figsize=(8, 5.5))
    intensities = [ridge / 1e3, ridge, ridge * 1e2]
    axes.loglog(intensities, [min(peak, bandwidth * x) for x in intensities], color="black", label="roof")
    for phase, groups, marker, size in (
        ("prefill", plan.prefill_groups, "o", 10),
        ("decode", plan.decode_groups, "s", 6),  # smaller, and drawn later: both show where they coincide
    ):
        names: dict[float, list[str]] = {}  # by intensity to three digits: what the picture can tell apart
        for group in groups:
            if group.flops and group.bytes:
                names.setdefault(float(f"{group.intensity:.3g}"), []).append(group.name)
        for intensity, together in names.items():
            axes.loglog(
                intensity,
                min(peak, bandwidth * intensity),
                marker,
                markersize=size,
                markeredgecolor="white",
                linestyle="none",
                label=f"{phase}: {', '.join(together)}, {intensity:,.4g}",
            )
    axes.axvline(ridge, color="grey", linestyle=":", label=f"ridge at {ridge:,.0f} FLOP/byte")
    axes.set(
        xlabel="FLOP per byte moved",
        ylabel="FLOP/s at most, one device",
        title=f"{plan.setting.shape.name} on {hardware.name}, {dtype}, batch {plan.load.batch}, "
        f"context {plan.load.context}",
    )
    axes.legend(fontsize=7)
    _save(figure, plt, path)


def plot_simulation(result: Simulation, path: str | Path, *, title: str) -> None:
    """Draws pages and rows over time, and how TTFT, TPOT and end-to-end times are distributed.

    title: the model, the chip and the load.

    Raises:
      PlotError: matplotlib is not installed.
    """
    plt = _pyplot()
    figure, (pages, rows, spread) = plt.subplots(3, 1, figsize=(8, 9))
    # From nothing at the start to nothing at the end.
    curve = [(0.0, 0, 0, 0), *result.curve, (result.duration_s, 0, 0, 0)]
    _plot_counts(pages, rows, curve, result.num_pages - 1)
    pages.set(title=f"{result.num_preemptions} preemptions")
    shares = {
        "TTFT": [t.ttft_s for t in result.times],
        "TPOT": [t.tpot_s for t in result.times if t.tpot_s is not None],
        "E2E": [t.e2e_s for t in result.times],
    }
    _plot_shares(spread, shares, "share of requests")
    figure.suptitle(title)
    _save(figure, plt, path)


def plot_recording(recording: Recording, num_pages: int, path: str | Path, *, title: str) -> None:
    """Draws how ITL and TTFT are distributed, running rows and pages over time, and when the device was idle.

    Args:
      num_pages: of the pool, the null page left out.
      title: the model, the device, the dtype.

    Raises:
      PlotError: matplotlib is not installed.
    """
    plt = _pyplot()
    figure, (spread, rows, pages) = plt.subplots(3, 1, figsize=(8, 9))
    sequences, steps = list(recording.sequences), list(recording.steps)
    shares = {
        "ITL": [gap for seq in sequences for gap in seq.metrics.itl_s],
        "TTFT": [seq.metrics.ttft_s for seq in sequences if seq.metrics.ttft_s is not None],
    }
    _plot_shares(spread, shares, "share of gaps, of requests")
    start = min((step.begun for step in steps), default=0.0)
    curve = [(step.begun - start, step.pages_used, step.num_running, step.num_waiting) for step in steps]
    if steps:
        curve.append((max(step.done for step in steps) - start, 0, 0, 0))
    idle = idle_spans(recording)
    for begin, end in idle:
        rows.axvspan(begin - start, end - start, color="grey", alpha=0.3, linewidth=0)
        if not any(_under_way(seq.metrics, end) for seq in sequences):
            curve.append((begin - start, 0, 0, 0))  # what the last step counted has ended
    curve.sort()
    _plot_counts(pages, rows, curve, num_pages)
    total = curve[-1][0] if curve else 0.0
    share = sum(end - begin for begin, end in idle) / total if total else 0.0
    rows.set(title=f"grey: the device had nothing to do, {share:.1%} of the time")
    figure.suptitle(title)
    _save(figure, plt, path)


def idle_spans(recording: Recording) -> list[tuple[float, float]]:
    """Lists (begin, end) in seconds of the engine's clock in which the device waited between two steps."""
    steps = sorted(recording.steps, key=lambda step: step.done)
    spans = []
    for before, step in itertools.pairwise(steps):
        if step.done - step.device_s > before.done:
            spans.append((before.done, step.done - step.device_s))
    return spans


def _under_way(times: RequestMetrics, moment: float) -> bool:
    """Says whether a request was running just before a moment."""
    begun, ended = times.first_scheduled_time, times.finished_time
    return begun is not None and begun < moment and (ended is None or ended >= moment)


def _plot_counts(pages: Any, rows: Any, curve: list[tuple[float, int, int, int]], num_pages: int) -> None:
    """Draws (time, pages used, rows running, requests waiting) as steps: each holds until the next."""
    times, used, running, waiting = zip(*curve, strict=True) if curve else ((), (), (), ())
    pages.step(times, used, where="post")
    pages.axhline(num_pages, color="grey", linestyle=":", label=f"the pool: {num_pages:,}")
    pages.set(xlabel="s", ylabel="pages used", ylim=(0, None))
    pages.legend()
    rows.step(times, running, where="post", label="running")
    rows.step(times, waiting, where="post", label="waiting")
    rows.set(xlabel="s", ylabel="requests", ylim=(0, None))
    rows.legend()


def _plot_shares(axes: Any, shares: Mapping[str, list[float]], label: str) -> None:
    """Draws the share of values up to each, and says the percentiles, for each kind of value that is there."""
    for name, values in shares.items():
        if values:
            ordered = sorted(values)
            p50, p90, p99 = (1e3 * ordered[-(-len(ordered) * p // 100) - 1] for p in (50, 90, 99))
            (line,) = axes.step(
                ordered,
                [(i + 1) / len(ordered) for i in range(len(ordered))],
                where="post",
                label=f"{name}: p50 {p50:,.1f}, p90 {p90:,.1f}, p99 {p99:,.1f} ms",
            )
            axes.plot([x / 1e3 for x in (p50, p90, p99)], [0.5, 0.9, 0.99], ".", color=line.get_color())
    axes.set(xlabel="s", ylabel=label, xscale="log")
    if axes.lines:
        axes.legend(fontsize=8)


def _pyplot() -> ModuleType:
    try:
        import matplotlib
    except ImportError as error:
        raise PlotError("plots need matplotlib: pip install 'jaxinfer[plot]'") from error
    matplotlib.use("agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _save(figure: Any, plt: Any, path: str | Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
