"""Append the new K and V to their pages, then attend over the pages: the model's only door to the kernels."""

from typing import Any

import jax

from jaxinfer.batch import StepBatch
from jaxinfer.kv_cache import KVCacheSpec
from pallas_kernels.kv_append import kv_append
from pallas_kernels.ragged_paged_attention import ragged_paged_attention


def append_and_attend(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    pages: jax.Array,  # of spec.page_shape
    scales: jax.Array | None,  # f32[num_pages, K, 2, page_size] for quantized pages
    batch: StepBatch,
    spec: KVCacheSpec,
    *,
    sm_scale: float,
    group: int = 0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,  # f32[N]
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """One layer's attention: ([T, N, H], pages, scales). `group` picks the page table of the KV group."""
    pages, scales = kv_append(
        k,
        v,
        pages,
        scales,
        batch.slot_mappings[group],
        implementation=spec.implementation,
        compute_capability=spec.compute_capability,
    )
    out: Any = ragged_paged_attention(
        q,
        pages,
        scales,
        batch.page_tables[group],
        batch.kv_lens,
        batch.cu_q_lens,
        batch.distribution,
        sm_scale=sm_scale,
        max_q_len=batch.max_q_len,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sink_logits=sink_logits,
        # A batch in tiles is one whose results do not depend on each other: LLM has checked that spec says cpu.
        implementation=spec.implementation if batch.tile is None else "cpu_invariant",
        compute_capability=spec.compute_capability,
    )
    return out.astype(q.dtype), pages, scales
