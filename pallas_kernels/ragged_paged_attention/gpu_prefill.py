"""Rows of many query tokens on GPU: TMA, WGMMA and warp specialization, compute capability 9.0 (WGMMA is there alone).

Block schedule: grid (kv head, tile). A tile is `tile_tokens` consecutive query tokens of one row; two compute
warpgroups (one for a head_dim over 128) take a share of them each, times the G heads of the kv head, as 64 rows of a
WGMMA tile. A further warpgroup fetches K and V by TMA, a page (or a part of a page) per copy, into a ring of
`num_stages` buffers of block_kv tokens. Blocks above the diagonal and below the window are neither fetched nor
computed; only blocks on the edges are masked. The softmax is online, in float32 and base 2 (FlashAttention-3,
arXiv:2407.08608, without its ping-pong).
8-bit pages arrive in buffers of their own; the fetching warpgroup widens them, applies their scales in float32, and
puts K and V into the ring in q's dtype, as if the pages had it.
Tiles come and leave whole, as [64, H] per warpgroup in tensors laid out by tile: a TMA copy into swizzled memory must
begin at a multiple of 8 rows, which tokens of a row do not. The passes that put q into tiles and tokens back in order
are plain JAX; tiles want [K, rows, H] where q and out are [T, N, H], so such passes are needed anyway.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels import mosaic_gpu
from jaxinfer.pallas_kernels.mosaic_gpu import PIECE_ROWS, TMA_ALIGNMENT
from jaxinfer.pallas_kernels.ragged_paged_attention import gpu_tuning

COMPUTE_CAPABILITY = (9, 0)  # the only one with WGMMA
LOG2_E = math.log2(math.e)
WGMMA_ROWS = 64  # of the query tile of one warpgroup
# Registers per thread of a compute and the fetch warpgroup, by bytes of an element of the pages. 2 x 128 x 232 +
# 128 x 40 fill the 64 K registers of an SM; widening takes more than 40.
REGISTERS = {2: (232, 40), 1: (216, 80)}
RAW_STAGES = 2  # buffers of 8-bit K|V
SMEM_BYTES = (
    220 * 1024
)  # of the 227 KiB that one block may have on Hopper; barriers and alignment take the rest


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The static block schedule of a prefill call: all that the kernel and the counting of its work need."""

    num_kv_heads: int  # K
    head_dim: int  # H
    page_size: int
    kv_itemsize: int  # bytes of an element of the pages
    compute_warpgroups: int
    group: int  # query heads per kv head in the tile: G, or more where a token's rows would end off TMA_ALIGNMENT
    num_tiles: int  # upper bound over all ways to cut the tokens into rows
    block_kv: int  # kv tokens per step
    fetch_kv: int  # kv tokens per copy: a page, or block_kv of a longer page
    num_stages: int

    @property
    def warpgroup_tokens(self) -> int:
        return WGMMA_ROWS // self.group

    @property
    def tile_tokens(self) -> int:
        return self.compute_warpgroups * self.warpgroup_tokens


def make_schedule(
    num_tokens: int,
    num_rows: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    kv_itemsize: int,
) -> Schedule:
    while group * head_dim * 2 % TMA_ALIGNMENT:
        group += 1
    compute_warpgroups, block_kv = gpu_tuning.prefill_blocks(head_dim, kv_itemsize)
    row_bytes = head_dim * 2
    smem_bytes = SMEM_BYTES - compute_warpgroups * WGMMA_ROWS * row_bytes  # q, then out
    if kv_itemsize == 1:
        smem_bytes -= RAW_STAGES * block_kv * 2 * head_dim
    num_stages = smem_bytes // (2 * block_kv * row_bytes)
    tile_tokens = compute_warpgroups * (WGMMA_ROWS // group)
    return Schedule(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        kv_itemsize=kv_itemsize,
        compute_warpgroups=compute_warpgroups,
        group=group,
        num_tiles=num_tokens // tile_tokens + min(num_rows, num_tokens),
        block_kv=block_kv,
        fetch_kv=min(page_size, block_kv),
        num_stages=min(num_stages, gpu_tuning.MAX_STAGES),
    )


def add_product(out: jax.Array, weights: jax.Array, values_ref) -> jax.Array:
    """out + weights @ values by WGMMA, accumulating in out's registers.

    A function of its own because the simulator has no pl.run_state: tests put an equal in its place.
    """

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, weights, values_ref)

    return pl.run_state(multiply)(plgpu.ACC.init(out))


