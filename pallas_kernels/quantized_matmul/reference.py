"""The truth: the whole weight in float32. Also the quantizer of activations that the implementations share."""

import jax
import jax.numpy as jnp

INT8_MAX = 127.0


def quantize_rows(x: jax.Array, amax: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """[T, D] -> int8[T, D], f32[T, 1]: scale = amax / 127, rounded to nearest even; a row of zeros has scale 0.

    amax: f32[T, 1], the largest absolute value of each row, where the caller has it.
    """
    x = x.astype(jnp.float32)
    amax = jnp.abs(x).max(axis=1, keepdims=True) if amax is None else amax
    inverse = jnp.where(amax > 0, INT8_MAX / amax, 0.0)
    return jnp.clip(jnp.round(x * inverse), -INT8_MAX, INT8_MAX).astype(jnp.int8), amax / INT8_MAX


def widen(qvalue: jax.Array, scale: jax.Array, offset: jax.Array | None) -> jax.Array:
    """f32[F, D]: scale * qvalue + offset, each scale over its group of inputs."""
    out_dim, in_dim = qvalue.shape
    groups = qvalue.astype(jnp.float32).reshape(out_dim, scale.shape[1], -1)  # [F, G, group]
    value = groups * scale[..., None]
    if offset is not None:
        value = value + offset[..., None]
    return value.reshape(out_dim, in_dim)


def quantized_matmul(
    x: jax.Array,  # [T, D]
    qvalue: jax.Array,  # [F, D]
    scale: jax.Array,  # f32[F, G]
    offset: jax.Array | None,  # f32[F, G]
    *,
    w8a8: str | None,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """See the package's docstring. Both kinds of w8a8 are the same here: their products are exact."""
    if w8a8 is None:
        dot = jnp.dot(
            x.astype(jnp.float32), widen(qvalue, scale, offset).T, precision=jax.lax.Precision.HIGHEST
        )
        return dot.astype(out_dtype)
    x8, x_scale = quantize_rows(x)
    exact = jnp.dot(x8.astype(jnp.int32), qvalue.astype(jnp.int32).T)  # i32[T, F]
    return (exact.astype(jnp.float32) * x_scale * scale.T).astype(out_dtype)
