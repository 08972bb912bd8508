"""quantized_matmul in plain jax.numpy, for any platform: codes widened into a plain product, or a product of int8."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.quantized_matmul.reference import quantize_rows, widen


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
            sums = int8_dot(x8, qvalue).astype(jnp.float32)
        else:
            sums = dot(x8.astype(jnp.bfloat16), qvalue.astype(jnp.bfloat16))
        return (sums * x_scale * scale.T).astype(out_dtype)
    if scale.shape[1] > 1:
        return dot(x, widen(qvalue, scale, offset).astype(x.dtype)).astype(out_dtype)
    return (dot(x, qvalue.astype(x.dtype)) * scale.T).astype(out_dtype)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [M, D] times the transposed b [N, D] in float32, which means float32 on every chip."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision, jnp.float32)


def int8_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """int8 a [M, D] times the transposed int8 b [N, D] in int32."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
