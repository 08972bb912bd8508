"""The production path on CPU, in plain XLA: work in proportion to the resident tokens, by blocks of pages.

Decode rows are sorted by length and taken GROUP_ROWS at a time, so that a group ends when its longest row ends.
Rows with more query tokens are cut into tiles of queries, each of which walks its row's blocks up to the diagonal.
Both walk with an online softmax (FlashAttention, arXiv:2205.14135) in loops whose trip counts are read from kv_lens.
What is derived from page_table, kv_lens and cu_q_lens alone is the same expression in every layer: XLA computes it
once per program.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

GROUP_ROWS = 8  # decode rows that walk together
BLOCK_TOKENS = 128  # kv tokens of one block of the walk (one page, if a page is longer)
FEW_QUERIES = 16  # up to so many per kv head, XLA:CPU multiplies keys by queries 2x faster than the other way
TILE_QUERIES = 64  # query tokens of one prefill tile
MASKED = -1e30  # a score that weighs nothing; finite, since -inf - -inf is NaN

Block = tuple[
    jax.Array, jax.Array, jax.Array
]  # k [W, K, C, Hk], v [W, K, C, Hv], visible bool[W, 1, M or 1, C]


def ragged_paged_attention(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, K, page_size, 2H]
    kv_scales: jax.Array | None,  # f32[num_pages, K, 2, page_size]
    page_table: jax.Array,  # i32[B, P]
    kv_lens: jax.Array,  # i32[B]
    cu_q_lens: jax.Array,  # i32[B + 1]
    distribution: jax.Array,  # i32[3]
    *,
    sm_scale: float,
    max_q_len: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See the package's docstring."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = kv_pages.shape[1:3]
    block_pages = max(1, BLOCK_TOKENS // page_size)
    page_table = pad_columns(page_table, block_pages)
    queries = (q.astype(jnp.float32) * sm_scale).reshape(
        num_tokens, num_kv_heads, -1, head_dim
    )  # [T, K, G, H]
    sinks = None if sink_logits is None else sink_logits.reshape(num_kv_heads, -1)  # f32[K, G]

    # rows [0, decode_end): the token of row b is q[b]
    rows = min(num_tokens, page_table.shape[0])
    decode_lens = jnp.where(jnp.arange(rows) < distribution[0], kv_lens[:rows], 0)
    out, lse = _decode(
        queries[:rows],
        kv_pages,
        kv_scales,
        page_table[:rows],
        decode_lens,
        block_pages,
        sliding_window,
        soft_cap,
        sinks,
    )
    out = jnp.pad(out, ((0, num_tokens - rows), (0, 0), (0, 0), (0, 0)))
    lse = jnp.pad(lse, ((0, num_tokens - rows), (0, 0), (0, 0)), constant_values=-jnp.inf)
    if max_q_len > 1:
        out, lse = _prefill(
            out,
            lse,
            queries,
            kv_pages,
            kv_scales,
            page_table,
            kv_lens,
            cu_q_lens,
            distribution,
            block_pages,
            max_q_len,
            sliding_window,
            soft_cap,
            sinks,
        )
    out = out.reshape(q.shape).astype(q.dtype)
    return (out, lse.reshape(num_tokens, num_q_heads)) if return_lse else out


def pad_columns(page_table: jax.Array, block_pages: int) -> jax.Array:
    """Null pages behind the table until whole blocks fit: dynamic_slice would clamp, and so read other pages."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block_pages)))


def gather_block(
    kv_pages: jax.Array,  # [num_pages, K, page_size, 2H]
    kv_scales: jax.Array | None,
    page_ids: jax.Array,  # i32[W, pages of a block]
    live: jax.Array,  # bool[W, C]
) -> jax.Array:  # f32[W, K, C, 2H]
    """One copy: gathers, widens and scales a block of pages, zeros where not live (0 x NaN is NaN)."""
    num_pages, num_kv_heads, page_size, lanes = kv_pages.shape
    width, block_pages = page_ids.shape
    # pages of each head apart, so that the gather itself brings the head before the page and nothing is transposed
    ids = (
        page_ids[:, None, :] * num_kv_heads + jnp.arange(num_kv_heads)[:, None]
    )  # i32[W, K, pages of a block]
    pool = kv_pages.reshape(num_pages * num_kv_heads, page_size, lanes)
    kv = (
        pool.at[ids].get(mode="promise_in_bounds").astype(jnp.float32)
    )  # f32[W, K, block_pages, page_size, 2H]
    if kv_scales is not None:
        scales = kv_scales.reshape(num_pages * num_kv_heads, 2, page_size)
        scales = scales.at[ids].get(mode="promise_in_bounds")  # f32[W, K, block_pages, 2, page_size]
        is_k = jnp.arange(lanes) < lanes // 2
        kv = kv * jnp.where(is_k, scales[:, :, :, 0, :, None], scales[:, :, :, 1, :, None])
    kv = jnp.where(live.reshape(width, 1, block_pages, page_size, 1), kv, 0.0)
    return kv.reshape(width, num_kv_heads, block_pages * page_size, lanes)


