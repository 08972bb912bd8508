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


def swizzle(width: int) -> tuple[Any, ...]:
    """Transforms of a shared buffer [..., rows, lanes] of 2-byte elements that WGMMA and ldmatrix read unconflicted.

    By the widest swizzle (128, 64 or 32 bytes) whose run divides width, a multiple of 16 lanes.
    """
    lanes = swizzle_lanes(width)
    return (
        plgpu.TilingTransform((8, lanes)),  # type: ignore[abstract]  # mypy sees protocols' empty bodies
        plgpu.SwizzleTransform(2 * lanes),  # type: ignore[abstract]
    )


def swizzle_lanes(width: int) -> int:
    """The 2-byte elements of one swizzled run in a buffer of width lanes."""
    return next(lanes for lanes in (64, 32, 16) if width % lanes == 0)
