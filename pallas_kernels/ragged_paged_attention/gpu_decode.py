"""Rows of few query tokens on GPU: split-K over pages on mma, with TMA from compute capability 9.0 on and cp.async
on 8.x.

Block schedule: grid (split, kv head, row), one warpgroup per block. A block holds the query tokens of its row times
the G heads of its kv head as one [M, H] tile (GQA without repeating K or V), and walks its share of the row's K|V in
blocks of block_kv tokens. Each block arrives asynchronously, a page (or a part of a page) per copy, into one of
`num_stages` buffers. The softmax is online, in float32 and base 2.
A split leaves its normalized output and the log2 of its denominator; `combine` merges splits (FlashDecoding, split-K
of arXiv:2311.01282). Splits with nothing to do leave lse -inf and no output.

By TMA, pages that no query of the row sees are not fetched. cp.async counts its copies and cannot leave one out: at the
ends of a row it reads the null page in their place.

8-bit pages are widened to q's dtype, exactly, on the way from their buffer to a buffer of one block. The scale of a
token's K multiplies its column of scores, that of its V its column of weights, in float32; both come straight from
device memory into registers one block ahead.
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
from jaxinfer.pallas_kernels.mosaic_gpu import PIECE_ROWS
from jaxinfer.pallas_kernels.ragged_paged_attention import gpu_tuning

LOG2_E = math.log2(math.e)
MAX_ROWS = 64  # of the query tile: four warps of 16
# Of one lane of K in the least split (256 tokens of 2 bytes): with less, the partial outputs of G = 4 heads outweigh 3%
# of the K and V that it reads.
MIN_SPLIT_BYTES = 512
WARPGROUP = 128  # threads


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The static block schedule of a decode call: all that the kernel and the counting of its bytes need."""

    num_rows: int  # B
    num_kv_heads: int  # K
    head_dim: int  # H
    page_size: int
    kv_itemsize: int  # bytes of an element of the pages
    by_tma: bool  # how K and V arrive: by TMA or by cp.async
    max_q_len: int
    group: int  # query heads per kv head in the tile: G, or more to fill the unit in which a token is copied
    tile_rows: int  # M
    m_warps: int  # warps along M; the others share the columns
    block_kv: int  # kv tokens per step
    fetch_kv: int  # kv tokens per copy: a page, or block_kv of a longer page
    num_stages: int
    num_splits: int

    @property
    def min_split_tokens(self) -> int:
        """kv tokens of the least split: a split costs its partial outputs, whatever the pages are."""
        return MIN_SPLIT_BYTES // self.kv_itemsize


