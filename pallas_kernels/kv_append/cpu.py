"""The production path on CPU: two scatters into pages of the CPU layout."""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels import cpu_pages
from jaxinfer.pallas_kernels.kv_append.reference import cast


def kv_append(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # of the CPU layout
    kv_scales: jax.Array | None,  # f32[num_pages, K, 2, page_size]
    slot_mapping: jax.Array,  # i32[T]
) -> tuple[jax.Array, jax.Array | None]:
    """See the package's docstring."""
    pages, offsets = jnp.divmod(slot_mapping, cpu_pages.page_size(kv_pages, k.shape[2]))  # i32[T] each
    k, v, kv_scales = cast(k, v, kv_pages.dtype, kv_scales, pages, offsets)
    return cpu_pages.append(k, v, kv_pages, pages, offsets), kv_scales
