"""Pictures of plans and simulations, with matplotlib from the extra `plot`."""

from pathlib import Path
from types import ModuleType
from typing import Any

from jaxinfer.planner.plan import Plan
from jaxinfer.planner.simulate import Simulation


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
        "TTFT": sorted(t.ttft_s for t in result.times),
        "TPOT": sorted(t.tpot_s for t in result.times if t.tpot_s is not None),
        "E2E": sorted(t.e2e_s for t in result.times),
    }
    for name, values in shares.items():
        if values:
            spread.semilogx(values, [(i + 1) / len(values) for i in range(len(values))], label=name)
    spread.set(xlabel="s", ylabel="share of requests")
    spread.legend()
    _save(figure, plt, path)


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
