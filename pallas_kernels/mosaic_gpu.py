"""What the Mosaic GPU kernels share: the differences between jax versions, and limits of the hardware."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

FIRST_WITH_TMA = (9, 0)  # compute capability
MAX_TMA_BOX = (
    256  # elements of one dimension that one TMA copy can take (CUDA driver, cuTensorMapEncodeTiled)
)
PIECE_ROWS = 32  # of a shared buffer that a warpgroup widens or masks at a time
TMA_ALIGNMENT = 128  # bytes: where a TMA copy may begin in shared memory

_TAKES_COST_ESTIMATE = "cost_estimate" in inspect.signature(plgpu.kernel).parameters  # from jax 0.12 on


def kernel(
    body: Callable[..., None], *, cost_estimate: pl.CostEstimate, **options: Any
) -> Callable[..., Any]:
    """plgpu.kernel, which takes a cost estimate from jax 0.12 on; on 0.11 it is dropped."""
    if _TAKES_COST_ESTIMATE:
        options["cost_estimate"] = cost_estimate
    return plgpu.kernel(body, **options)


def store(ref: Any, value: jax.Array) -> None:
    """Stores registers in runs of any length, bank conflicts allowed.

    plgpu.store, which says so, is there from jax 0.12 on; before, every store to GMEM and to plain SMEM was such.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def copy_by_cp_async(source: Any, target: Any) -> None:
    """Starts a copy from GMEM to SMEM without TMA, in a group of its own; plgpu.wait_gmem_to_smem counts groups."""
    plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def cp_async_takes(rows: int, head_dim: int) -> bool:
    """Whether four warps can share a copy of [rows, 2H] into a buffer of `swizzle(H)`, by tiles of 8 rows."""
    row_tiles, column_tiles = rows // 8, 2 * head_dim // swizzle_lanes(head_dim)
    return row_tiles % 4 == 0 or column_tiles % (4 if row_tiles % 2 else 2) == 0


def piece_layout(width: int, dtype: jnp.dtype) -> Any:
    """Registers of [PIECE_ROWS, lanes] of a buffer [rows, width] of `swizzle`, read and written in wide vectors."""
    lanes = swizzle_lanes(width)
    return plgpu.Layout.SMEM_GMEM_COPY((PIECE_ROWS, lanes), dtype, 2 * lanes)


def widen(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """int8 or float8_e4m3fn in bfloat16 or float16, exactly, except that NaN of float8 becomes 480.

    By integer operations, which every GPU has: float8 is converted in hardware from compute capability 8.9 on, and
    integers slowly everywhere.
    """
    if x.dtype == jnp.int8:
        # The bits of 2^p, p the bits of the mantissa, with n in the lowest: 2^p + n. Of x = low - (0 or 128), both so.
        bits = x.astype(jnp.int16)
        base = 0x4300 if dtype == jnp.bfloat16 else 0x6400
        low, high = ((bits & mask) | base for mask in (0x7F, 0x80))
        return lax.bitcast_convert_type(low, dtype) - lax.bitcast_convert_type(high, dtype)
    return lax.bitcast_convert_type(float8_bits(x, dtype), dtype) * float8_unit(dtype)


def float8_bits(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float8_e4m3fn -> the bits i16 of x / float8_unit(dtype) in dtype: sign, exponent and mantissa at their places."""
    bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)  # sign extended: the sign is at its place
    return (bits & jnp.int16(-0x8000)) | ((bits & 0x7F) << (jnp.finfo(dtype).nmant - 3))


def float8_unit(dtype: jnp.dtype) -> jax.Array:
    """2 to the difference of the exponents' biases: 7 in float8_e4m3fn. Subnormal numbers come out right too."""
    return jnp.asarray(2.0**120 if dtype == jnp.bfloat16 else 2.0**8, dtype)


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
