"""Weight leaves and the two operations that read them.

A weight leaf is a plain array today. Every product with a weight goes through `einsum` and every
embedding lookup through `take`, so that a new weight form is a new leaf type handled here alone.
"""

import jax
import jax.numpy as jnp


def einsum(
    spec: str, x: jax.Array, weight: jax.Array, *, out_dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """`jnp.einsum(spec, x, weight)` accumulated in float32.

    Args:
      spec: an einsum string with two operands, the weight second.
      x: activations.
      weight: a weight leaf, stored as published, `[out, in]`.
      out_dtype: dtype of the result; None keeps that of `x`.
    """
    out = jnp.einsum(spec, x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
    return out.astype(out_dtype or x.dtype)


def take(weight: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows `ids` i32[T] of an embedding `[V, D]`: [T, D]."""
    return jnp.take(weight, ids, axis=0, mode="clip")
