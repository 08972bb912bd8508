"""Sums that XLA:CPU compiles into one vectorized loop, and the product of one row that is made of them."""

import jax
import jax.numpy as jnp

# XLA:CPU hands a sum to its library of kernels, with its operand widened in memory, if the operand has at most eight
# axes; with nine it compiles one loop of all. So there are axes of size one.
MORE_AXES = (1, 1, 1, 1, 1)
# Of one row: sums that are taken side by side (their number is a multiple of it), and the most terms of each: LLVM
# unrolls so many, and with 48 it vectorizes nothing.
LANES, MAX_TERMS = 64, 32


def one_row_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [1, D] times the transposed weight [F, D], in float32: f32[1, F].

    XLA:CPU multiplies one row of bfloat16 in a plain loop, ten times as slow, and packs a matrix of int8 anew for it
    (log/cpu-products.md). Here a weight is read once, where it lies.
    """
    num_outputs, size = weight.shape
    blocks = size // LANES if size % LANES == 0 else 1
    num_terms = max(n for n in range(1, MAX_TERMS + 1) if blocks % n == 0)
    # Inside a loop over steps XLA would widen the weight before the loop, and so read float32 in it.
    x, weight = jax.lax.optimization_barrier((x, weight))
    terms = weight.reshape(1, *MORE_AXES, num_outputs, num_terms, -1).astype(jnp.float32)
    sums = (terms * x.astype(jnp.float32).reshape(num_terms, -1)).sum(axis=-2)
    # A second pass over few numbers; in one expression with the first, LLVM would not vectorize either.
    return jax.lax.optimization_barrier(sums).reshape(num_outputs, -1).sum(axis=-1)[None]
