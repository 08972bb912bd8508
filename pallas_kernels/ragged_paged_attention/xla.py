"""The production path on CPU, in plain XLA: work in proportion to the resident tokens, by pages and blocks of pages.

Decode rows: the pages of all rows stand in one list, which is worked off CHUNK_TOKENS at a time, whichever rows they
belong to; what a row has summed so far is one entry of the loop's state (split along the keys as in Flash-Decoding,
crfm.stanford.edu/2023/10/12/flashdecoding.html). Rows with more query tokens are cut into tiles of queries, each of
which walks its row's blocks up to the diagonal. Both keep an online softmax (FlashAttention, arXiv:2205.14135) in loops
whose trip counts are read from kv_lens. XLA:CPU runs one loop on one thread, and two at the same time: so there are
two of each.
Of bfloat16 queries and pages the products are bfloat16 with float32 sums, of all else float32.
What is derived from page_table, kv_lens and cu_q_lens alone is the same expression in every layer: XLA computes it
once per program.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

CHUNK_TOKENS = 4096  # kv tokens of one turn of the decode loop, with many rows
ROW_TOKENS = 256  # of these at most per decode row
FEW_ROWS = 8  # decode rows up to which one loop is faster than two and their sum
BLOCK_TOKENS = 128  # kv tokens of one block of the walk (one page, if a page is longer)
FEW_QUERIES = 16  # up to so many per kv head, XLA:CPU multiplies keys by queries 2x faster than the other way
TILE_QUERIES = 64  # query tokens of one prefill tile
MASKED = -1e30  # a score that weighs nothing; finite, since -inf - -inf is NaN
# The peak before any score: so far over MASKED that exp(MASKED - peak) is 0 also where nothing is visible yet.
NO_PEAK = MASKED / 2

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
    num_kv_heads = kv_pages.shape[1]
    dtype = jnp.bfloat16 if q.dtype == kv_pages.dtype == jnp.bfloat16 else jnp.float32
    queries = q.astype(dtype).reshape(num_tokens, num_kv_heads, -1, head_dim)  # [T, K, G, H]
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
        sm_scale,
        sliding_window,
        soft_cap,
        sinks,
    )
    if max_q_len > 1:
        is_decode = jnp.arange(num_tokens) < distribution[0]
        out = jnp.pad(out, ((0, num_tokens - rows), (0, 0), (0, 0), (0, 0)))
        lse = jnp.pad(lse, ((0, num_tokens - rows), (0, 0), (0, 0)))
        prefill_out, prefill_lse = _prefill(
            queries,
            kv_pages,
            kv_scales,
            page_table,
            kv_lens,
            cu_q_lens,
            distribution,
            max_q_len,
            sm_scale,
            sliding_window,
            soft_cap,
            sinks,
        )
        out = jnp.where(is_decode[:, None, None, None], out, prefill_out)
        lse = jnp.where(is_decode[:, None, None], lse, prefill_lse)
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
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:  # dtype[W, K, C, 2H]
    """One copy: gathers, widens and scales a block of pages, zeros where not live (0 x NaN is NaN)."""
    num_pages, num_kv_heads, page_size, lanes = kv_pages.shape
    width, block_pages = page_ids.shape
    # pages of each head apart, so that the gather itself brings the head before the page and nothing is transposed
    ids = (
        page_ids[:, None, :] * num_kv_heads + jnp.arange(num_kv_heads)[:, None]
    )  # i32[W, K, pages of a block]
    pool = kv_pages.reshape(num_pages * num_kv_heads, page_size, lanes)
    kv = pool.at[ids].get(mode="promise_in_bounds").astype(dtype)  # [W, K, block_pages, page_size, 2H]
    if kv_scales is not None:
        scales = kv_scales.reshape(num_pages * num_kv_heads, 2, page_size)
        scales = scales.at[ids].get(mode="promise_in_bounds")  # f32[W, K, block_pages, 2, page_size]
        is_k = jnp.arange(lanes) < lanes // 2
        kv = kv * jnp.where(is_k, scales[:, :, :, 0, :, None], scales[:, :, :, 1, :, None])
    kv = jnp.where(live.reshape(width, 1, block_pages, page_size, 1), kv, 0)
    return kv.reshape(width, num_kv_heads, block_pages * page_size, lanes)


def walk(
    q: jax.Array,  # [W, K, M, Hk]: M queries per kv head, of the dtype of the blocks
    sinks: jax.Array | None,  # f32[K, M]
    read_block: Callable[[jax.Array], Block],
    first: jax.Array | int,
    last: jax.Array,
    head_dim: int,  # Hv
    sm_scale: float,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:  # f32[W, K, M, Hv], f32[W, K, M]
    """Online softmax over the blocks [first, last)."""
    if sinks is None:
        peak = jnp.full(q.shape[:3], NO_PEAK)
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
        scores = _masked(scores, visible, sm_scale, soft_cap)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        decay = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak[..., None])
        new = jnp.einsum("wkmc,wkch->wkmh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_peak, total * decay + weights.sum(axis=-1), acc * decay[..., None] + new

    state = (peak, total, jnp.zeros((*q.shape[:3], head_dim)))
    peak, total, acc = jax.lax.fori_loop(first, last, step, state)
    return _finished(peak, total, acc)


def _masked(scores: jax.Array, visible: jax.Array, sm_scale: float, soft_cap: float | None) -> jax.Array:
    scores = scores * sm_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    return jnp.where(visible, scores, MASKED)


def _finished(peak: jax.Array, total: jax.Array, acc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(attention, log-sum-exp) of an online softmax."""
    return acc / jnp.where(total > 0, total, 1.0)[..., None], peak + jnp.log(total)


