"""The truth: all of it in float32."""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.dense_matmul import reference as dense
from jaxinfer.pallas_kernels.gated_mlp import ACTIVATIONS, Matrix


def gated_mlp(
    x: jax.Array,  # [T, D]
    gate: Matrix,  # [F, D]
    up: Matrix,  # [F, D]
    down: Matrix,  # [D, F]
    activation: str,
) -> jax.Array:
    """See the package's docstring."""

    def multiply(x: jax.Array, weight: Matrix) -> jax.Array:
        if callable(weight):
            return weight(x, jnp.float32)
        return dense.dense_matmul(x, weight, out_dtype=jnp.dtype(jnp.float32))

    hidden = ACTIVATIONS[activation](multiply(x, gate)) * multiply(x, up)
    return multiply(hidden, down).astype(x.dtype)
