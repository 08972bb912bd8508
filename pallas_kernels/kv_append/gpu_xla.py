"""The GPU kernel where it has the combination, XLA's scatter elsewhere: beside ragged_paged_attention's gpu_xla.

The choice is in shapes, dtypes and the compute capability: nothing depends on the data.
"""

import jax

from jaxinfer.pallas_kernels.kv_append import gpu, xla


def kv_append(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [num_pages, K, page_size, 2H]
    kv_scales: jax.Array | None,  # f32[num_pages, K, 2, page_size]
    slot_mapping: jax.Array,  # i32[T]
    *,
    compute_capability: tuple[int, int],
) -> tuple[jax.Array, jax.Array | None]:
    """See the package's docstring."""
    if gpu.refusal(kv_pages, compute_capability) is None:
        return gpu.kv_append(k, v, kv_pages, kv_scales, slot_mapping, compute_capability=compute_capability)
    return xla.kv_append(k, v, kv_pages, kv_scales, slot_mapping)