def _attend(
    q_ref,  # [num_tiles, K, warpgroups, WGMMA_ROWS, H]
    pages_ref,  # [num_pages, K, page_size, 2H]
    page_table_ref,  # i32[B, P]
    kv_lens_ref,  # i32[B]
    cu_q_lens_ref,  # i32[B + 1]
    tile_rows_ref,  # i32[num_tiles]: the row of each tile
    tile_starts_ref,  # i32[num_tiles]: its first token, counted in the row; at or past the row's end in spare tiles
    sinks_ref,  # f32[K, WGMMA_ROWS], base-2 logits; -inf where there is none
    *refs,
    # [scales_ref f32[num_pages, K, 2, page_size], with 8-bit pages]
    # out_ref     [num_tiles, K, warpgroups, WGMMA_ROWS, H]
    # lse_ref     f32[num_tiles, K, warpgroups, WGMMA_ROWS], base 2
    # q_smem      [warpgroups, WGMMA_ROWS, H]; out in the end
    # k_smem      [num_stages, block_kv, H]
    # v_smem      [num_stages, block_kv, H]
    # q_barriers, k_barriers, v_barriers, k_consumed, v_consumed
    # then with 8-bit pages raw_smem [RAW_STAGES, block_kv, 2H] and raw_barriers, else edge_barrier
    schedule: Schedule,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
):
    s = schedule
    is_quantized = s.kv_itemsize == 1
    scales_ref, *rest = refs if is_quantized else (None, *refs)
    out_ref, lse_ref, q_smem, k_smem, v_smem, *rest = rest
    q_barriers, k_barriers, v_barriers, k_consumed, v_consumed, *fetch_refs = rest
    compute_registers, fetch_registers = REGISTERS[s.kv_itemsize]
    dtype, head_dim, block_kv, group = q_smem.dtype, s.head_dim, s.block_kv, s.group
    kv_head, tile, warpgroup = lax.axis_index("kv_head"), lax.axis_index("tile"), lax.axis_index("warpgroup")
    row, tile_start = tile_rows_ref[tile], tile_starts_ref[tile]
    kv_len = kv_lens_ref[row]
    q_start = cu_q_lens_ref[row]
    q_len = cu_q_lens_ref[row + 1] - q_start
    first_position = kv_len - q_len + tile_start  # of the tile's first query
    tile_tokens = jnp.minimum(q_len - tile_start, s.tile_tokens)

    def first_seen_from(position):
        return jnp.int32(0) if sliding_window is None else jnp.maximum(position - (sliding_window - 1), 0)

    # The tile sees [first_seen, first_position + tile_tokens), which lies in blocks [begin, end).
    first_seen = first_seen_from(first_position)
    begin = lax.div(first_seen, block_kv)
    end = pl.cdiv(first_position + tile_tokens, block_kv)

    @pl.when((tile_tokens > 0) & (warpgroup == s.compute_warpgroups))
    def _fetch_warpgroup():
        if s.compute_warpgroups > 1:
            plgpu.set_max_registers(fetch_registers, action="decrease")

        def copy_page_part(block, start, lanes, smem, barrier):
            """Lanes of one part of a page, or an arrival in its stead where no query sees it."""
            position = block * block_kv + start
            seen = (position < kv_len) & (position + s.fetch_kv > first_seen)

            @pl.when(seen)
            def _copy():
                page = page_table_ref[row, lax.div(position, s.page_size)]
                offset = lax.rem(position, s.page_size)
                plgpu.copy_gmem_to_smem(
                    pages_ref.at[page, kv_head, pl.ds(offset, s.fetch_kv), lanes],
                    smem.at[pl.ds(start, s.fetch_kv)],
                    barrier,
                )

            @pl.when(jnp.logical_not(seen))
            def _skip():
                plgpu.barrier_arrive(barrier)

        def copy_block(block, lanes, smem, barrier):
            for start in range(0, block_kv, s.fetch_kv):
                copy_page_part(block, start, lanes, smem, barrier)

        lanes = mosaic_gpu.swizzle_lanes(head_dim)
        piece_layout = mosaic_gpu.piece_layout(head_dim, dtype)

        def seen_in_piece(start):
            """bool[PIECE_ROWS, lanes]: whether some query of the tile sees the kv positions from start on."""
            position = plgpu.broadcasted_iota(jnp.int32, (PIECE_ROWS, lanes), 0, layout=piece_layout) + start
            return (position < kv_len) & (position >= first_seen)

        def wait_for_buffer(block, consumed):
            @pl.when(block - begin >= s.num_stages)
            def _wait():
                plgpu.barrier_wait(consumed.at[lax.rem(block - begin, s.num_stages)])

        def fetch_block(block):
            (edge_barrier,) = fetch_refs
            stage = lax.rem(block - begin, s.num_stages)
            k_lanes, v_lanes = pl.ds(0, head_dim), pl.ds(head_dim, head_dim)
            wait_for_buffer(block, k_consumed)
            copy_block(block, k_lanes, k_smem.at[stage], k_barriers.at[stage])
            wait_for_buffer(block, v_consumed)
            is_edge = ((block + 1) * block_kv > kv_len) | (block * block_kv < first_seen)

            @pl.when(jnp.logical_not(is_edge))
            def _copy_values():
                copy_block(block, v_lanes, v_smem.at[stage], v_barriers.at[stage])

            @pl.when(is_edge)
            def _copy_and_zero_values():
                # What no query may see must not reach the product: 0 x NaN is NaN.
                copy_block(block, v_lanes, v_smem.at[stage], edge_barrier)
                plgpu.barrier_wait(edge_barrier)
                for start in range(0, block_kv, PIECE_ROWS):
                    seen = seen_in_piece(block * block_kv + start)
                    for lane in range(0, head_dim, lanes):
                        piece = v_smem.at[stage, pl.ds(start, PIECE_ROWS), pl.ds(lane, lanes)]
                        values = plgpu.load(piece, layout=piece_layout)
                        piece[...] = jnp.where(seen, values, jnp.zeros((), dtype))
                plgpu.commit_smem()
                for _ in range(block_kv // s.fetch_kv):
                    plgpu.barrier_arrive(v_barriers.at[stage])

        def fetch_raw(block):
            raw_smem, raw_barriers = fetch_refs
            stage = lax.rem(block - begin, RAW_STAGES)
            copy_block(block, pl.ds(0, 2 * head_dim), raw_smem.at[stage], raw_barriers.at[stage])

        def widen_block(block, kv, consumed, target, barriers):
            """K (kv 0) or V (1) of a block from its 8-bit buffer into the ring."""
            raw_smem, _ = fetch_refs
            wait_for_buffer(block, consumed)
            stage, raw_stage = lax.rem(block - begin, s.num_stages), lax.rem(block - begin, RAW_STAGES)
            for start in range(0, block_kv, PIECE_ROWS):
                rows, position = pl.ds(start, PIECE_ROWS), block * block_kv + start
                seen = seen_in_piece(position)
                page = page_table_ref[row, lax.div(jnp.minimum(position, kv_len - 1), s.page_size)]
                scales = plgpu.load(
                    scales_ref.at[page, kv_head, kv, pl.ds(lax.rem(position, s.page_size), PIECE_ROWS)],
                    layout=piece_layout.reduce(1),
                    optimized=False,
                )
                for lane in range(0, head_dim, lanes):
                    source = raw_smem.at[raw_stage, rows, pl.ds(kv * head_dim + lane, lanes)]
                    values = mosaic_gpu.widen(plgpu.load(source, layout=piece_layout, optimized=False), dtype)
                    values = values.astype(jnp.float32) * lax.broadcast_in_dim(scales, values.shape, [0])
                    # What no query may see must not reach the product: 0 x NaN is NaN, and scales there may be NaN.
                    values = jnp.where(seen, values, 0.0)
                    target[stage, rows, pl.ds(lane, lanes)] = values.astype(dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.at[stage])

        if is_quantized:
            fetch_raw(begin)

            @pl.loop(begin, end)
            def _fetch_and_widen_block(block):
                @pl.when(block + 1 < end)
                def _fetch_next():
                    fetch_raw(block + 1)

                plgpu.barrier_wait(fetch_refs[1].at[lax.rem(block - begin, RAW_STAGES)])
                widen_block(block, 0, k_consumed, k_smem, k_barriers)
                widen_block(block, 1, v_consumed, v_smem, v_barriers)

        else:
            pl.loop(begin, end)(fetch_block)

    @pl.when((tile_tokens > 0) & (warpgroup < s.compute_warpgroups))
    def _compute_warpgroup():
        if s.compute_warpgroups > 1:
            plgpu.set_max_registers(compute_registers, action="increase")
        layout = plgpu.Layout.WGMMA
        own_start = warpgroup * s.warpgroup_tokens  # of this warpgroup's tokens, counted in the tile
        own_tokens = jnp.clip(tile_tokens - own_start, 0, s.warpgroup_tokens)
        own_position = first_position + own_start
        plgpu.copy_gmem_to_smem(
            q_ref.at[tile, kv_head, warpgroup], q_smem.at[warpgroup], q_barriers.at[warpgroup]
        )
        plgpu.barrier_wait(q_barriers.at[warpgroup])

        # Blocks [own_begin, own_end) hold all that this warpgroup's queries see. Of these, its first query sees all
        # up to full_end, and its last query, which has the latest window, all from full_begin on.
        last_position = own_position + own_tokens - 1
        own_begin = jnp.minimum(lax.div(first_seen_from(own_position), block_kv), end)
        own_end = jnp.where(own_tokens > 0, pl.cdiv(last_position + 1, block_kv), own_begin)
        full_begin = jnp.clip(pl.cdiv(first_seen_from(last_position), block_kv), own_begin, own_end)
        full_end = jnp.clip(lax.div(own_position + 1, block_kv), full_begin, own_end)

        peak = plgpu.load(sinks_ref.at[kv_head], layout=layout.reduce(1), optimized=False)
        denominator = jnp.where(peak == -jnp.inf, 0.0, 1.0)
        out = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, head_dim), jnp.float32), layout)

        def skip(block, _):
            stage = lax.rem(block - begin, s.num_stages)
            plgpu.barrier_wait(k_barriers.at[stage])
            plgpu.barrier_arrive(k_consumed.at[stage])
            plgpu.barrier_wait(v_barriers.at[stage])
            plgpu.barrier_arrive(v_consumed.at[stage])

        def step(block, carry, *, masked):
            out, peak, denominator = carry
            stage = lax.rem(block - begin, s.num_stages)
            plgpu.barrier_wait(k_barriers.at[stage])

            def multiply_keys(acc_ref):
                plgpu.wgmma(acc_ref, q_smem.at[warpgroup], k_smem.at[stage].T)
                return acc_ref[...]

            scores = pl.run_scoped(multiply_keys, plgpu.ACC((WGMMA_ROWS, block_kv), jnp.float32))
            # No fence here and below: WGMMA has been awaited, and reads in the proxy in which TMA writes.
            plgpu.barrier_arrive(k_consumed.at[stage])
            if soft_cap is None:
                scores = scores * (sm_scale * LOG2_E)
            else:
                scores = jnp.tanh(scores * (sm_scale / soft_cap)) * (soft_cap * LOG2_E)
            if masked:
                tile_row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=layout)
                q_position = own_position + lax.div(tile_row, group)
                column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
                kv_position = block * block_kv + column
                visible = kv_position <= q_position
                if sliding_window is not None:
                    visible &= kv_position > q_position - sliding_window
                scores = jnp.where(visible, scores, -jnp.inf)

            new_peak = jnp.maximum(peak, scores.max(axis=1))
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)  # a query that has seen nothing yet
            weights = jnp.exp2(scores - lax.broadcast_in_dim(shift, scores.shape, [0]))
            decay = jnp.exp2(peak - shift)
            denominator = denominator * decay + weights.sum(axis=1)
            out = out * lax.broadcast_in_dim(decay, out.shape, [0])
            weights = weights.astype(dtype)

            plgpu.barrier_wait(v_barriers.at[stage])
            out = add_product(out, weights, v_smem.at[stage])
            plgpu.barrier_arrive(v_consumed.at[stage])
            return out, new_peak, denominator

        masked_step = functools.partial(step, masked=True)
        lax.fori_loop(begin, own_begin, skip, None)
        carry = (out, peak, denominator)
        if sliding_window is not None:
            carry = lax.fori_loop(own_begin, full_begin, masked_step, carry)
        else:
            full_begin = own_begin
        carry = lax.fori_loop(full_begin, full_end, functools.partial(step, masked=False), carry)
        out, peak, denominator = lax.fori_loop(full_end, own_end, masked_step, carry)
        lax.fori_loop(own_end, end, skip, None)

        is_live = denominator > 0
        inverse = jnp.where(is_live, 1.0 / denominator, 0.0)
        q_smem[warpgroup] = (out * lax.broadcast_in_dim(inverse, out.shape, [0])).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem.at[warpgroup], out_ref.at[tile, kv_head, warpgroup])
        lse = jnp.where(is_live, peak + jnp.log2(denominator), -jnp.inf)
        mosaic_gpu.store(lse_ref.at[tile, kv_head, warpgroup], lse)
        plgpu.wait_smem_to_gmem(0)


