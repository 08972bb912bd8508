"""gated_mlp for CPUs: the halves in float32, and with whole blocks of tokens one token per column.

XLA:CPU's products bring their second operand into another order first, which costs less for x than for a weight. And
it rounds to bfloat16 in several instructions: so nothing is rounded but what the next product reads.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.dense_matmul import cpu as dense
from jaxinfer.pallas_kernels.gated_mlp import ACTIVATIONS, Matrix

# A token per column with a multiple of so many tokens, whole blocks of the library's products, in bfloat16, and with
# matrices of at most so many weights, which stay in the cache while blocks of tokens come by (log/cpu-products.md).
COLUMNS, COLUMNS_SIZE = 64, 2 << 20


def gated_mlp(
    x: jax.Array,  # [T, D]
    gate: Matrix,  # [F, D]
    up: Matrix,  # [F, D]
    down: Matrix,  # [D, F]
    activation: str,
) -> jax.Array:
    """See the package's docstring."""
    if x.shape[0] % COLUMNS == 0 and x.dtype == jnp.bfloat16:
        plain = [w for w in (gate, up, down) if not callable(w) and w.size <= COLUMNS_SIZE]
        if len(plain) == 3:
            return _in_columns(x, plain[0], plain[1], plain[2], activation)

    def multiply(x: jax.Array, weight: Matrix, dtype: jax.typing.DTypeLike) -> jax.Array:
        if callable(weight):
            return weight(x, dtype)
        return dense.dense_matmul(x, weight, out_dtype=jnp.dtype(dtype))

    hidden = _gated(multiply(x, gate, jnp.float32), multiply(x, up, jnp.float32), activation, x.dtype)
    return multiply(hidden, down, x.dtype)


def _in_columns(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, activation: str) -> jax.Array:
    dot = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    gate, up = (dot(weight, x, (((1,), (1,)), ((), ()))) for weight in (gate, up))  # f32[F, T]
    out = dot(down, _gated(gate, up, activation, x.dtype), (((1,), (0,)), ((), ())))  # f32[D, T]
    # Without the barrier XLA turns the product around again.
    return jax.lax.optimization_barrier(out).T.astype(x.dtype)


def _gated(gate: jax.Array, up: jax.Array, activation: str, dtype: jnp.dtype) -> jax.Array:
    return (ACTIVATIONS[activation](gate) * up).astype(dtype)
