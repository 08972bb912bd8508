"""Append the new K and V to their pages, then attend over the pages: the model's only door to the kernels."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxinfer.batch import StepBatch
from jaxinfer.kv_cache import KVCache, KVCacheSpec
from jaxinfer.pallas_kernels.kv_append import kv_append
from jaxinfer.pallas_kernels.ragged_paged_attention import ragged_paged_attention


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


def over_layers(
    layers: tuple[Any, ...],
    x: jax.Array,  # [T, D]
    kv_cache: KVCache,
    rope: tuple[jax.Array, jax.Array],
    batch: StepBatch,
    before: Callable[..., tuple[jax.Array, jax.Array, jax.Array]],
    after: Callable[..., jax.Array],
    **options: Any,
) -> tuple[jax.Array, KVCache]:
    """All layers: (x, the cache with K and V appended). They are one loop where the cache's pages are one array.

    A layer's own part of the loop, the products before and after attention, is a branch of a switch, and reads its
    weights where they lie: weights that a loop slices out of a stack are copied. All else stands in the program once.
    What XLA:CPU takes to compile and to load a program, and what it keeps of it, grows with its instructions.

    Args:
      layers: weights of each.
      before: (weights, x, rope, batch) -> q [T, N, H], k and v [T, K, H].
      after: (weights, x, attention [T, N, H], batch) -> x.
      options: of `append_and_attend`, equal for all layers.
    """
    spec = kv_cache.spec
    if not spec.one_array:

        @jax.jit  # equal layers are traced and lowered once
        def layer(w, x, pages, scales, rope, batch):
            q, k, v = before(w, x, rope, batch)
            out, pages, scales = append_and_attend(q, k, v, pages, scales, batch, spec, **options)
            return after(w, x, out, batch), pages, scales

        pages: list[Any] = list(kv_cache.pages)
        scales: list[Any] = list(kv_cache.scales or [None] * spec.num_layers)
        for i, w in enumerate(layers):
            x, pages[i], scales[i] = layer(w, x, pages[i], scales[i], rope, batch)
        return x, replace(
            kv_cache, pages=tuple(pages), scales=None if kv_cache.scales is None else tuple(scales)
        )

    before, after = jax.jit(before), jax.jit(after)  # traced and lowered once, not in each branch

    def turn(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, pages = state
        q, k, v = jax.lax.switch(i, [partial(before, w) for w in layers], x, rope, batch)
        first = i * spec.num_pages
        moved = replace(
            batch,
            slot_mappings=tuple(slots + first * spec.page_size for slots in batch.slot_mappings),
            page_tables=tuple(table + first for table in batch.page_tables),
        )
        out, pages, _ = append_and_attend(q, k, v, pages, None, moved, spec, **options)
        return jax.lax.switch(i, [partial(after, w) for w in layers], x, out, batch), pages

    x, array = jax.lax.fori_loop(0, len(layers), turn, (x, *kv_cache.pages))
    return x, replace(kv_cache, pages=(array,))