def assign_tiles(
    cu_q_lens: jax.Array, kv_lens: jax.Array, distribution: jax.Array, schedule: Schedule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts rows [decode_end, num_seqs) into tiles: each tile's row and first token i32[num_tiles], each row's first
    tile i32[B]. Spare tiles begin at or past their row's end."""
    row = jnp.arange(kv_lens.shape[0])
    is_prefill = (row >= distribution[0]) & (row < distribution[2]) & (kv_lens > 0)
    counts = jnp.where(is_prefill, pl.cdiv(jnp.diff(cu_q_lens), schedule.tile_tokens), 0)
    ends = jnp.cumsum(counts)
    tile = jnp.arange(schedule.num_tiles)
    rows = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), row.shape[0] - 1)
    first_tiles = ends - counts
    starts = jnp.where(
        tile < ends[-1], (tile - first_tiles[rows]) * schedule.tile_tokens, 1 << 30
    )  # past any row's end
    return rows.astype(jnp.int32), starts.astype(jnp.int32), first_tiles


def attend(
    q: jax.Array,  # [T, K, group, H]
    kv_pages: jax.Array,
    kv_scales: jax.Array | None,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    sinks: jax.Array,  # f32[K, group], natural logits
    *,
    schedule: Schedule,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    cost_estimate: pl.CostEstimate,
) -> tuple[jax.Array, jax.Array]:
    """Tokens of rows [decode_end, num_seqs): [T, K, group, H] in q's dtype, f32 lse [T, K, group]; others anything."""
    s = schedule
    num_tokens, dtype = q.shape[0], q.dtype
    transforms = mosaic_gpu.swizzle(s.head_dim)
    tile_rows, tile_starts, first_tiles = assign_tiles(cu_q_lens, kv_lens, distribution, s)
    live_rows = s.warpgroup_tokens * s.group
    spare_rows = WGMMA_ROWS - live_rows
    tile_sinks = jnp.tile(sinks * LOG2_E, (1, s.warpgroup_tokens))
    tile_sinks = jnp.pad(tile_sinks, ((0, 0), (0, spare_rows)), constant_values=-jnp.inf)
    # [num_tiles, warpgroups, warpgroup_tokens, K, group, H] -> q by tile
    in_tile = jnp.arange(s.tile_tokens).reshape(s.compute_warpgroups, s.warpgroup_tokens)
    tile_token = (cu_q_lens[tile_rows] + tile_starts)[:, None, None] + in_tile
    tile_q = q[jnp.clip(tile_token, 0, num_tokens - 1)].transpose(0, 3, 1, 2, 4, 5)
    tile_q = tile_q.reshape(*tile_q.shape[:3], live_rows, s.head_dim)
    tile_q = jnp.pad(tile_q, ((0, 0), (0, 0), (0, 0), (0, spare_rows), (0, 0)))
    parts = s.block_kv // s.fetch_kv  # copies of a block
    scales = () if kv_scales is None else (kv_scales,)
    arrivals = parts if kv_scales is None else 1
    fetch_scratch: list[Any] = [plgpu.Barrier(num_arrivals=parts)]
    if kv_scales is not None:
        fetch_scratch = [
            plgpu.SMEM((RAW_STAGES, s.block_kv, 2 * s.head_dim), kv_pages.dtype),
            plgpu.Barrier(num_arrivals=parts, num_barriers=RAW_STAGES),
        ]
    by_tile = (s.num_tiles, s.num_kv_heads, s.compute_warpgroups, WGMMA_ROWS)
    out, lse = mosaic_gpu.kernel(
        functools.partial(
            _attend, schedule=s, sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap
        ),
        cost_estimate=cost_estimate,
        out_type=(
            jax.ShapeDtypeStruct((*by_tile, s.head_dim), dtype),
            jax.ShapeDtypeStruct(by_tile, jnp.float32),
        ),
        grid=(s.num_kv_heads, s.num_tiles),
        grid_names=("kv_head", "tile"),
        num_threads=s.compute_warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((s.compute_warpgroups, WGMMA_ROWS, s.head_dim), dtype, transforms=transforms),
            plgpu.SMEM((s.num_stages, s.block_kv, s.head_dim), dtype, transforms=transforms),
            plgpu.SMEM((s.num_stages, s.block_kv, s.head_dim), dtype, transforms=transforms),
            plgpu.Barrier(num_barriers=s.compute_warpgroups),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=s.num_stages),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=s.num_stages),
            plgpu.Barrier(num_arrivals=s.compute_warpgroups, num_barriers=s.num_stages),
            plgpu.Barrier(num_arrivals=s.compute_warpgroups, num_barriers=s.num_stages),
            *fetch_scratch,
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="ragged_paged_attention_prefill",
    )(tile_q, kv_pages, page_table, kv_lens, cu_q_lens, tile_rows, tile_starts, tile_sinks, *scales)

    # Token t of row b, the i-th there, lies in tile first_tiles[b] + i // tile_tokens.
    token = jnp.arange(num_tokens)
    row = jnp.clip(jnp.searchsorted(cu_q_lens, token, side="right") - 1, 0, kv_lens.shape[0] - 1)
    tile, in_tile = jnp.divmod(token - cu_q_lens[row], s.tile_tokens)
    tile = jnp.clip(first_tiles[row] + tile, 0, s.num_tiles - 1)
    warpgroup, in_warpgroup = jnp.divmod(in_tile, s.warpgroup_tokens)
    by_token = (*by_tile[:3], s.warpgroup_tokens, s.group)
    out = out[:, :, :, :live_rows].reshape(*by_token, s.head_dim)[tile, :, warpgroup, in_warpgroup]
    lse = lse[:, :, :, :live_rows].reshape(by_token)[tile, :, warpgroup, in_warpgroup]
    return out, lse / LOG2_E
