"""Decode on the GPU kernel, everything else on XLA: for GPUs whose compute capability has no prefill kernel.

The choice is by call and by what is static in it: a call whose rows all fit the decode kernel (the decode programs, and
short drafts) is gpu's, any other xla's, with the decode rows that ride along in it. Nothing depends on the data.
"""

from typing import Any

import jax

from jaxinfer.pallas_kernels.ragged_paged_attention import gpu, xla


def ragged_paged_attention(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, K, page_size, 2H]
    *arrays: jax.Array | None,
    max_q_len: int,
    compute_capability: tuple[int, int],
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See the package's docstring.

    Raises:
        NotImplementedError: the decode kernel does not have this combination with one query token per row.
    """
    reason = gpu.refusal(q, kv_pages, 1, compute_capability)
    if reason is not None:
        raise NotImplementedError(f"ragged_paged_attention implementation 'gpu_xla': {reason}")
    group, head_dim = q.shape[1] // kv_pages.shape[1], q.shape[2]
    attend: Any = xla.ragged_paged_attention
    if gpu.takes_decode_only(max_q_len, group, head_dim, compute_capability):
        attend, options = gpu.ragged_paged_attention, options | {"compute_capability": compute_capability}
    return attend(q, kv_pages, *arrays, max_q_len=max_q_len, **options)
