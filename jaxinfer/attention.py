"""Append the new K and V to their pages, then attend over the pages: the model's only door to the kernels."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.batch import StepBatch
from jaxinfer.kv_cache import KVCacheSpec
from jaxinfer.pallas_kernels.kv_append import kv_append
from jaxinfer.pallas_kernels.ragged_paged_attention import ragged_paged_attention


@dataclass(frozen=True)
class AttentionOptions:
    """What is static about the attention of one layer.

    sm_scale: factor on the product of a query and a key; model files usually take 1 / sqrt(head_dim).
    group: index of the KV group whose pages the layer has.
    window: how many of the newest tokens a token sees, itself included; None: all.
    soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves them.
    sinks: name of the layer's leaf f32[N], one more logit per head in the softmax (gpt-oss); None: there is none.
    rope: index into the config's `ropes`, the tables of rotary embedding; None: nothing is turned.
    """

    sm_scale: float = 1.0
    group: int = 0
    window: int | None = None
    soft_cap: float | None = None
    sinks: str | None = None
    rope: int | None = 0


def append_and_attend(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    pages: jax.Array,  # of spec.page_shape
    scales: jax.Array | None,  # f32[num_pages, K, 2, page_size] for quantized pages
    slot_mapping: jax.Array,  # i32[T]
    page_table: jax.Array,  # i32[B, P]
    batch: StepBatch,
    spec: KVCacheSpec,
    options: AttentionOptions,
    *,
    window: int | jax.Array | None,  # as data (i32[]) for the kernels of spec that take it so
    sink_logits: jax.Array | None = None,  # f32[N]
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """One layer's attention: ([T, N, H], pages, scales)."""
    kernels: dict[str, Any] = {"compute_capability": spec.compute_capability}
    pages, scales = kv_append(
        k, v, pages, scales, slot_mapping, implementation=spec.implementation, **kernels
    )
    out: Any = ragged_paged_attention(
        q,
        pages,
        scales,
        page_table,
        batch.kv_lens,
        batch.cu_q_lens,
        batch.distribution,
        sm_scale=options.sm_scale,
        max_q_len=batch.max_q_len,
        sliding_window=window,
        soft_cap=options.soft_cap,
        sink_logits=sink_logits,
        # A batch in tiles is one whose results do not depend on each other: LLM has checked that spec says cpu.
        implementation=spec.implementation if batch.tile is None else "cpu_invariant",
        **kernels,
    )
    return out.astype(q.dtype), pages, scales
