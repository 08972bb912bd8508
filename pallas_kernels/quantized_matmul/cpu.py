"""quantized_matmul for CPUs, in plain jax.numpy: the forms that XLA:CPU computes fast, by the number of rows.

XLA:CPU writes a widened weight to memory before a product reads it, which costs more than the product with few rows.
So few rows take products of int8, which it has (x as a sum of three int8 numbers: float32's 24 bits of the row's
largest), and some more rows a multiplication and a sum, which it fuses with the widening (log/cpu-products.md).
Weights that groups scale are widened: neither way pays there. Only a matrix in tiles (`cpu_blocks`) does better, with
few rows.
"""

import math
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.cpu_sums import one_row_matmul
from jaxinfer.pallas_kernels.dense_matmul import cpu as dense_matmul
from jaxinfer.pallas_kernels.quantized_matmul import xla
from jaxinfer.pallas_kernels.quantized_matmul.cpu_blocks import MAX_ROWS, BlockedMatrix, few_rows_matmul
from jaxinfer.pallas_kernels.quantized_matmul.reference import INT8_MAX, quantize_rows

INT8_ROWS = 8  # up to so many rows are multiplied as int8 parts
FUSED_ROWS = 64  # and up to so many by multiplying and summing
NUM_PARTS = 3
PART_STEP = (
    2 * INT8_MAX
)  # a part's unit over the next one's: what a part leaves, at most half, fills the next
SLICES = 8  # of a row, whose largest values are found side by side


def quantized_matmul(
    x: jax.Array,  # [T, D]
    qvalue: jax.Array | BlockedMatrix,  # [F, D]
    scale: jax.Array,  # f32[F, G]; of a BlockedMatrix [G, F], float16 or float32
    offset: jax.Array | None,  # like scale
    *,
    w8a8: str | None,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """See the package's docstring."""
    if isinstance(qvalue, BlockedMatrix):
        matrix = matrix_for(qvalue, x.shape[0])
        if matrix is None:
            return few_rows_matmul(x, qvalue.tiles, scale, offset).astype(out_dtype)
        weight = matrix.reshape(-1, x.shape[1]).astype(x.dtype)
        return dense_matmul.dense_matmul(x, weight, out_dtype=out_dtype)
    if w8a8 is None and scale.shape[1] > 1:
        return xla.quantized_matmul(x, qvalue, scale, offset, w8a8=None, out_dtype=out_dtype)
    if w8a8 is not None:
        x, x_scale = quantize_rows(x, _largest_of_rows(x))
        if w8a8 != "int8":
            sums = xla.dot(x.astype(jnp.bfloat16), qvalue.astype(jnp.bfloat16))
        elif x.shape[0] == 1:
            sums = one_row_matmul(x, qvalue)
        else:
            sums = xla.int8_dot(x, qvalue).astype(jnp.float32)
        return (sums * x_scale * scale.T).astype(out_dtype)
    if qvalue.dtype == jnp.int8 and x.shape[0] <= INT8_ROWS:
        sums = _dot_of_parts(x, qvalue)
    elif x.shape[0] <= FUSED_ROWS:
        sums = (x.astype(jnp.float32)[:, None, :] * qvalue.astype(jnp.float32)[None]).sum(axis=-1)
    else:
        sums = xla.dot(x, qvalue.astype(x.dtype))
    return (sums * scale.T).astype(out_dtype)


def matrix_for(qvalue: jax.Array | BlockedMatrix, num_rows: float = math.inf) -> jax.Array | None:
    """The matrix of values [*out, *in] that so many rows are multiplied by, or None: there are codes for them alone."""
    return qvalue.matrix if isinstance(qvalue, BlockedMatrix) and num_rows > MAX_ROWS else None


def _largest_of_rows(x: jax.Array) -> jax.Array:
    """f32[T, 1], the largest absolute values, in two passes: the first is vector instructions, and reads x as it is.

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
    products = xla.int8_dot(jnp.concatenate(parts), qvalue)
    sums = products.astype(jnp.float32).reshape(NUM_PARTS, num_tokens, -1)
    units = (PART_STEP ** -jnp.arange(NUM_PARTS, dtype=jnp.float32))[:, None, None]
    return (sums * units).sum(axis=0) * x_scale