def _tile(max_q_len: int, group: int, head_dim: int, by_tma: bool) -> tuple[int, int, int]:
    """(group, tile_rows, m_warps): G grown to whole copies, and the least tile that the warps can share."""
    # TMA begins at multiples of TMA_ALIGNMENT; without it every thread of the warpgroup copies some elements.
    unit = mosaic_gpu.TMA_ALIGNMENT // 2 if by_tma else WARPGROUP
    while group * head_dim % unit:
        group += 1
    # An accumulator is dealt out in tiles of [16 m_warps, 8 (4 / m_warps)].
    tiles = [(pl.cdiv(max_q_len * group, 16 * m) * 16 * m, m) for m in (1, 2, 4) if head_dim % (32 // m) == 0]
    tile_rows, m_warps = min(tiles, key=lambda tile: (tile[0], -tile[1]))
    return group, tile_rows, m_warps


def fits(max_q_len: int, group: int, head_dim: int, compute_capability: tuple[int, int]) -> bool:
    """Whether max_q_len query tokens of G heads fit one tile, and the tile the shared memory."""
    _, tile_rows, _ = _tile(max_q_len, group, head_dim, compute_capability >= mosaic_gpu.FIRST_WITH_TMA)
    needed = gpu_tuning.most_decode_bytes(tile_rows, head_dim, compute_capability)
    return tile_rows <= MAX_ROWS and needed <= gpu_tuning.DECODE_LIMITS[compute_capability].block_bytes


def make_schedule(
    num_rows: int,
    pages_per_row: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    max_q_len: int,
    kv_itemsize: int,
    compute_capability: tuple[int, int],
) -> Schedule:
    """The schedule for these shapes, which must fit."""
    by_tma = compute_capability >= mosaic_gpu.FIRST_WITH_TMA
    group, tile_rows, m_warps = _tile(max_q_len, group, head_dim, by_tma)
    block_kv, num_stages = gpu_tuning.decode_blocks(
        head_dim, page_size, kv_itemsize, tile_rows, m_warps, compute_capability
    )
    target_blocks = gpu_tuning.DECODE_LIMITS[compute_capability].target_blocks
    splits = (
        pl.cdiv(target_blocks, num_rows * num_kv_heads),
        pl.cdiv(pages_per_row * page_size * kv_itemsize, MIN_SPLIT_BYTES),
    )
    return Schedule(
        num_rows=num_rows,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        kv_itemsize=kv_itemsize,
        by_tma=by_tma,
        max_q_len=max_q_len,
        group=group,
        tile_rows=tile_rows,
        m_warps=m_warps,
        block_kv=block_kv,
        fetch_kv=min(page_size, block_kv),
        num_stages=num_stages,
        num_splits=max(1, min(splits)),
    )


def _attend(
    q_ref,  # [T, K, group, H]
    pages_ref,  # [num_pages, K, page_size, 2H]
    page_table_ref,  # i32[B, P]
    kv_lens_ref,  # i32[B]
    cu_q_lens_ref,  # i32[B + 1]
    row_end_ref,  # i32[1]: rows [0, row_end) are this kernel's
    sinks_ref,  # f32[K, M], base-2 logits; -inf where there is none
    *refs,
    # [scales_ref  f32[num_pages, K, 2, page_size], with 8-bit pages]
    # out_ref      [splits, B, K, max_q_len * group, H]
    # lse_ref      f32[splits, B, K, M], base 2
    # q_smem       [M, H]
    # kv_smem      [num_stages, block_kv, 2H]
    # weights_smem [M, block_kv]
    # out_smem     [M, H]
    # [wide_smem   [block_kv, 2H], with 8-bit pages]
    # [kv_barriers, q_barrier, by TMA]
    schedule: Schedule,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
):
    s = schedule
    is_quantized = s.kv_itemsize == 1
    scales_ref, *rest = refs if is_quantized else (None, *refs)
    out_ref, lse_ref, q_smem, kv_smem, weights_smem, out_smem, *rest = rest
    wide_smem, *rest = rest if is_quantized else (None, *rest)
    barriers: Any = rest if s.by_tma else (None, None)
    kv_barriers, q_barrier = barriers
    dtype, head_dim, block_kv = q_smem.dtype, s.head_dim, s.block_kv
    split, kv_head, row = lax.axis_index("split"), lax.axis_index("kv_head"), lax.axis_index("row")
    acc_layout = plgpu.Layout.MMA_ACC(dtype, m_warps=s.m_warps)
    lhs_layout = plgpu.Layout.MMA_LHS(dtype, m_warps=s.m_warps)
    rhs_layout = plgpu.Layout.MMA_RHS(dtype, m_warps=s.m_warps)
    row_layout = acc_layout.reduce(1)
    # Of one token, [group, H], copied without TMA: all threads take equal runs.
    token_layout = plgpu.Layout.WG_STRIDED(
        (s.group, head_dim), vec_size=math.gcd(s.group * head_dim // WARPGROUP, 4)
    )

    # What the row's queries see is [first_seen, kv_len); this split's share is blocks [begin, end) of it.
    kv_len = jnp.where(row < row_end_ref[0], kv_lens_ref[row], 0)
    q_start = cu_q_lens_ref[row]
    q_len = cu_q_lens_ref[row + 1] - q_start
    kv_len = jnp.where(q_len > 0, kv_len, 0)
    first_position = kv_len - q_len  # of the row's first query
    if sliding_window is None:
        first_seen = jnp.int32(0)
    else:
        first_seen = jnp.maximum(first_position - (sliding_window - 1), 0)
    first_block = lax.div(first_seen, block_kv)
    num_blocks = pl.cdiv(kv_len, block_kv) - first_block
    splits_used = jnp.clip(pl.cdiv(num_blocks * block_kv, s.min_split_tokens), 1, s.num_splits)
    blocks_per_split = pl.cdiv(num_blocks, splits_used)
    begin = first_block + jnp.minimum(split * blocks_per_split, num_blocks)
    end = first_block + jnp.minimum((split + 1) * blocks_per_split, num_blocks)

    @pl.when(begin >= end)
    def _nothing_to_do():
        nothing = plgpu.layout_cast(jnp.full((s.tile_rows,), -jnp.inf, jnp.float32), row_layout)
        mosaic_gpu.store(lse_ref.at[split, row, kv_head], nothing)

    @pl.when(begin < end)
    def _attend_share():
        def page_of(position):
            return page_table_ref[row, lax.div(position, s.page_size)]

        def fetch(block):
            stage = lax.rem(block - begin, s.num_stages)
            for start in range(0, block_kv, s.fetch_kv):
                position = block * block_kv + start
                seen = (position < kv_len) & (position + s.fetch_kv > first_seen)
                offset = lax.rem(position, s.page_size)
                target = kv_smem.at[stage, pl.ds(start, s.fetch_kv)]
                if not s.by_tma:
                    page = page_of(jnp.minimum(position, kv_len - 1))
                    mosaic_gpu.copy_by_cp_async(
                        pages_ref.at[jnp.where(seen, page, 0), kv_head, pl.ds(offset, s.fetch_kv)], target
                    )
                    continue

                @pl.when(seen)
                def _copy(position=position, offset=offset, target=target):
                    source = pages_ref.at[page_of(position), kv_head, pl.ds(offset, s.fetch_kv)]
                    plgpu.copy_gmem_to_smem(source, target, kv_barriers.at[stage])

                @pl.when(jnp.logical_not(seen))
                def _skip():
                    plgpu.barrier_arrive(kv_barriers.at[stage])

        def wait_for(block):
            if s.by_tma:
                plgpu.barrier_wait(kv_barriers.at[lax.rem(block - begin, s.num_stages)])
                return
            # A count of copies that may still be under way is a constant: right while all buffers are in use.
            all_in_use = block + s.num_stages <= end

            @pl.when(all_in_use)
            def _wait_for_the_oldest():
                plgpu.wait_gmem_to_smem((s.num_stages - 1) * (block_kv // s.fetch_kv))

            @pl.when(jnp.logical_not(all_in_use))
            def _wait_for_all():
                plgpu.wait_gmem_to_smem(0)

        def load_scales(block):
            """K and V scales of a block, f32[block_kv] each, with 8-bit pages."""
            position = block * block_kv
            page, offset = page_of(position), lax.rem(position, s.page_size)
            return tuple(
                plgpu.load(
                    scales_ref.at[page, kv_head, i, pl.ds(offset, block_kv)],
                    layout=acc_layout.reduce(0),
                    optimized=False,
                )
                for i in range(2)
            )

        def rows_of(token):
            return pl.ds(token * s.group, s.group)

        if s.by_tma:
            for token in range(s.max_q_len):

                @pl.when(token < q_len)
                def _load_query(token=token):
                    source = q_ref.at[q_start + token, kv_head]
                    plgpu.copy_gmem_to_smem(source, q_smem.at[rows_of(token)], q_barrier)

                if token:  # a row has at least one

                    @pl.when(token >= q_len)
                    def _no_query():
                        plgpu.barrier_arrive(q_barrier)

        else:

            @pl.loop(0, q_len)
            def _load_query_by_threads(token):
                q_smem[rows_of(token)] = plgpu.load(q_ref.at[q_start + token, kv_head], layout=token_layout)

        for stage in range(s.num_stages):

            @pl.when(begin + stage < end)
            def _fill(stage=stage):
                fetch(begin + stage)

        if s.by_tma:
            plgpu.barrier_wait(q_barrier)
        query = plgpu.load(q_smem, layout=lhs_layout, optimized=False)
        sinks = plgpu.load(sinks_ref.at[kv_head], layout=row_layout, optimized=False)
        sinks = sinks + jnp.where(split == 0, 0.0, -jnp.inf)  # once, though every split starts from here
        denominator = jnp.where(sinks == -jnp.inf, 0.0, 1.0)
        out = plgpu.layout_cast(jnp.zeros((s.tile_rows, head_dim), jnp.float32), acc_layout)

        def widen(stage):
            lanes, layout = mosaic_gpu.swizzle_lanes(head_dim), mosaic_gpu.piece_layout(head_dim, dtype)
            for start in range(0, block_kv, PIECE_ROWS):
                for lane in range(0, 2 * head_dim, lanes):
                    piece = pl.ds(start, PIECE_ROWS), pl.ds(lane, lanes)
                    raw = plgpu.load(kv_smem.at[stage, *piece], layout=layout, optimized=False)
                    wide_smem[*piece] = mosaic_gpu.widen(raw, dtype)

        def step(block, carry):
            out, peak, denominator, scales = carry
            stage = lax.rem(block - begin, s.num_stages)
            wait_for(block)
            if is_quantized:
                widen(stage)
            kv = wide_smem if is_quantized else kv_smem.at[stage]
            keys = plgpu.load(kv.at[:, pl.ds(0, head_dim)].T, layout=rhs_layout)
            no_scores = jnp.zeros((s.tile_rows, block_kv), jnp.float32)
            scores = plgpu.mma(plgpu.layout_cast(no_scores, acc_layout), query, keys)
            if is_quantized:
                k_scales, v_scales = scales
                scores = scores * lax.broadcast_in_dim(k_scales, scores.shape, [1])
                scales = load_scales(jnp.minimum(block + 1, end - 1))
            if soft_cap is None:
                scores = scores * (sm_scale * LOG2_E)
            else:
                scores = jnp.tanh(scores * (sm_scale / soft_cap)) * (soft_cap * LOG2_E)
            kv_position = block * block_kv + plgpu.broadcasted_iota(
                jnp.int32, scores.shape, 1, layout=acc_layout
            )
            q_position = first_position  # of each row of the tile
            if s.max_q_len > 1:
                tile_row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=acc_layout)
                q_position = first_position + lax.div(tile_row, s.group)
            visible = kv_position <= q_position
            if sliding_window is not None:
                visible &= kv_position > q_position - sliding_window
            scores = jnp.where(visible, scores, -jnp.inf)

            new_peak = jnp.maximum(peak, scores.max(axis=1))
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)  # a row that has seen nothing yet
            weights = jnp.exp2(scores - lax.broadcast_in_dim(shift, scores.shape, [0]))
            decay = jnp.exp2(peak - shift)
            denominator = denominator * decay + weights.sum(axis=1)
            # What no query may see must not reach the product: 0 x NaN is NaN. Widened values are finite.
            if is_quantized:
                weights = weights * lax.broadcast_in_dim(v_scales, weights.shape, [1])
                weights = jnp.where(visible, weights, 0.0)
            weights_smem[...] = weights.astype(dtype)
            weights_lhs = plgpu.load(weights_smem, layout=lhs_layout, optimized=False)

            values = plgpu.load(kv.at[:, pl.ds(head_dim, head_dim)], layout=rhs_layout)
            if not is_quantized:
                value_position = block * block_kv + plgpu.broadcasted_iota(
                    jnp.int32, values.shape, 0, layout=rhs_layout
                )
                seen = (value_position < kv_len) & (value_position >= first_seen)
                values = jnp.where(seen, values, jnp.zeros((), dtype))
            out = plgpu.mma(out * lax.broadcast_in_dim(decay, out.shape, [0]), weights_lhs, values)

            @pl.when(block + s.num_stages < end)
            def _fetch_next():
                if s.by_tma:
                    plgpu.commit_smem()  # all warps have read the buffer that the copy engine writes next
                fetch(block + s.num_stages)

            return out, new_peak, denominator, scales

        scales = load_scales(begin) if is_quantized else ()
        out, peak, denominator, _ = lax.fori_loop(begin, end, step, (out, sinks, denominator, scales))
        is_live = denominator > 0
        inverse = jnp.where(is_live, 1.0 / denominator, 0.0)
        out = out * lax.broadcast_in_dim(inverse, out.shape, [0])
        mosaic_gpu.store(out_smem, out.astype(out_smem.dtype))
        out_rows_ref = out_ref.at[split, row, kv_head]
        if s.by_tma:
            plgpu.commit_smem()
            for token in range(s.max_q_len):

                @pl.when(token < q_len)
                def _store(token=token):
                    rows = rows_of(token)
                    plgpu.copy_smem_to_gmem(out_smem.at[rows], out_rows_ref.at[rows], commit_group=False)

            plgpu.commit_smem_to_gmem_group()
        else:

            @pl.loop(0, q_len)
            def _store_by_threads(token):
                rows = rows_of(token)
                mosaic_gpu.store(out_rows_ref.at[rows], plgpu.load(out_smem.at[rows], layout=token_layout))

        lse = jnp.where(is_live, peak + jnp.log2(denominator), -jnp.inf)
        mosaic_gpu.store(lse_ref.at[split, row, kv_head], lse)
        if s.by_tma:
            plgpu.wait_smem_to_gmem(0)


def attend(
    q: jax.Array,  # [T, K, group, H]
    kv_pages: jax.Array,
    kv_scales: jax.Array | None,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    row_end: jax.Array,  # i32[]
    sinks: jax.Array,  # f32[K, group], natural logits
    *,
    schedule: Schedule,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    cost_estimate: pl.CostEstimate,
) -> tuple[jax.Array, jax.Array]:
    """Rows [0, row_end): [B, K, max_q_len * group, H] in q's dtype and f32 lse [B, K, max_q_len * group].

    Entries of tokens that a row does not have, and of other rows, hold anything; their lse too, except that rows with
    kv_lens 0 and rows from row_end on have lse -inf and output 0.
    """
    s = schedule
    dtype, live_rows = q.dtype, s.max_q_len * s.group
    out_dtype = dtype if s.num_splits == 1 else jnp.float32
    tile_sinks = jnp.tile(sinks * LOG2_E, (1, s.max_q_len))  # f32[K, live_rows]
    tile_sinks = jnp.pad(tile_sinks, ((0, 0), (0, s.tile_rows - live_rows)), constant_values=-jnp.inf)
    is_quantized = kv_scales is not None
    scales = (kv_scales,) if is_quantized else ()
    swizzle = mosaic_gpu.swizzle(s.head_dim)
    barriers = [
        plgpu.Barrier(num_arrivals=s.block_kv // s.fetch_kv, num_barriers=s.num_stages),
        plgpu.Barrier(num_arrivals=s.max_q_len),
    ]
    out, lse = mosaic_gpu.kernel(
        functools.partial(
            _attend, schedule=s, sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap
        ),
        cost_estimate=cost_estimate,
        out_type=(
            jax.ShapeDtypeStruct(
                (s.num_splits, s.num_rows, s.num_kv_heads, live_rows, s.head_dim), out_dtype
            ),
            jax.ShapeDtypeStruct((s.num_splits, s.num_rows, s.num_kv_heads, s.tile_rows), jnp.float32),
        ),
        grid=(s.num_splits, s.num_kv_heads, s.num_rows),
        grid_names=("split", "kv_head", "row"),
        scratch_types=[
            plgpu.SMEM((s.tile_rows, s.head_dim), dtype),
            plgpu.SMEM(
                (s.num_stages, s.block_kv, 2 * s.head_dim),
                kv_pages.dtype,
                transforms=() if is_quantized else swizzle,
            ),
            plgpu.SMEM((s.tile_rows, s.block_kv), dtype),
            plgpu.SMEM((s.tile_rows, s.head_dim), out_dtype),
            *([plgpu.SMEM((s.block_kv, 2 * s.head_dim), dtype, transforms=swizzle)] if is_quantized else ()),
            *(barriers if s.by_tma else ()),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="ragged_paged_attention_decode",
    )(q, kv_pages, page_table, kv_lens, cu_q_lens, row_end.reshape(1), tile_sinks, *scales)
    return _combine(out, lse[..., :live_rows], dtype)


def _combine(out: jax.Array, lse: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Merges splits: out [splits, ..., H], base-2 lse f32[splits, ...] -> [..., H] in dtype, natural lse f32[...]."""
    if out.shape[0] == 1:
        return out[0], lse[0] / LOG2_E
    peak = lse.max(axis=0)
    shift = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp2(lse - shift)  # f32[splits, ...]
    denominator = weights.sum(axis=0)
    used = weights[..., None] > 0  # a split without tokens has written no output
    total = jnp.where(used, weights[..., None] * out.astype(jnp.float32), 0.0).sum(axis=0)
    total = total / jnp.where(denominator > 0, denominator, 1.0)[..., None]
    return total.astype(dtype), (shift + jnp.log2(denominator)) / LOG2_E
