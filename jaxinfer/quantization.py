"""Weight leaves and the two operations that read them.

A weight leaf is a plain array today. Every product with a weight goes through `project` and every embedding
lookup through `take`, so that a new weight form is a new leaf type handled here alone.
"""

import math

import jax
import jax.numpy as jnp


def project(
    x: jax.Array, weight: jax.Array, *, in_axes: int = 1, out_dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Contract the last `in_axes` axes of x with the last `in_axes` axes of a weight leaf, in float32.

    Args:
      x: activations [..., *in].
      weight: a leaf stored as published, output axes first: [*out, *in].
      in_axes: how many axes are contracted.
      out_dtype: of the result; None keeps that of `x`.

    Returns:
      [..., *out].
    """
    leading, out, inner = x.shape[:-in_axes], weight.shape[:-in_axes], weight.shape[-in_axes:]
    # One plain matrix product: XLA's CPU backend copies a weight of three axes into another layout at each call.
    size = math.prod(inner)
    result = jax.lax.dot_general(
        x.reshape(-1, size),
        weight.reshape(-1, size).astype(x.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return result.astype(out_dtype or x.dtype).reshape(*leading, *out)


def take(weight: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows `ids` i32[T] of an embedding `[V, D]`: [T, D]."""
    return jnp.take(weight, ids, axis=0, mode="clip")
