"""Products of few rows with a matrix in blocks of 32 codes, for CPUs, in plain XLA; exact values, float32 sums.

One row reads a matrix once and computes little, so its time is that of memory: 4 or 8 bits per weight instead of 32.
The values are those of GGUF's Q4_0, Q4_1 and Q8_0: scale * code + offset, both per output and block.

XLA:CPU neither vectorizes a sum over the fastest axis nor fuses widening into a dot. So codes lie with the outputs
fastest, and the sum over a block is written out term by term: an elementwise expression over outputs, which
LLVM vectorizes.
"""

import jax
import jax.numpy as jnp

BLOCK = 32  # inputs that share a scale
MAX_ROWS = 4  # each row widens the codes anew: with 8 the plain float32 product is as fast (LOG.md)
PARTIAL_SUMS = 4  # of the terms of a block: fewer take longer, and more make larger programs


def pack(codes: jax.Array) -> jax.Array:
    """Codes as a file has them, [F, G, 16 or 32], to the planes [16 or 32, G, F] that `few_rows_matmul` reads."""
    return codes.transpose(2, 1, 0)


def few_rows_matmul(
    x: jax.Array, planes: jax.Array, scale: jax.Array, offset: jax.Array | None = None
) -> jax.Array:
    """x times the transposed weight [F, D], D = 32 G, of value scale * code + offset: f32[T, F].

    The sum over a block is taken before its scale, sum(code * x) * scale + sum(x) * offset, all in float32: the
    rounding error is that of a float32 sum over the absolute values of these terms.

    Args:
      x: [T, D], float32 or bfloat16.
      planes: int8 [32, G, F], code i of each block in plane i; or uint8 [16, G, F], codes 0 to 15 of inputs i and
        i + 16 in the low and high half of a byte.
      scale: [G, F], float16 or float32.
      offset: like scale, or None.

    Raises:
      ValueError: a shape or dtype is none of these.
    """
    num_planes, num_groups, num_outputs = planes.shape
    if (num_planes, planes.dtype) not in ((32, jnp.int8), (16, jnp.uint8)):
        raise ValueError(
            f"planes are {planes.dtype}{list(planes.shape)} but must be int8 [32, G, F] or uint8 [16, G, F]"
        )
    if x.ndim != 2 or x.shape[1] != BLOCK * num_groups:
        raise ValueError(
            f"x is {list(x.shape)} but must be [T, {BLOCK * num_groups}]: {BLOCK} inputs per block"
        )
    for name, array in (("scale", scale), ("offset", offset)):
        if array is not None and array.shape != (num_groups, num_outputs):
            raise ValueError(f"{name} is {list(array.shape)} but must be [{num_groups}, {num_outputs}]")
    # Inside a loop over steps XLA would take all that depends on weights alone out of it, and so keep them widened.
    planes, scale, offset, x = jax.lax.optimization_barrier((planes, scale, offset, x))
    num_tokens = x.shape[0]
    blocks = x.astype(jnp.float32).reshape(num_tokens, num_groups, BLOCK).transpose(2, 0, 1)  # f32[32, T, G]
    if num_planes == BLOCK:
        terms = _times(planes, blocks)
    else:  # the high half of a byte is 16 times its code; a sixteenth of x is exact
        wide = planes.astype(jnp.int32)
        terms = _times(wide & 0x0F, blocks[:16]) + _times(wide & 0xF0, blocks[16:] / 16)
    sums = terms[:PARTIAL_SUMS]  # f32[PARTIAL_SUMS, T, G, F]
    for start in range(PARTIAL_SUMS, num_planes, PARTIAL_SUMS):
        sums = sums + terms[start : start + PARTIAL_SUMS]
    # A second pass over few numbers; in one expression with the first, XLA would do all of it once per output.
    sums = jax.lax.optimization_barrier(sums).sum(axis=0)
    result = sums * scale.astype(jnp.float32)
    if offset is not None:
        result = result + blocks.sum(axis=0)[..., None] * offset.astype(jnp.float32)
    return result.sum(axis=1)


def _times(codes: jax.Array, inputs: jax.Array) -> jax.Array:
    """Codes [P, G, F] times inputs f32[P, T, G]: f32[P, T, G, F]; part of one expression, never in memory."""
    return codes.astype(jnp.float32)[:, None] * inputs[..., None]
