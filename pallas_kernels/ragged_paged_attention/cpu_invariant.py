"""Attention on CPU whose result for a query token has the same bits in every batch.

Every token, of a decode row or of a prompt, goes through the pages that it sees by itself, and all these pairs of a
token and a page stand in one list, token after token, which is worked off TURN_PAIRS at a time as in `xla`'s
decode. So products and reductions have the same shapes in all programs, and the pairs are a batch axis of both. Where
a turn begins differs between batches; it must not change a bit:

- What a page adds is computed from that token and page alone, and is added in the order of the positions.
- The online softmax is one of base 2 whose peak is a whole number. To take a higher peak multiplies the sums so far by
  a power of 2, which is exact, and so is the factor of a weight: 2^x = 2^(x - floor x) * 2^(floor x - peak).
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels import cpu_pages
from jaxinfer.pallas_kernels.ragged_paged_attention.xla import (
    FEW_QUERIES,
    product,
    read_block,
    sums_of_vectors,
)

# Of a turn: fewer cost more per token, more cost a lone row more.
TURN_PAIRS, TURN_TOKENS = 64, 4096
MASKED = -1e30  # a score that weighs nothing
NO_PEAK = -1e9  # below any score, and so far over MASKED that 2^(MASKED - NO_PEAK) is 0
LOG2_E = math.log2(math.e)


def ragged_paged_attention(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # of the CPU layout
    kv_scales: jax.Array | None,  # f32[num_pages, K, 2, page_size]
    page_table: jax.Array,  # i32[B, P]
    kv_lens: jax.Array,  # i32[B]
    cu_q_lens: jax.Array,  # i32[B + 1]
    distribution: jax.Array,  # i32[3]
    *,
    sm_scale: float,
    max_q_len: int,
    sliding_window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See the package's docstring. Takes no note of max_q_len: one path serves all rows."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = cpu_pages.num_kv_heads(kv_pages), cpu_pages.page_size(kv_pages, head_dim)
    num_rows, most = page_table.shape
    queries = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, head_dim)  # [T, K, G, H]
    group_size = queries.shape[2]
    width = max(1, min(TURN_PAIRS, TURN_TOKENS // page_size))  # pairs of a turn, W
    multiply: Callable[..., jax.Array] = partial(product, dtype=jnp.float32)
    if group_size <= FEW_QUERIES:
        multiply = sums_of_vectors

    tokens = jnp.arange(num_tokens)
    rows = jnp.searchsorted(cu_q_lens[1:], tokens, side="right", method="compare_all")
    rows = jnp.minimum(rows, num_rows - 1)
    is_live = (tokens < cu_q_lens[distribution[2]]) & (kv_lens[rows] > 0)
    positions = kv_lens[rows] - cu_q_lens[rows + 1] + tokens  # i32[T], of a token among its row's
    starts = jnp.zeros_like(positions)  # the first position that it sees
    if sliding_window is not None:
        starts = jnp.maximum(positions + 1 - sliding_window, 0)
    counts = jnp.where(is_live, positions // page_size + 1 - starts // page_size, 0)
    ends = jnp.cumsum(counts)  # i32[T], of a token's pairs in the list
    entries = jnp.cumsum(is_live) - 1  # i32[T], of a live token in the state: there is none of others between

    def attend_turn(turn: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        pairs = turn * width + jnp.arange(width)
        token = jnp.searchsorted(ends, pairs, side="right", method="compare_all").astype(jnp.int32)
        known = jnp.minimum(token, num_tokens - 1)  # behind the end of the list there is none
        column = pairs - (ends - counts)[known] + starts[known] // page_size  # of the page in its row
        page_ids = page_table[rows[known], jnp.clip(column, 0, most - 1)]
        kv_positions = column[:, None] * page_size + jnp.arange(page_size)  # i32[W, page_size]
        live = (kv_positions >= starts[known][:, None]) & (kv_positions <= positions[known][:, None])
        live &= (token < num_tokens)[:, None]
        # The list is in the order of the entries: those of a turn are W at most.
        first = entries[token[0]]
        place = jnp.where(token < num_tokens, entries[known] - first, width)
        # A barrier, else each element that is read works this out anew.
        page_ids, live, known, place, first = jax.lax.optimization_barrier(
            (page_ids, live, known, place, first)
        )

        k, v, scales = read_block(kv_pages, kv_scales, page_ids[:, None], live, head_dim)
        scores = multiply(queries[known], k, None)  # f32[W, K, G, page_size]
        if scales is not None:
            scores *= scales[:, :, 0, None]
        scores = _of_base_2(scores * sm_scale, soft_cap)
        scores = jnp.where(live[:, None, None], scores, MASKED)
        whole = jnp.floor(scores)
        peak, total, acc = (jax.lax.dynamic_slice_in_dim(x, first, width) for x in state)
        new_peak = peak.at[place].max(whole.max(axis=-1), mode="drop")
        weights = jnp.exp2(scores - whole) * _power_of_2(
            whole - new_peak.at[place].get(mode="clip")[..., None]
        )
        new = multiply(weights if scales is None else weights * scales[:, :, 1, None], v, live)
        decay = _power_of_2(peak - new_peak)
        total = (total * decay).at[place].add(weights.sum(axis=-1), mode="drop")
        acc = (acc * decay[..., None]).at[place].add(new, mode="drop")
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(x, y, first, 0)
            for x, y in zip(state, (new_peak, total, acc), strict=True)
        )

    shape = (num_tokens + width, num_kv_heads, group_size)  # so that no turn's entries reach past the end
    peak, total = jnp.full(shape, NO_PEAK), jnp.zeros(shape)
    if sink_logits is not None:
        sinks = _of_base_2(sink_logits.reshape(num_kv_heads, group_size), None)
        peak = jnp.broadcast_to(jnp.floor(sinks), shape)
        total = jnp.broadcast_to(jnp.exp2(sinks - jnp.floor(sinks)), shape)
    num_turns = (ends[-1] + width - 1) // width
    state = (peak, total, jnp.zeros((*shape, head_dim)))
    peak, total, acc = (x[entries] for x in jax.lax.fori_loop(0, num_turns, attend_turn, state))

    out = acc / jnp.where(total > 0, total, 1.0)[..., None]
    out = jnp.where(is_live[:, None, None], out.reshape(q.shape), 0.0).astype(q.dtype)
    if not return_lse:
        return out
    lse = (peak + jnp.log2(total)).reshape(num_tokens, num_q_heads) / LOG2_E
    return out, jnp.where(is_live[:, None], lse, -jnp.inf)


def _of_base_2(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Scores whose power of 2 is what e to the (capped) scores is."""
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    return scores * LOG2_E


def _power_of_2(exponents: jax.Array) -> jax.Array:
    """2^exponents for whole float32 numbers of at most 0, exactly; 0 below the smallest normal number."""
    bits = (jnp.maximum(exponents, -127.0).astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