def _decode(
    q: jax.Array,  # [B, K, G, H]
    kv_pages: jax.Array,
    kv_scales: jax.Array | None,
    page_table: jax.Array,  # i32[B, P]
    kv_lens: jax.Array,  # i32[B], 0 in rows that are no decode rows
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,  # f32[K, G]
) -> tuple[jax.Array, jax.Array]:  # f32[B, K, G, H], f32[B, K, G]; zeros and -inf where kv_lens is 0
    num_rows, num_kv_heads, group_size, head_dim = q.shape
    page_size, most = kv_pages.shape[2], page_table.shape[1]
    chunk_tokens = min(CHUNK_TOKENS, ROW_TOKENS * num_rows, num_rows * most * page_size)
    width = max(1, chunk_tokens // page_size)  # pages of a turn, W
    num_loops = 2 if num_rows > FEW_ROWS else 1

    # The list of pages: row after row, each from the first page that its window sees.
    starts = jnp.zeros_like(kv_lens)
    if sliding_window is not None:
        starts = jnp.maximum(kv_lens - sliding_window, 0)
    counts = (kv_lens + page_size - 1) // page_size - starts // page_size  # i32[B]
    ends = jnp.cumsum(counts)
    items = jnp.arange(num_rows * most + width)  # one chunk may reach past the longest list
    rows = jnp.searchsorted(ends, items, side="right").astype(jnp.int32)  # num_rows past the end of the list
    known = jnp.minimum(rows, num_rows - 1)
    columns = items - (ends - counts)[known] + starts[known] // page_size
    page_ids = page_table[known, jnp.minimum(columns, most - 1)]
    # what is live in a page: positions [low, high) of it
    low = starts[known] - columns * page_size
    high = jnp.where(rows < num_rows, kv_lens[known] - columns * page_size, 0)

    # K and V lanes stay together: q's zeros meet V, and the K lanes of the result are cut off. Twice the
    # multiplications, but no copy of K and of V.
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, head_dim)))

    def attend_chunk(chunk: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        def of_chunk(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, chunk * width, width)

        peak, total, acc = state
        row, slots = of_chunk(rows), jnp.arange(page_size)
        live = (slots >= of_chunk(low)[:, None]) & (slots < of_chunk(high)[:, None])  # bool[W, page_size]
        kv = gather_block(kv_pages, kv_scales, of_chunk(page_ids)[:, None], live, q.dtype)
        chunk_q = q.at[row].get(mode="clip")
        scores = jnp.einsum("wkgh,wkch->wkgc", chunk_q, kv, preferred_element_type=jnp.float32)
        scores = _masked(scores, live[:, None, None, :], sm_scale, soft_cap)
        # Pages past the end of the list belong to no row: what they would add is dropped.
        new_peak = peak.at[row].max(scores.max(axis=-1), mode="drop")
        decay = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak.at[row].get(mode="clip")[..., None])
        new = jnp.einsum("wkgc,wkch->wkgh", weights.astype(q.dtype), kv, preferred_element_type=jnp.float32)
        total = (total * decay).at[row].add(weights.sum(axis=-1), mode="drop")
        acc = (acc * decay[..., None]).at[row].add(new[..., head_dim:], mode="drop")
        return new_peak, total, acc

    shape = (num_rows, num_kv_heads, group_size)
    num_chunks = (ends[-1] + width - 1) // width

    def attend_every_other(first: int) -> tuple[jax.Array, ...]:
        peak, total = jnp.full(shape, NO_PEAK), jnp.zeros(shape)
        if sinks is not None and first == 0:
            peak, total = jnp.broadcast_to(sinks, shape), jnp.ones(shape)
        return jax.lax.fori_loop(
            0,
            (num_chunks + num_loops - 1 - first) // num_loops,
            lambda i, state: attend_chunk(num_loops * i + first, state),
            (peak, total, jnp.zeros((*shape, head_dim))),
        )

    peak, total, acc = attend_every_other(0)
    if num_loops == 2:
        other_peak, other_total, other_acc = attend_every_other(1)
        both = jnp.maximum(peak, other_peak)
        decay, other_decay = jnp.exp(peak - both), jnp.exp(other_peak - both)
        total = total * decay + other_total * other_decay
        acc = acc * decay[..., None] + other_acc * other_decay[..., None]
        peak = both
    out, lse = _finished(peak, total, acc)
    is_live = (kv_lens > 0)[:, None, None]
    return jnp.where(is_live[..., None], out, 0.0), jnp.where(is_live, lse, -jnp.inf)


