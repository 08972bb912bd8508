"""The body of the TPU kernel: one loop over (row, block of query tokens, fetch), a fetch ahead of the compute.

Layouts of the state in vector memory: R rows of one tile (its queries x group, padded to sublanes). Token t's head g is
row t * G + g on the decode path, and row g * q_tile + t on the prefill path, where a head's tokens are neighbours. W is
H where H is a whole number of lane registers; else 2H, with q zero in V's lanes, so that K and V need not be cut apart:
then q x [K|V] is q x K, and the lanes of p x [K|V] from H on are p x V.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.pallas_kernels.ragged_paged_attention import tpu_schedule as schedule
from jaxinfer.pallas_kernels.ragged_paged_attention.tpu_schedule import LANES, Static

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: a tile may see nothing in its first block
COPY_TOKENS = 16  # of q and out per copy


def attention_kernel(
    page_table,  # SMEM i32[B * P]
    kv_lens,  # SMEM i32[B]
    cu_q_lens,  # SMEM i32[B + 1]
    distribution,  # SMEM i32[3]
    q,  # HBM [T, N, H]
    kv_pages,  # HBM [num_pages, K, page_size, 2H]
    kv_scales,  # HBM f32[num_pages, K, 2, page_size] or None
    sinks,  # VMEM f32[K, R, LANES] or None
    _out,  # the first call's out, the same memory as out; None in the first call
    _lse,
    out,  # HBM [T, N, H]
    lse,  # HBM f32[T, N, LANES] or None
    q_buf,  # VMEM [2, q_block, N, H]
    kv_buf,  # VMEM [2, K, kv_fetch, 2H]
    scale_buf,  # VMEM f32[2, pages per fetch, K, 2, page_size] or None
    out_buf,  # VMEM [2, q_block, N, H]
    lse_buf,  # VMEM f32[2, q_block, N, LANES] or None
    heads,  # VMEM f32[q_tile, N, H]: q or out of one tile, as float32, whose sublanes can be read singly
    folded_q,  # VMEM [K, num_tiles, R, W]
    peak,  # VMEM f32[K, num_tiles, R, LANES], every lane the same; so `total`
    total,
    acc,  # VMEM f32[K, num_tiles, R, W]
    leaving,  # SMEM i32[2]: tokens of out_buf on their way out
    sems,  # DMA [4, 2]: q, kv, scales, out
    *,
    static: Static,
):
    blocks, page_size, window = static.blocks, static.page_size, static.sliding_window
    group, head_dim, q_tile = static.group, static.head_dim, static.blocks.q_tile
    pages_per_row = page_table.shape[0] // kv_lens.shape[0]
    last_row = kv_lens.shape[0] - 1
    fetch_pages = blocks.kv_fetch // page_size
    num_seqs = distribution[2]
    v_lanes = slice(static.width - head_dim, static.width)  # of acc

    def q_len_of(row):
        return cu_q_lens[row + 1] - cu_q_lens[row]

    def next_row(row):
        """The first row from `row` on that this path serves, or num_seqs."""

        def skip(row):
            q_len = q_len_of(row)
            if static.is_decode:
                mine = (q_len > 0) & (q_len <= static.max_q_len)
            else:
                mine = q_len > static.max_q_len
            return ~(mine & (kv_lens[row] > 0))

        # the condition is evaluated past the end too
        return lax.while_loop(
            lambda row: (row < num_seqs) & skip(jnp.minimum(row, last_row)), lambda row: row + 1, row
        )

    def item_at(row, block):
        return schedule.item_of(kv_lens[row], q_len_of(row), block, blocks, page_size, window)

    def start(copy):
        copy.start()

    def wait(copy):
        copy.wait()

    def start_and_wait(copy):
        start(copy)
        wait(copy)

    def kv_copies(row, block, fetch, slot, act):
        """`act`s on the copies of one fetch, page by page."""
        item = item_at(row, block)
        first = item.page_start + fetch * fetch_pages

        def one(i, carry):
            page = page_table[row * pages_per_row + first + i]
            place = pl.ds(pl.multiple_of(i * page_size, page_size), page_size)
            act(pltpu.make_async_copy(kv_pages.at[page], kv_buf.at[slot, :, place, :], sems.at[1, slot]))
            if static.quantized:
                act(pltpu.make_async_copy(kv_scales.at[page], scale_buf.at[slot, i], sems.at[2, slot]))
            return carry

        lax.fori_loop(0, jnp.minimum(item.page_end - first, fetch_pages), one, 0)

    def q_copies(row, block, slot, act):
        item = item_at(row, block)
        token = cu_q_lens[row] + block * blocks.q_block

        def copy(offset, size):
            act(
                pltpu.make_async_copy(
                    q.at[pl.ds(token + offset, size)], q_buf.at[slot, pl.ds(offset, size)], sems.at[0, slot]
                )
            )

        in_chunks(item.q_end - item.q_start, blocks.q_block, copy)

    def out_copies(token, count, slot, act):
        def copy(offset, size):
            here, there = pl.ds(offset, size), pl.ds(token + offset, size)
            act(pltpu.make_async_copy(out_buf.at[slot, here], out.at[there], sems.at[3, slot]))
            if static.return_lse:
                act(pltpu.make_async_copy(lse_buf.at[slot, here], lse.at[there], sems.at[3, slot]))

        in_chunks(count, blocks.q_block, copy)

    def wait_for_out(slot):
        out_copies(0, leaving[slot], slot, wait)
        leaving[slot] = 0

    def fold_q(item, slot):
        """q_buf -> folded_q, and the start of the softmax."""

        def fold_tile(tile, carry):
            heads[...] = q_buf[slot, pl.ds(tile * q_tile, q_tile)].astype(jnp.float32)
            if static.is_decode:
                for token in range(q_tile):
                    for head in range(static.num_kv_heads):
                        rows = slice(token * group, (token + 1) * group)
                        some = heads[token, head * group : (head + 1) * group, :]  # f32[G, H]
                        folded_q[head, tile, rows, :head_dim] = some.astype(folded_q.dtype)
                return carry

            def fold_head(head, carry):
                for g in range(group):
                    rows = slice(g * q_tile, (g + 1) * q_tile)
                    one = heads[:, head * group + g, :]  # f32[q_tile, H]
                    folded_q[head, tile, rows, :head_dim] = one.astype(folded_q.dtype)
                return carry

            return lax.fori_loop(0, static.num_kv_heads, fold_head, carry)

        lax.fori_loop(0, tiles_in(item), fold_tile, 0)
        if sinks is None:
            peak[...] = jnp.full(peak.shape, MASKED, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
        else:
            peak[...] = jnp.broadcast_to(sinks[...][:, None], peak.shape)
            total[...] = jnp.ones(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    def tiles_in(item):
        return schedule.cdiv(item.q_end - item.q_start, q_tile)

    def compute(item, fetch, slot):
        def compute_tile(tile, carry):
            part = schedule.tile_of(item, fetch, tile, blocks, page_size, window)
            base = item.page_start * page_size + fetch * blocks.kv_fetch

            def compute_heads(i, carry):
                heads_now = [i * static.heads_at_once + n for n in range(static.heads_at_once)]

                def interior(i, carry):
                    offset = part.interior + i * blocks.kv_block
                    attend(item, base, heads_now, tile, offset, blocks.kv_block, slot, masked=False)
                    return carry

                def edges(begin, end):
                    def edge(i, carry):
                        offset = begin + i * blocks.kv_edge
                        attend(item, base, heads_now, tile, offset, blocks.kv_edge, slot, masked=True)
                        return carry

                    lax.fori_loop(0, (end - begin) // blocks.kv_edge, edge, 0)

                if window is not None:
                    edges(part.start, jnp.minimum(part.interior, part.end))
                lax.fori_loop(0, part.num_interior, interior, 0)
                edges(part.rest, part.end)
                return carry

            return lax.fori_loop(0, static.num_kv_heads // static.heads_at_once, compute_heads, carry)

        lax.fori_loop(0, tiles_in(item), compute_tile, 0)

    def attend(item, base, heads_now, tile, offset, size, slot, *, masked):
        """One block of the online softmax for some kv heads: R query rows x `size` kv tokens of each. In stages, so
        that the heads' products and reductions overlap."""
        offset = pl.multiple_of(offset, blocks.kv_edge)
        float_pages = jnp.issubdtype(static.kv_dtype, jnp.floating)
        kv_at = base + offset + lax.broadcasted_iota(jnp.int32, (1, size), 1)
        row = lax.broadcasted_iota(jnp.int32, (static.tile_rows, 1), 0)
        q_at = item.q_start + tile * q_tile + (row // group if static.is_decode else row % q_tile)
        visible = kv_at <= q_at  # [R, size]
        if window is not None:
            visible &= kv_at > q_at - window

        def seen(places):
            """Whether any query of the item sees them: else K, V or their scales may be NaN, and 0 x NaN is NaN."""
            return (places >= item.kv_start) & (places < item.q_end)

        def load_kv(head):
            kv = kv_buf[slot, head, pl.ds(offset, size), :].astype(static.compute_dtype)  # [size, 2H]
            if masked and float_pages:
                places = base + offset + lax.broadcasted_iota(jnp.int32, kv.shape, 0)
                kv = jnp.where(seen(places), kv, jnp.zeros_like(kv))
            return (kv, kv) if static.width != head_dim else (kv[:, :head_dim], kv[:, head_dim:])

        def score(head, k, scales):
            scores = _dot(folded_q[head, tile].astype(static.compute_dtype), k, 1)  # f32[R, size]
            scores = scores * (static.sm_scale if scales is None else scales[0:1] * static.sm_scale)
            if static.soft_cap is not None:
                scores = static.soft_cap * jnp.tanh(scores / static.soft_cap)
            return jnp.where(visible, scores, MASKED) if masked else scores

        def weigh(head, scores):
            """f32[R, size] weights, and the factor f32[R, 1] on what was summed before; updates peak and total."""
            old_peak = peak[head, tile][:, :1]
            new_peak = jnp.maximum(old_peak, scores.max(axis=1, keepdims=True))
            weights, decay = jnp.exp(scores - new_peak), jnp.exp(old_peak - new_peak)
            new_total = decay * total[head, tile][:, :1] + weights.sum(axis=1, keepdims=True)
            peak[head, tile] = jnp.broadcast_to(new_peak, peak.shape[2:])
            total[head, tile] = jnp.broadcast_to(new_total, total.shape[2:])
            return weights, decay

        def accumulate(head, weights, decay, v, scales):
            if scales is not None:
                weights = weights * (jnp.where(seen(kv_at), scales[1:2], 0.0) if masked else scales[1:2])
            acc[head, tile] = decay * acc[head, tile] + _dot(weights.astype(static.compute_dtype), v, 0)

        kvs = [load_kv(head) for head in heads_now]
        scales = [block_scales(head, offset, size, slot) if static.quantized else None for head in heads_now]
        scores = [score(*args) for args in zip(heads_now, [k for k, _ in kvs], scales, strict=True)]
        weighed = [weigh(*args) for args in zip(heads_now, scores, strict=True)]
        for head, (weights, decay), (_, v), scale in zip(heads_now, weighed, kvs, scales, strict=True):
            accumulate(head, weights, decay, v, scale)

    def block_scales(head, offset, size, slot):
        """f32[2, size]: K's and V's scales of a block, from the pages that it lies in."""
        piece = min(page_size, LANES)
        pieces = []
        for start in range(0, size, piece):
            place = offset + start
            lanes = (
                slice(None) if page_size <= LANES else pl.ds(pl.multiple_of(place % page_size, LANES), LANES)
            )
            pieces.append(scale_buf[slot, place // page_size, head, :, lanes])
        return jnp.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]

    def finish(item, row, block, slot):
        """Divides by the softmax's denominator and sends the item's tokens out."""
        wait_for_out(slot)

        def result(head, tile, rows):
            """out f32[rows, H] and lse f32[rows, LANES] of some rows of a tile."""
            denominator = total[head, tile, rows]
            out_rows = (acc[head, tile, rows] / denominator[:, :1])[:, v_lanes]
            return out_rows, peak[head, tile, rows] + jnp.log(denominator)

        def finish_tile(tile, carry):
            tokens = pl.ds(tile * q_tile, q_tile)
            if static.is_decode:
                for token in range(q_tile):
                    for head in range(static.num_kv_heads):
                        n = slice(head * group, (head + 1) * group)
                        out_rows, lse_rows = result(head, tile, slice(token * group, (token + 1) * group))
                        heads[token, n, :] = out_rows
                        if static.return_lse:
                            lse_buf[slot, tile * q_tile + token, n, :] = lse_rows
            else:

                def finish_head(head, carry):
                    for g in range(group):
                        n = head * group + g
                        out_rows, lse_rows = result(head, tile, slice(g * q_tile, (g + 1) * q_tile))
                        heads[:, n, :] = out_rows
                        if static.return_lse:
                            lse_buf[slot, tokens, n, :] = lse_rows
                    return carry

                lax.fori_loop(0, static.num_kv_heads, finish_head, 0)
            out_buf[slot, tokens] = heads[...].astype(out_buf.dtype)
            return carry

        lax.fori_loop(0, tiles_in(item), finish_tile, 0)
        count = item.q_end - item.q_start
        leaving[slot] = count
        out_copies(cu_q_lens[row] + block * blocks.q_block, count, slot, start)

    def step(state):
        """Starts the fetch of `state` and computes the one before, which has arrived or will: the loop runs once
        more than there are fetches."""
        row, block, fetch, kv_slot, q_slot, before = state

        @pl.when(row < num_seqs)
        def start_fetch():
            kv_copies(row, block, fetch, kv_slot, start)

            @pl.when(fetch == 0)
            def start_q():
                q_copies(row, block, q_slot, start)

        pl.when(before[0] < num_seqs)(lambda: consume(*before))

        safe_row = jnp.minimum(row, last_row)
        more_fetches = fetch + 1 < item_at(safe_row, block).num_fetches
        more_blocks = (block + 1) * blocks.q_block < q_len_of(safe_row)
        return (
            next_row(jnp.where(more_fetches | more_blocks | (row >= num_seqs), row, row + 1)),
            jnp.where(more_fetches, block, jnp.where(more_blocks, block + 1, 0)),
            jnp.where(more_fetches, fetch + 1, 0),
            1 - kv_slot,
            jnp.where(more_fetches, q_slot, 1 - q_slot),
            (row, block, fetch, kv_slot, q_slot),
        )

    def consume(row, block, fetch, kv_slot, q_slot):
        item = item_at(row, block)

        @pl.when(fetch == 0)
        def begin():
            q_copies(row, block, q_slot, wait)
            fold_q(item, q_slot)

        kv_copies(row, block, fetch, kv_slot, wait)
        compute(item, fetch, kv_slot)
        pl.when(fetch + 1 == item.num_fetches)(lambda: finish(item, row, block, q_slot))

    def zero_unserved():
        """Zeros for padded tokens and for the tokens of empty rows; the first call does it for both."""
        out_buf[0] = jnp.zeros(out_buf.shape[1:], out_buf.dtype)
        if static.return_lse:
            lse_buf[0] = jnp.full(lse_buf.shape[1:], -jnp.inf, lse_buf.dtype)

        def zero(row, carry):
            """The tokens of an empty row; of `row` num_seqs: those after all rows."""
            first = cu_q_lens[row]
            end = jnp.where(row < num_seqs, cu_q_lens[jnp.minimum(row + 1, num_seqs)], out.shape[0])
            served = (row < num_seqs) & (kv_lens[jnp.minimum(row, last_row)] > 0)

            def one_block(i, carry):
                token = first + i * blocks.q_block
                out_copies(token, jnp.minimum(end - token, blocks.q_block), 0, start_and_wait)
                return carry

            lax.fori_loop(
                0, jnp.where(served, 0, schedule.cdiv(end - first, blocks.q_block)), one_block, carry
            )
            return carry

        lax.fori_loop(0, num_seqs + 1, zero, 0)

    leaving[0] = 0
    leaving[1] = 0
    if static.width != head_dim or static.tile_rows != q_tile * group:
        folded_q[...] = jnp.zeros(folded_q.shape, folded_q.dtype)  # V's lanes and padded rows
    if _out is None:
        zero_unserved()
    zero = jnp.int32(0)
    first = (next_row(zero), zero, zero, zero, zero, (num_seqs, zero, zero, zero, zero))
    lax.while_loop(lambda state: (state[0] < num_seqs) | (state[5][0] < num_seqs), step, first)
    lax.fori_loop(0, 2, lambda slot, carry: (wait_for_out(slot), carry)[1], 0)


def in_chunks(count, most, copy):
    """copy(offset, size) for chunks of 16 tokens and single ones that make up count <= most: copies have static
    sizes, and none may reach into a neighbour's tokens."""
    size = min(most, COPY_TOKENS)
    whole = count // size

    def chunk(i, carry):
        copy(i * size, size)
        return carry

    def single(i, carry):
        copy(whole * size + i, 1)
        return carry

    lax.fori_loop(0, whole, chunk, 0)
    if size > 1:
        lax.fori_loop(0, count % size, single, 0)


def _dot(x: jax.Array, y: jax.Array, y_axis: int) -> jax.Array:
    """f32 product over x's last and y's `y_axis`; float32 inputs are multiplied as float32."""
    return lax.dot_general(
        x,
        y,
        (((1,), (y_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
