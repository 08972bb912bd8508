"""The truth: one scatter. Also the quantizer that the implementations share."""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.kv_append import QUANTIZED_MAX


def quantize(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """[..., H] -> qvalues of dtype [..., H], f32 scales [...]: one per vector, as the package says."""
    top = QUANTIZED_MAX[dtype.name]
    x = x.astype(jnp.float32)
    amax = jnp.abs(x).max(axis=-1)  # f32[...]
    inverse = jnp.where(amax > 0, top / amax, 0.0)
    qvalue = jnp.clip(x * inverse[..., None], -top, top)
    if jnp.issubdtype(dtype, jnp.integer):
        qvalue = jnp.round(qvalue)
    return qvalue.astype(dtype), amax / top


def cast(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,
    dtype: jnp.dtype,  # of the pages
    kv_scales: jax.Array | None,  # f32[num_pages, K, 2, page_size]
    pages: jax.Array,  # i32[T]
    offsets: jax.Array,  # i32[T]
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """K and V as the pages take them, and the scales with theirs."""
    if kv_scales is None:
        return k.astype(dtype), v.astype(dtype), None
    k, k_scales = quantize(k, dtype)  # [T, K, H], f32[T, K]
    v, v_scales = quantize(v, dtype)
    return k, v, kv_scales.at[pages, :, :, offsets].set(jnp.stack([k_scales, v_scales], axis=-1))


def kv_append(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [num_pages, K, page_size, 2H]
    kv_scales: jax.Array | None,  # f32[num_pages, K, 2, page_size]
    slot_mapping: jax.Array,  # i32[T]
) -> tuple[jax.Array, jax.Array | None]:
    """See the package's docstring."""
    pages, offsets = jnp.divmod(slot_mapping, kv_pages.shape[2])  # i32[T] each
    k, v, kv_scales = cast(k, v, kv_pages.dtype, kv_scales, pages, offsets)
    return kv_pages.at[pages, :, offsets].set(jnp.concatenate([k, v], axis=-1)), kv_scales
