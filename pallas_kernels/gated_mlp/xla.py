"""gated_mlp for any platform: both halves leave their products in x's dtype, and are gated in float32."""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.dense_matmul import xla as dense
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
            return weight(x, x.dtype)
        return dense.dense_matmul(x, weight, out_dtype=x.dtype)

    gate, up = multiply(x, gate).astype(jnp.float32), multiply(x, up).astype(jnp.float32)
    return multiply((ACTIVATIONS[activation](gate) * up).astype(x.dtype), down)
