"""The production path on CPU, in plain jax.numpy; a plain product on other platforms.

XLA:CPU writes a widened weight to memory before a product reads it, which costs more than the product with few rows.
So few rows take products of int8, which it has (x as a sum of three int8 numbers: float32's 24 bits of the row's
largest), and some more rows a multiplication and a sum, which it fuses with the widening
(log/cpu-products.md).
Weights that groups scale are widened: neither way pays there.
"""

import math
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.quantized_matmul.few_rows import one_row_matmul
from jaxinfer.pallas_kernels.quantized_matmul.reference import INT8_MAX, largest_of_rows, quantize_rows, widen

CPU_INT8_ROWS = 8  # up to so many rows are multiplied as int8 parts
CPU_FUSED_ROWS = 64  # and up to so many by multiplying and summing
NUM_PARTS = 3
PART_STEP = (
    2 * INT8_MAX
)  # a part's unit over the next one's: what a part leaves, at most half, fills the next
SLICES = 8  # of a row, whose largest values are found side by side


def quantized_matmul(
    x: jax.Array,  # [T, D]
    qvalue: jax.Array,  # [F, D]
    scale: jax.Array,  # f32[F, G]
    offset: jax.Array | None,  # f32[F, G]
    *,
    w8a8: str | None,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """See the package's docstring."""
    if w8a8 is not None:
        amax = lax.platform_dependent(x, cpu=_largest_of_slices, default=largest_of_rows)
        x8, x_scale = quantize_rows(x, amax)
        if w8a8 == "int8" and x.shape[0] == 1:
            sums = lax.platform_dependent(x8, qvalue, cpu=one_row_matmul, default=_int8_dot_in_float32)
        elif w8a8 == "int8":
            sums = _int8_dot_in_float32(x8, qvalue)
        else:
            sums = _dot(x8.astype(jnp.bfloat16), qvalue.astype(jnp.bfloat16))
        return (sums * x_scale * scale.T).astype(out_dtype)
    if scale.shape[1] > 1:
        return _dot(x, widen(qvalue, scale, offset).astype(x.dtype)).astype(out_dtype)
    if qvalue.dtype == jnp.int8 and x.shape[0] <= CPU_INT8_ROWS:
        sums = lax.platform_dependent(x, qvalue, cpu=_dot_of_parts, default=_widened_dot)
    elif x.shape[0] <= CPU_FUSED_ROWS:
        sums = lax.platform_dependent(x, qvalue, cpu=_multiply_and_sum, default=_widened_dot)
    else:
        sums = _widened_dot(x, qvalue)
    return (sums * scale.T).astype(out_dtype)


def _largest_of_slices(x: jax.Array) -> jax.Array:
    """`largest_of_rows` in two passes: the first is plain vector instructions, and reads x as it is.

    XLA:CPU has its library find the largest of a row, from a copy of x in float32 that it writes to memory first.
    """
    slices = jnp.split(jnp.abs(x.astype(jnp.float32)), math.gcd(x.shape[1], SLICES), axis=1)
    return lax.optimization_barrier(reduce(jnp.maximum, slices)).max(axis=1, keepdims=True)


def _dot_of_parts(x: jax.Array, qvalue: jax.Array) -> jax.Array:
    """f32[T, F] by int8 products: x = x_scale * (part 0 + part 1 / PART_STEP + part 2 / PART_STEP^2)."""
    num_tokens = x.shape[0]
    part, x_scale = quantize_rows(x)
    parts = [part]
    rest = jnp.where(x_scale > 0, x.astype(jnp.float32) / x_scale, 0.0) - part
    for _ in range(NUM_PARTS - 1):
        rest = rest * PART_STEP
        parts.append(jnp.clip(jnp.round(rest), -INT8_MAX, INT8_MAX).astype(jnp.int8))
        rest = rest - parts[-1]
    sums = _int8_dot(jnp.concatenate(parts), qvalue).astype(jnp.float32).reshape(NUM_PARTS, num_tokens, -1)
    units = (PART_STEP ** -jnp.arange(NUM_PARTS, dtype=jnp.float32))[:, None, None]
    return (sums * units).sum(axis=0) * x_scale


def _multiply_and_sum(x: jax.Array, qvalue: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32)[:, None, :] * qvalue.astype(jnp.float32)[None]).sum(axis=-1)


def _widened_dot(x: jax.Array, qvalue: jax.Array) -> jax.Array:
    return _dot(x, qvalue.astype(x.dtype))


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [M, D] times the transposed b [N, D] in float32, which means float32 on every chip."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision, jnp.float32)


def _int8_dot_in_float32(a: jax.Array, b: jax.Array) -> jax.Array:
    return _int8_dot(a, b).astype(jnp.float32)


def _int8_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """int8 a [M, D] times the transposed int8 b [N, D] in int32."""
    # XLA:CPU has a slow path for a single row.
    rows = jnp.pad(a, ((0, 1), (0, 0))) if a.shape[0] == 1 else a
    return lax.dot_general(rows, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)[: a.shape[0]]
