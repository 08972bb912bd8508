"""A matrix in blocks of 32 codes for CPUs, and products of few rows with it in plain XLA: exact values, float32 sums.

One row reads a matrix once and computes little, so its time is that of memory: 4 or 8 bits per weight instead of 32.
The values are those of GGUF's Q4_0, Q4_1 and Q8_0: scale * code + offset, both per output and block.

XLA:CPU neither vectorizes a sum over the fastest axis nor fuses widening into a dot. So codes lie in tiles, the
outputs of a tile fastest, and a block's few terms are summed over the axis before it: LLVM unrolls that loop and
vectorizes the one over outputs, and codes, scales and sums of a block never visit memory between.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.cpu_sums import MORE_AXES

BLOCK = 32  # inputs that share a scale
MAX_ROWS = (
    4  # each row widens the codes anew: with 8 the plain float32 product is as fast (log/cpu-products.md)
)
TILE = 32  # outputs whose codes lie together: a few vector registers


class BlockedMatrix(NamedTuple):
    """A matrix as `quantized_matmul` implementation "cpu" may have it, instead of an array of codes.

    Few rows are multiplied by the codes; more than MAX_ROWS by the matrix of their values, which lies beside them.
    """

    matrix: jax.Array  # [*out, *in], F outputs and D = 32 G inputs in all
    tiles: jax.Array  # int8 [G, F / L, 32, L] or uint8 [G, F / L, 16, L], see `few_rows_matmul`


def in_tiles(codes: jax.Array) -> jax.Array:
    """Codes as a file has them, [F, G, P], to the tiles [G, F / L, P, L] that `few_rows_matmul` reads.

    P: 32 codes, or 16 pairs of them. L: TILE, or the largest smaller power of two that divides F.
    """
    num_outputs, num_groups, num_planes = codes.shape
    size = math.gcd(num_outputs, TILE)
    return codes.reshape(-1, size, num_groups, num_planes).transpose(2, 0, 3, 1)


def few_rows_matmul(
    x: jax.Array, tiles: jax.Array, scale: jax.Array, offset: jax.Array | None = None
) -> jax.Array:
    """x times the transposed weight [F, D], D = 32 G, of value scale * code + offset: f32[T, F].

    The sum over a block is taken before its scale, sum(code * x) * scale + sum(x) * offset, all in float32: the
    rounding error is that of a float32 sum over the absolute values of these terms.

    Args:
      x: [T, D], float32 or bfloat16.
      tiles: int8 [G, F / L, 32, L], code i of each block at [:, :, i]; or uint8 [G, F / L, 16, L], codes 0 to 15 of
        inputs i and i + 16 in the low and high half of a byte.
      scale: [G, F], float16 or float32.
      offset: like scale, or None.

    Raises:
      ValueError: a shape or dtype is none of these.
    """
    num_groups, num_tiles, num_planes, size = tiles.shape
    num_tokens, num_outputs = x.shape[0], num_tiles * size
    if (num_planes, tiles.dtype) not in ((BLOCK, jnp.dtype("int8")), (BLOCK // 2, jnp.dtype("uint8"))):
        raise ValueError(
            f"tiles are {tiles.dtype}{list(tiles.shape)} but must be int8 [G, F / L, 32, L] or uint8 [G, F / L, 16, L]"
        )
    if x.ndim != 2 or x.shape[1] != BLOCK * num_groups:
        raise ValueError(
            f"x is {list(x.shape)} but must be [T, {BLOCK * num_groups}]: {BLOCK} inputs per block"
        )
    for name, array in (("scale", scale), ("offset", offset)):
        if array is not None and array.shape != (num_groups, num_outputs):
            raise ValueError(f"{name} is {list(array.shape)} but must be [{num_groups}, {num_outputs}]")
    blocks = x.astype(jnp.float32).reshape(num_tokens, num_groups, BLOCK).transpose(1, 0, 2)  # f32[G, T, 32]
    totals = blocks.sum(axis=-1)[..., None, None]  # before the barrier: once for all products of these rows
    # Inside a loop over steps XLA would take all that depends on weights alone out of it, and so keep them widened.
    tiles, scale, offset, blocks = jax.lax.optimization_barrier((tiles, scale, offset, blocks))
    codes = tiles.reshape(num_groups, *MORE_AXES, num_tiles, num_planes, size)

    def sum_of(planes: slice) -> jax.Array:
        """Of the terms of these planes: f32[G, T, F / L, L]."""

        def inputs(first: int) -> jax.Array:
            chosen = blocks[..., first + planes.start : first + planes.stop]
            return chosen.reshape(num_groups, num_tokens, *MORE_AXES, -1, 1)

        part = codes[..., planes, :]
        if num_planes == BLOCK:
            terms = part.astype(jnp.float32) * inputs(0)
        else:
            wide = part.astype(jnp.int32)
            low, high = (wide & 0x0F).astype(jnp.float32), (wide >> 4).astype(jnp.float32)
            terms = low * inputs(0) + high * inputs(BLOCK // 2)
        return terms.sum(axis=-2).reshape(num_groups, num_tokens, num_tiles, size)

    def per_output(array: jax.Array) -> jax.Array:
        return array.reshape(num_groups, 1, num_tiles, size).astype(jnp.float32)

    half = num_planes // 2  # two partial sums: with one or four a step takes longer (log/cpu-products.md)
    sums = sum_of(slice(0, half)) + sum_of(slice(half, num_planes))
    result = sums * per_output(scale)
    if offset is not None:
        result = result + totals * per_output(offset)
    # A second pass over few numbers; in one expression with the first, LLVM would not vectorize either.
    return jax.lax.optimization_barrier(result).sum(axis=0).reshape(num_tokens, num_outputs)
