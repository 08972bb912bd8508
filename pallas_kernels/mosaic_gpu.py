"""What the Mosaic GPU kernels share: the differences between jax versions, and limits of the hardware."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

MAX_TMA_BOX = (
    256  # elements of one dimension that one TMA copy can take (CUDA driver, cuTensorMapEncodeTiled)
)
TMA_ALIGNMENT = 128  # bytes: where a TMA copy may begin in shared memory

_TAKES_COST_ESTIMATE = "cost_estimate" in inspect.signature(plgpu.kernel).parameters  # from jax 0.12 on


def kernel(
    body: Callable[..., None], *, cost_estimate: pl.CostEstimate, **options: Any
) -> Callable[..., Any]:
    """plgpu.kernel, which takes a cost estimate from jax 0.12 on; on 0.11 it is dropped."""
    if _TAKES_COST_ESTIMATE:
        options["cost_estimate"] = cost_estimate
    return plgpu.kernel(body, **options)


def store_to_gmem(ref: Any, value: jax.Array) -> None:
    """Stores registers to GMEM in runs of any length. plgpu.store, which says so, is there from jax 0.12 on."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
