"""Pictures of plans and simulations, with matplotlib from the extra `plot`."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxinfer.metrics import Recording
from jaxinfer.tools.planner.plan import Plan
from jaxinfer.tools.planner.simulate import Simulation


class PlotError(RuntimeError):
    """matplotlib is missing."""


def plot_roofline(plan: Plan, path: str | Path) -> None:
    """The roof of one device, and where prefill, decode and their operator groups lie under it.

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
    for name, groups, marker in (("prefill", plan.prefill_groups, "o"), ("decode", plan.decode_groups, "s")):
        for group in groups:
            if group.flops and group.bytes:
                height = min(peak, bandwidth * group.intensity)
                axes.loglog(
                    group.intensity, height, marker, label=f"{name}: {group.name}, {group.intensity:,.1f}"
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


def plot_simulation(result: Simulation, path: str | Path) -> None:
    """Pages and rows over time, and how TTFT, TPOT and end-to-end times are distributed.

    Raises:
      PlotError: matplotlib is not installed.
    """
    plt = _pyplot()
    figure, (pages, rows, spread) = plt.subplots(3, 1, figsize=(8, 9))
    times, used, running, waiting = zip(*result.curve, strict=True)
    pages.plot(times, used)
    pages.axhline(result.num_pages - 1, color="grey", linestyle=":")
    pages.set(xlabel="s", ylabel="pages used", title=f"{result.num_preemptions} preemptions")
    rows.plot(times, running, label="running")
    rows.plot(times, waiting, label="waiting")
    rows.set(xlabel="s", ylabel="requests")
    rows.legend()
    shares = {
        "TTFT": [t.ttft_s for t in result.times],
        "TPOT": [t.tpot_s for t in result.times if t.tpot_s is not None],
        "E2E": [t.e2e_s for t in result.times],
    }
    _plot_shares(spread, shares, "share of requests")
    _save(figure, plt, path)


def plot_recording(recording: Recording, num_pages: int, path: str | Path) -> None:
    """How ITL and TTFT are distributed, and running rows and pages over time.

    num_pages: of the pool, the null page left out.

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
    times = [step.begun - start for step in steps]
    rows.plot(times, [step.num_running for step in steps], label="running")
    rows.plot(times, [step.num_waiting for step in steps], label="waiting")
    rows.set(xlabel="s", ylabel="requests")
    rows.legend()
    pages.plot(times, [step.pages_used for step in steps])
    pages.axhline(num_pages, color="grey", linestyle=":")
    pages.set(xlabel="s", ylabel="pages used")
    _save(figure, plt, path)


def _plot_shares(axes: Any, shares: Mapping[str, list[float]], label: str) -> None:
    """The share of values up to each, for each kind of value that is there."""
    for name, values in shares.items():
        if values:
            axes.semilogx(sorted(values), [(i + 1) / len(values) for i in range(len(values))], label=name)
    axes.set(xlabel="s", ylabel=label)
    if axes.lines:
        axes.legend()


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
