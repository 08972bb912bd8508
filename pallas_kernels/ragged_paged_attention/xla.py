"""The path of all devices, and the production path on CPU, in plain XLA: work in proportion to the resident tokens, by
pages and blocks of pages, of either page layout (`cpu_pages`).

Decode rows: the pages of all rows stand in one list, which is worked off CHUNK_TOKENS at a time, whichever rows they
belong to; what a row has summed so far is one entry of the loop's state (split along the keys as in Flash-Decoding,
crfm.stanford.edu/2023/10/12/flashdecoding.html). Rows with more query tokens are cut into tiles of queries, each of
which walks its row's blocks up to the diagonal; on CPU it takes many at a time of those that need no mask. Both keep an
online softmax (FlashAttention, arXiv:2205.14135) in loops whose trip counts are read from kv_lens.
Of bfloat16 queries and pages the products of tiles are bfloat16 with float32 sums, all else is float32.
What is derived from page_table, kv_lens and cu_q_lens alone is the same expression in every layer: XLA computes it
once per program.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels import cpu_pages
from jaxinfer.pallas_kernels.cpu_sums import MORE_AXES

CHUNK_TOKENS = 4096  # kv tokens of one turn of the decode loop, with many rows
ROW_TOKENS = 256  # of these at most per decode row
BLOCK_TOKENS = 128  # kv tokens of one block of the walk (one page, if a page is longer)
TILE_QUERIES = 64  # query tokens of one prefill tile
CPU_BLOCK_TOKENS, CPU_TILE_QUERIES = 64, 32  # likewise with pages of the CPU layout
WIDE_SCORES = 2**19, 2**17  # on CPU, of the blocks that a tile takes side by side where no score is masked
FEW_QUERIES = 4  # per kv head, up to which decode rows take sums of vectors: then a matrix product is as fast
TERMS, SUMS = 16, 3  # of a sum of vectors: terms that are written out, sums that share what they read
MASKED = -1e30  # a score that weighs nothing; finite, since -inf - -inf is NaN
# The peak before any score: so far over MASKED that exp(MASKED - peak) is 0 also where nothing is visible yet.
NO_PEAK = MASKED / 2

# k [parts, K, H, C], v [1, K, parts * C, H], both scales f32[parts, K, 2, C] or None, live bool[1, parts * C] and
# visible bool[1, 1, M, C], both None where all is visible
Block = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]


class Span(NamedTuple):
    """Blocks [first, last) of a walk, each of so many parts side by side."""

    block_of: Callable[[jax.Array], Block]
    parts: int
    first: jax.Array | int
    last: jax.Array


def ragged_paged_attention(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, K, page_size, 2H], or the CPU layout
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
    """See the package's docstring."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = cpu_pages.num_kv_heads(kv_pages)
    dtype = jnp.bfloat16 if q.dtype == kv_pages.dtype == jnp.bfloat16 else jnp.float32
    queries = q.astype(dtype).reshape(num_tokens, num_kv_heads, -1, head_dim)  # [T, K, G, H]
    sinks = None if sink_logits is None else sink_logits.reshape(num_kv_heads, -1)  # f32[K, G]

    options: dict[str, Any] = {"sm_scale": sm_scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    options["sinks"] = sinks
    prefill = partial(_prefill, queries, kv_pages, kv_scales, page_table, kv_lens, cu_q_lens, **options)
    if max_q_len > 1 and page_table.shape[0] == 1:  # a tile, if it is one token alone too: a smaller program
        distribution = jnp.asarray(distribution).at[0].set(0)
        out, lse = prefill(distribution=distribution, max_q_len=max_q_len)
    else:
        # rows [0, decode_end): the token of row b is q[b]
        rows = min(num_tokens, page_table.shape[0])
        decode_lens = jnp.where(jnp.arange(rows) < distribution[0], kv_lens[:rows], 0)
        out, lse = _decode(queries[:rows], kv_pages, kv_scales, page_table[:rows], decode_lens, **options)
        if max_q_len > 1:
            is_decode = jnp.arange(num_tokens) < distribution[0]
            out, lse = _pad_rows(out, num_tokens), _pad_rows(lse, num_tokens)
            tiles, tiles_lse = prefill(distribution=distribution, max_q_len=max_q_len)
            out = jnp.where(is_decode[:, None, None, None], out, tiles)
            lse = jnp.where(is_decode[:, None, None], lse, tiles_lse)
    out = out.reshape(q.shape).astype(q.dtype)
    return (out, lse.reshape(num_tokens, num_q_heads)) if return_lse else out


def pad_columns(page_table: jax.Array, block_pages: int) -> jax.Array:
    """Null pages behind the table until whole blocks fit: dynamic_slice would clamp, and so read other pages."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block_pages)))


def read_block(
    kv_pages: jax.Array,
    kv_scales: jax.Array | None,
    page_ids: jax.Array,  # i32[W, pages of a block]
    live: jax.Array | None,  # bool[W, C]; None: all are
    head_dim: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """k [W, K, H, C], v [W, K, C, H] and both scales f32[W, K, 2, C], these zero where not live (0 x NaN is NaN)."""
    k, v = cpu_pages.read(kv_pages, page_ids, head_dim)
    if kv_scales is None:
        return k, v, None
    scales = (
        kv_scales.at[page_ids].get(mode="promise_in_bounds").transpose(0, 2, 3, 1, 4)
    )  # [W, K, 2, P, page_size]
    scales = scales.reshape(*scales.shape[:3], -1)
    return k, v, scales if live is None else jnp.where(live[:, None, None], scales, 0.0)


def product(x: jax.Array, y: jax.Array, live: jax.Array | None, dtype: jax.typing.DTypeLike) -> jax.Array:
    """[W, K, M, D] times [W, K, D, F] in `dtype`, with float32 sums: f32[W, K, M, F].

    live: bool[W, D], rows of y that are not count as zeros, NaN included; None: all are.
    """
    if live is not None:
        y = jnp.where(live[:, None, :, None], y, 0)
    return jnp.einsum("wkmd,wkdf->wkmf", x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32)


def sums_of_vectors(x: jax.Array, y: jax.Array, live: jax.Array | None) -> jax.Array:
    """`product` in float32 for few queries on a CPU: F stays fastest, and LLVM makes vector instructions of it."""
    width, num_heads, count, depth = x.shape
    num_terms = math.gcd(depth, TERMS)
    num_parts = depth // num_terms
    barrier = jax.lax.optimization_barrier
    x = x.astype(jnp.float32).reshape(width * num_heads, count, *MORE_AXES, num_parts, num_terms, 1)
    x = barrier(x)
    y = y.reshape(width * num_heads, *MORE_AXES, num_parts, num_terms, -1).astype(jnp.float32)
    if live is not None:
        live = barrier(jnp.repeat(live, num_heads, axis=0))
        y = jnp.where(live.reshape(width * num_heads, *MORE_AXES, num_parts, num_terms, 1), y, 0.0)
    sums: list[jax.Array] = []
    for first in range(0, count, SUMS):
        terms = [x[:, i] * y for i in range(first, min(first + SUMS, count))]
        zeros = [jnp.float32(0)] * len(terms)
        sums += jax.lax.reduce(terms, zeros, _add_each, (y.ndim - 2,))
    # A second pass over few numbers; in one expression with the first, LLVM would not vectorize either.
    parts = [x.reshape(width, num_heads, num_parts, -1) for x in barrier(sums)]
    return jnp.stack([sum(x[:, :, i] for i in range(num_parts)) for x in parts], axis=2)


def _add_each(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _walk(
    q: jax.Array,  # [1, K, M, H]: M queries per kv head, of the dtype of products
    sinks: jax.Array | None,  # f32[K, M]
    spans: Sequence[Span],
    sm_scale: float,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:  # f32[1, K, M, H], f32[1, K, M]
    """Online softmax over the blocks of all spans."""
    shape = q.shape[:3]
    if sinks is None:
        peak, total = jnp.full(shape, NO_PEAK), jnp.zeros(shape)
    else:
        peak, total = jnp.broadcast_to(sinks, shape), jnp.ones(shape)

    def attend_span(span: Span, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        queries = jnp.repeat(q, span.parts, axis=0)

        def step(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            peak, total, acc = state
            k, v, scales, live, visible = span.block_of(i)
            products = _scaled(product(queries, k, None, q.dtype), scales, 0)  # f32[parts, K, M, C]
            scores = _masked(products, visible, sm_scale, soft_cap)
            if visible is not None:
                largest = _largest(scores)
            else:  # scaling and capping keep the order, so the largest product alone takes them: a pass less
                largest = _masked(_largest(products), None, sm_scale, soft_cap)
            new_peak = jnp.maximum(peak, largest)
            decay = jnp.exp(peak - new_peak)
            weights = jnp.exp(scores - new_peak[..., None])
            added = weights.sum(axis=-1).sum(axis=0, keepdims=True)
            weights = _scaled(weights, scales, 1).transpose(1, 2, 0, 3)  # [K, M, parts, C]
            new = product(weights.reshape(*shape, -1), v, live, q.dtype)
            return new_peak, total * decay + added, acc * decay[..., None] + new

        return jax.lax.fori_loop(span.first, span.last, step, state)

    state: tuple[jax.Array, ...] = peak, total, jnp.zeros(q.shape)
    for span in spans:
        if span.parts == 1:
            state = attend_span(span, state)
        else:  # not even its queries are made if it is empty
            attend = partial(attend_span, span)
            state = jax.lax.cond(span.first < span.last, attend, lambda state: state, state)
    return _finished(*state)


def _largest(scores: jax.Array) -> jax.Array:
    """f32[parts, K, M, C] -> f32[1, K, M]."""
    return scores.max(axis=-1).max(axis=0, keepdims=True)


def _scaled(x: jax.Array, scales: jax.Array | None, of: int) -> jax.Array:
    """x f32[W, K, M, C] times the scales of K (of = 0) or V (1): cheaper than to scale the block itself."""
    return x if scales is None else x * scales[:, :, of, None]


def _masked(
    scores: jax.Array, visible: jax.Array | None, sm_scale: float, soft_cap: float | None
) -> jax.Array:
    scores = scores * sm_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    return scores if visible is None else jnp.where(visible, scores, MASKED)


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
    sliding_window: int | jax.Array | None,
    soft_cap: float | None,
    sinks: jax.Array | None,  # f32[K, G]
) -> tuple[jax.Array, jax.Array]:  # f32[B, K, G, H], f32[B, K, G]; zeros and -inf where kv_lens is 0
    num_rows, num_kv_heads, group_size, head_dim = q.shape
    page_size, most = cpu_pages.page_size(kv_pages, head_dim), page_table.shape[1]
    chunk_tokens = min(CHUNK_TOKENS, ROW_TOKENS * num_rows, num_rows * most * page_size)
    width = max(1, chunk_tokens // page_size)  # pages of a turn, W
    multiply: Callable[..., jax.Array] = partial(product, dtype=q.dtype)
    if cpu_pages.is_cpu_layout(kv_pages) and group_size <= FEW_QUERIES:
        multiply = sums_of_vectors

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
    of_items = rows, page_ids, low, high

    def attend_chunk(chunk: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, acc = state
        slices = [jax.lax.dynamic_slice_in_dim(x, chunk * width, width) for x in of_items]
        row, ids, low, high = jax.lax.optimization_barrier(
            slices
        )  # else each element that is read slices anew
        slots = jnp.arange(page_size)
        live = (slots >= low[:, None]) & (slots < high[:, None])  # bool[W, page_size]
        k, v, scales = read_block(kv_pages, kv_scales, ids[:, None], live, head_dim)
        scores = _scaled(multiply(q.at[row].get(mode="clip"), k, None), scales, 0)
        scores = _masked(scores, live[:, None, None, :], sm_scale, soft_cap)
        # Pages past the end of the list belong to no row: what they would add is dropped.
        new_peak = peak.at[row].max(scores.max(axis=-1), mode="drop")
        decay = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak.at[row].get(mode="clip")[..., None])
        new = multiply(_scaled(weights, scales, 1), v, live)
        total = (total * decay).at[row].add(weights.sum(axis=-1), mode="drop")
        acc = (acc * decay[..., None]).at[row].add(new, mode="drop")
        return new_peak, total, acc

    shape = (num_rows, num_kv_heads, group_size)
    peak, total = jnp.full(shape, NO_PEAK), jnp.zeros(shape)
    if sinks is not None:
        peak, total = jnp.broadcast_to(sinks, shape), jnp.ones(shape)
    num_chunks = (ends[-1] + width - 1) // width
    state = (peak, total, jnp.zeros((*shape, head_dim)))
    out, lse = _finished(*jax.lax.fori_loop(0, num_chunks, attend_chunk, state))
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
    sliding_window: int | jax.Array | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:  # [T, K, G, H] in q's dtype, f32[T, K, G]; zeros and -inf elsewhere
    """The results of rows [decode_end, num_seqs), one tile of queries of one row at a time."""
    num_tokens, num_kv_heads, group_size, head_dim = q.shape
    num_rows, page_size = page_table.shape[0], cpu_pages.page_size(kv_pages, head_dim)
    on_cpu = cpu_pages.is_cpu_layout(kv_pages)
    block_pages = max(1, (CPU_BLOCK_TOKENS if on_cpu else BLOCK_TOKENS) // page_size)
    block = block_pages * page_size  # C
    page_table = pad_columns(page_table, block_pages)
    tile = TILE_QUERIES
    if on_cpu:
        # A program of few tokens is one for latency, in which decode rows leave a prompt fewer than a tile of them.
        tile = CPU_TILE_QUERIES if max_q_len >= 2 * CPU_TILE_QUERIES else CPU_TILE_QUERIES // 2
    tile = min(tile, max_q_len)
    row_ids = jnp.arange(num_rows)
    is_prefill = (row_ids >= distribution[0]) & (row_ids < distribution[2]) & (kv_lens > 0)
    q_lens = jnp.where(is_prefill, cu_q_lens[1:] - cu_q_lens[:-1], 0)  # i32[B]
    tile_counts = (q_lens + tile - 1) // tile
    tile_ends = jnp.cumsum(tile_counts)  # i32[B]: tiles of the rows up to and with this one
    wide: list[int] = []  # blocks side by side
    if on_cpu:
        most = page_table.shape[1] // block_pages
        counts = {min(x // (num_kv_heads * group_size * tile * block), most) for x in WIDE_SCORES}
        wide = sorted(counts - {0, 1}, reverse=True)
    sinks = None if sinks is None else jnp.repeat(sinks, tile, axis=1)  # f32[K, G * tile]
    q = _pad_rows(q, num_tokens + tile)  # a tile that starts near the end of the batch must not be clamped

    def attend_tile(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row = jnp.searchsorted(tile_ends, i, side="right")
        q_len, kv_len = q_lens[row], kv_lens[row]
        offset = (i - tile_ends[row] + tile_counts[row]) * tile  # of the tile in its row
        start = cu_q_lens[row] + offset
        positions = kv_len - q_len + offset + jnp.arange(tile)  # i32[tile]
        kv_end = jnp.minimum(positions[-1] + 1, kv_len)

        def block_of(j: jax.Array) -> Block:
            kv_positions = j * block + jnp.arange(block)  # i32[C]
            live = kv_positions < kv_end
            visible = kv_positions <= positions[:, None]  # bool[tile, C]
            if sliding_window is not None:
                live &= kv_positions > positions[0] - sliding_window
                visible &= kv_positions > positions[:, None] - sliding_window
            visible &= live
            page_ids = jax.lax.dynamic_slice(page_table, (row, j * block_pages), (1, block_pages))
            kv = read_block(kv_pages, kv_scales, page_ids, live[None], head_dim)
            return *kv, live[None], jnp.tile(visible, (group_size, 1))[None, None]

        def wide_block_of(parts: int, start: jax.Array | int, j: jax.Array) -> Block:
            page_ids = jax.lax.dynamic_slice(
                page_table, (row, (start + j * parts) * block_pages), (1, parts * block_pages)
            )
            k, _, scales = read_block(kv_pages, kv_scales, page_ids.reshape(parts, -1), None, head_dim)
            _, v, _ = read_block(kv_pages, None, page_ids, None, head_dim)
            return k, v, scales, None, None

        last = (kv_end + block - 1) // block
        first: jax.Array | int = 0
        full: jax.Array | int = 0  # the first block that the last query sees all of
        if sliding_window is not None:
            first = jnp.maximum(positions[0] + 1 - sliding_window, 0) // block
            full = jnp.maximum(positions[-1] + block - sliding_window, 0) // block
        # Blocks that all queries see all of, as many side by side as there are; then the others one by one.
        done, spans = full, list[Span]()
        for parts in wide:
            num_turns = jnp.maximum((positions[0] + 1) // block - done, 0) // parts
            spans.append(Span(partial(wide_block_of, parts, done), parts, 0, num_turns))
            done += num_turns * parts

        def others(j: jax.Array) -> Block:
            return block_of(jnp.where(j < full, j, j + done - full) if wide else j)

        spans.append(Span(others, 1, first, last - (done - full)))
        tile_q = jax.lax.dynamic_slice_in_dim(q, start, tile)  # [tile, K, G, H]
        tile_q = tile_q.transpose(1, 2, 0, 3).reshape(1, num_kv_heads, group_size * tile, head_dim)
        new, new_lse = _walk(tile_q, sinks, spans, sm_scale, soft_cap)
        new = new.reshape(num_kv_heads, group_size, tile, head_dim).transpose(2, 0, 1, 3)
        new_lse = new_lse.reshape(num_kv_heads, group_size, tile).transpose(2, 0, 1)
        mine = (offset + jnp.arange(tile) < q_len)[:, None, None]  # the rest belongs to the next row
        out, lse = state
        new = jnp.where(mine[..., None], new.astype(q.dtype), jax.lax.dynamic_slice_in_dim(out, start, tile))
        new_lse = jnp.where(mine, new_lse, jax.lax.dynamic_slice_in_dim(lse, start, tile))
        return (
            jax.lax.dynamic_update_slice_in_dim(out, new, start, 0),
            jax.lax.dynamic_update_slice_in_dim(lse, new_lse, start, 0),
        )

    state = jnp.zeros(q.shape, q.dtype), jnp.full(q.shape[:3], -jnp.inf)
    out, lse = jax.lax.fori_loop(0, tile_ends[-1], attend_tile, state)
    return out[:num_tokens], lse[:num_tokens]
