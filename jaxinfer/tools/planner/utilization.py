"""How far a run is from the limit of its device: MFU and MBU."""

from dataclasses import dataclass

from jaxinfer.metrics import Work
from jaxinfer.tools.planner.hardware import Hardware
from jaxinfer.tools.planner.roofline import StepCost


@dataclass(frozen=True)
class Utilization:
    """FLOPs computed and bytes moved at the least (padding is no work), over what the device could have."""

    seconds: float
    flops: int
    bytes: int
    mfu: float | None  # flops / (seconds x peak); None: no peak is known for the dtype
    mbu: float | None  # bytes / (seconds x bandwidth)
    peaks: str  # the figures that these rest on, and where they are from


def utilization(
    cost: StepCost, work: Work, seconds: float, hardware: Hardware | None, dtype: str
) -> Utilization:
    """Of one device that did `work` in `seconds`; `dtype` is that of its matrix products."""
    flops, moved = cost.flops(work), cost.bytes(work)
    if hardware is None:
        return Utilization(
            seconds, flops, moved, None, None, "not known: jaxinfer bench measures those of a CPU"
        )
    peak, bandwidth = hardware.peaks.get(dtype), hardware.memory_bandwidth
    figure = "no peak" if peak is None else f"{peak / 1e9:,.0f} GFLOP/s"
    return Utilization(
        seconds,
        flops,
        moved,
        mfu=flops / (seconds * peak) if peak and seconds else None,
        mbu=moved / (seconds * bandwidth) if seconds else None,
        peaks=f"{figure} in {dtype}, {bandwidth / 1e9:,.1f} GB/s; {hardware.title}: "
        + hardware.sources["memory_bandwidth"],
    )
