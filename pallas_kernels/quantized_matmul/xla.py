"""The production path on CPU, in plain jax.numpy."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized_matmul.reference import quantize_rows, widen


def quantized_matmul(
    x: jax.Array,  # [T, D]
    qvalue: jax.Array,  # [F, D]
    scale: jax.Array,  # f32[F, G]
    offset: jax.Array | None,  # f32[F, G]
    *,
    w8a8: str | None,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """See the package's docstring."""
    if w8a8 is not None:
        x8, x_scale = quantize_rows(x)
        if w8a8 == "int8":
            sums = _dot(x8, qvalue, jnp.int32).astype(jnp.float32)
        else:
            sums = _dot(x8.astype(jnp.bfloat16), qvalue.astype(jnp.bfloat16), jnp.float32)
        return (sums * x_scale * scale.T).astype(out_dtype)
    if scale.shape[1] == 1:
        return (_dot(x, qvalue.astype(x.dtype), jnp.float32) * scale.T).astype(out_dtype)
    return _dot(x, widen(qvalue, scale, offset).astype(x.dtype), jnp.float32).astype(out_dtype)


def _dot(a: jax.Array, b: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """a [M, D] times the transposed b [N, D], accumulated in dtype; float32 means float32 on every chip."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision, dtype)