def _pad_rows(x: jax.Array, num_rows: int) -> jax.Array:
    return jnp.pad(x, ((0, num_rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)))


def _prefill(
    q: jax.Array,  # [T, K, G, H]
    kv_pages: jax.Array,
    kv_scales: jax.Array | None,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    max_q_len: int,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:  # f32[T, K, G, H], f32[T, K, G]; zeros and -inf elsewhere
    """The results of rows [decode_end, num_seqs), one tile of queries of one row at a time."""
    num_tokens, num_kv_heads, group_size, head_dim = q.shape
    num_rows, page_size = page_table.shape[0], kv_pages.shape[2]
    block_pages = max(1, BLOCK_TOKENS // page_size)
    block = block_pages * page_size  # C
    page_table = pad_columns(page_table, block_pages)
    tile = min(TILE_QUERIES, max_q_len)
    row_ids = jnp.arange(num_rows)
    is_prefill = (row_ids >= distribution[0]) & (row_ids < distribution[2]) & (kv_lens > 0)
    q_lens = jnp.where(is_prefill, cu_q_lens[1:] - cu_q_lens[:-1], 0)  # i32[B]
    tile_counts = (q_lens + tile - 1) // tile
    tile_ends = jnp.cumsum(tile_counts)  # i32[B]: tiles of the rows up to and with this one
    sinks = None if sinks is None else jnp.repeat(sinks, tile, axis=1)  # f32[K, G * tile]
    q = _pad_rows(q, num_tokens + tile)  # a tile that starts near the end of the batch must not be clamped

    def attend_tile(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row = jnp.searchsorted(tile_ends, i, side="right")
        q_len, kv_len = q_lens[row], kv_lens[row]
        offset = (i - tile_ends[row] + tile_counts[row]) * tile  # of the tile in its row
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
            kv = gather_block(kv_pages, kv_scales, page_ids, live[None], q.dtype)
            return kv[..., :head_dim], kv[..., head_dim:], jnp.tile(visible, (group_size, 1))[None, None]

        first: jax.Array | int = 0
        if sliding_window is not None:
            first = jnp.maximum(positions[0] + 1 - sliding_window, 0) // block
        tile_q = jax.lax.dynamic_slice_in_dim(q, start, tile)  # [tile, K, G, H]
        tile_q = tile_q.transpose(1, 2, 0, 3).reshape(1, num_kv_heads, group_size * tile, head_dim)
        last = (kv_end + block - 1) // block
        new, new_lse = walk(tile_q, sinks, read_block, first, last, head_dim, sm_scale, soft_cap)
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

    def attend_every_other(first: int) -> tuple[jax.Array, jax.Array]:
        state = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], -jnp.inf)
        last = (tile_ends[-1] + 1 - first) // 2
        return jax.lax.fori_loop(0, last, lambda i, state: attend_tile(2 * i + first, state), state)

    even, odd = attend_every_other(0), attend_every_other(1)
    tokens = jnp.arange(num_tokens)
    token_rows = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], tokens, side="right"), num_rows - 1)
    token_tiles = (tile_ends - tile_counts)[token_rows] + (tokens - cu_q_lens[token_rows]) // tile
    is_odd = (token_tiles % 2 == 1)[:, None, None]
    out = jnp.where(is_odd[..., None], odd[0][:num_tokens], even[0][:num_tokens])
    return out, jnp.where(is_odd, odd[1][:num_tokens], even[1][:num_tokens])