def walk(
    q: jax.Array,  # f32[W, K, M, Hk]: M queries per kv head, scaled
    sinks: jax.Array | None,  # f32[K, M]
    read_block: Callable[[jax.Array], Block],
    first: jax.Array | int,
    last: jax.Array,
    head_dim: int,  # Hv
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:  # f32[W, K, M, Hv], f32[W, K, M]
    """Online softmax over the blocks [first, last)."""
    if sinks is None:
        peak = jnp.full(q.shape[:3], MASKED)
        total = jnp.zeros(q.shape[:3])
    else:
        peak = jnp.broadcast_to(sinks, q.shape[:3])
        total = jnp.ones(q.shape[:3])

    def step(block: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, acc = state
        k, v, visible = read_block(block)
        if q.shape[2] <= FEW_QUERIES:
            scores = jnp.einsum("wkch,wkmh->wkcm", k, q, preferred_element_type=jnp.float32).swapaxes(2, 3)
        else:
            scores = jnp.einsum("wkmh,wkch->wkmc", q, k, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        decay = jnp.exp(peak - new_peak)
        weights = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0.0)
        new = jnp.einsum("wkmc,wkch->wkmh", weights, v, preferred_element_type=jnp.float32)
        return new_peak, total * decay + weights.sum(axis=-1), acc * decay[..., None] + new

    state = (peak, total, jnp.zeros((*q.shape[:3], head_dim)))
    peak, total, acc = jax.lax.fori_loop(first, last, step, state)
    return acc / jnp.where(total > 0, total, 1.0)[..., None], peak + jnp.log(total)


def _decode(
    q: jax.Array,  # f32[B, K, G, H]
    kv_pages: jax.Array,
    kv_scales: jax.Array | None,
    page_table: jax.Array,  # i32[B, P]
    kv_lens: jax.Array,  # i32[B], 0 in rows that are no decode rows
    block_pages: int,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:  # f32[B, K, G, H], f32[B, K, G]; zeros and -inf where kv_lens is 0
    num_rows, _, _, head_dim = q.shape
    page_size = kv_pages.shape[2]
    block = block_pages * page_size  # C
    width = min(GROUP_ROWS, num_rows)
    num_groups = math.ceil(num_rows / width)
    if num_groups > 1:
        order = jnp.argsort(-kv_lens)
        q, lens, table = q[order], kv_lens[order], page_table[order]
    else:  # one group ends with its longest row anyway: nothing to sort, and no loop over groups
        lens, table = kv_lens, page_table
    lens, table = _pad_rows(lens, num_groups * width), _pad_rows(table, num_groups * width)
    # K and V lanes stay together: q's zeros meet V, and the K lanes of the result are cut off. Twice the
    # multiplications, but no copy of K and of V.
    q = jnp.pad(q, ((0, num_groups * width - num_rows), (0, 0), (0, 0), (0, head_dim)))

    def attend_group(group: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = group * width
        group_lens = jax.lax.dynamic_slice_in_dim(lens, start, width)

        def read_block(i: jax.Array) -> Block:
            positions = i * block + jnp.arange(block)  # i32[C]
            live = positions < group_lens[:, None]
            if sliding_window is not None:
                live &= positions >= group_lens[:, None] - sliding_window
            page_ids = jax.lax.dynamic_slice(table, (start, i * block_pages), (width, block_pages))
            kv = gather_block(kv_pages, kv_scales, page_ids, live)
            return kv, kv, live[:, None, None, :]

        first: jax.Array | int = 0
        if sliding_window is not None:
            shortest = jnp.where(group_lens > 0, group_lens, group_lens.max()).min()
            first = jnp.maximum(shortest - sliding_window, 0) // block
        last = (group_lens.max() + block - 1) // block
        group_q = jax.lax.dynamic_slice_in_dim(q, start, width)
        out, lse = walk(group_q, sinks, read_block, first, last, 2 * head_dim, soft_cap)
        lse = jnp.where(group_lens[:, None, None] > 0, lse, -jnp.inf)
        return (
            jax.lax.dynamic_update_slice_in_dim(state[0], out[..., head_dim:], start, 0),
            jax.lax.dynamic_update_slice_in_dim(state[1], lse, start, 0),
        )

    live_groups = (jnp.sum(kv_lens > 0) + width - 1) // width
    state = (jnp.zeros((*q.shape[:3], head_dim)), jnp.full(q.shape[:3], -jnp.inf))
    if num_groups == 1:
        return attend_group(jnp.int32(0), state)

    # Two loops that do not depend on each other: XLA:CPU runs one loop on one thread, and two at the same time.
    def attend_every_other(first: int) -> tuple[jax.Array, jax.Array]:
        return jax.lax.fori_loop(
            0, (live_groups + 1 - first) // 2, lambda i, state: attend_group(2 * i + first, state), state
        )

    even, odd = attend_every_other(0), attend_every_other(1)
    is_odd = (jnp.arange(num_groups * width) // width % 2 == 1)[:, None, None]
    place = jnp.argsort(order)
    out = jnp.where(is_odd[..., None], odd[0], even[0])[place]
    return out, jnp.where(is_odd, odd[1], even[1])[place]


def _pad_rows(x: jax.Array, num_rows: int) -> jax.Array:
    return jnp.pad(x, ((0, num_rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)))


def _prefill(
    out: jax.Array,  # f32[T, K, G, H] with the decode rows' results
    lse: jax.Array,  # f32[T, K, G]
    q: jax.Array,  # f32[T, K, G, H]
    kv_pages: jax.Array,
    kv_scales: jax.Array | None,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    block_pages: int,
    max_q_len: int,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Writes the results of rows [decode_end, num_seqs) into out and lse, one tile of queries of one row at a time."""
    num_tokens, num_kv_heads, group_size, head_dim = q.shape
    num_rows = page_table.shape[0]
    block = block_pages * kv_pages.shape[2]  # C
    tile = min(TILE_QUERIES, max_q_len)
    row_ids = jnp.arange(num_rows)
    is_prefill = (row_ids >= distribution[0]) & (row_ids < distribution[2]) & (kv_lens > 0)
    q_lens = jnp.where(is_prefill, cu_q_lens[1:] - cu_q_lens[:-1], 0)  # i32[B]
    tile_ends = jnp.cumsum((q_lens + tile - 1) // tile)  # i32[B]: tiles of the rows up to and with this one
    sinks = None if sinks is None else jnp.repeat(sinks, tile, axis=1)  # f32[K, G * tile]
    # a tile that starts near the end of the batch must not be clamped
    q, out = _pad_rows(q, num_tokens + tile), _pad_rows(out, num_tokens + tile)
    lse = _pad_rows(lse, num_tokens + tile)

    def attend_tile(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row = jnp.searchsorted(tile_ends, i, side="right")
        q_len, kv_len = q_lens[row], kv_lens[row]
        offset = (i - tile_ends[row]) * tile + ((q_len + tile - 1) // tile) * tile  # of the tile in its row
        start = cu_q_lens[row] + offset
        positions = kv_len - q_len + offset + jnp.arange(tile)  # i32[tile]
        kv_end = jnp.minimum(positions[-1] + 1, kv_len)

        def read_block(j: jax.Array) -> Block:
            kv_positions = j * block + jnp.arange(block)  # i32[C]
            live = kv_positions < kv_end
            visible = kv_positions <= positions[:, None]  # bool[tile, C]
            if sliding_window is not None:
                live &= kv_positions > positions[0] - sliding_window
                visible &= kv_positions > positions[:, None] - sliding_window
            visible &= live
            page_ids = jax.lax.dynamic_slice(page_table, (row, j * block_pages), (1, block_pages))
            kv = gather_block(kv_pages, kv_scales, page_ids, live[None])
            return kv[..., :head_dim], kv[..., head_dim:], jnp.tile(visible, (group_size, 1))[None, None]

        first: jax.Array | int = 0
        if sliding_window is not None:
            first = jnp.maximum(positions[0] + 1 - sliding_window, 0) // block
        tile_q = jax.lax.dynamic_slice_in_dim(q, start, tile)  # [tile, K, G, H]
        tile_q = tile_q.transpose(1, 2, 0, 3).reshape(1, num_kv_heads, group_size * tile, head_dim)
        new, new_lse = walk(
            tile_q, sinks, read_block, first, (kv_end + block - 1) // block, head_dim, soft_cap
        )
        new = new.reshape(num_kv_heads, group_size, tile, head_dim).transpose(2, 0, 1, 3)
        new_lse = new_lse.reshape(num_kv_heads, group_size, tile).transpose(2, 0, 1)
        mine = (offset + jnp.arange(tile) < q_len)[:, None, None]  # the rest belongs to the next row
        out, lse = state
        new = jnp.where(mine[..., None], new, jax.lax.dynamic_slice_in_dim(out, start, tile))
        new_lse = jnp.where(mine, new_lse, jax.lax.dynamic_slice_in_dim(lse, start, tile))
        return (
            jax.lax.dynamic_update_slice_in_dim(out, new, start, 0),
            jax.lax.dynamic_update_slice_in_dim(lse, new_lse, start, 0),
        )

    out, lse = jax.lax.fori_loop(0, tile_ends[-1], attend_tile, (out, lse))
    return out[:num_tokens], lse[:num_tokens]
