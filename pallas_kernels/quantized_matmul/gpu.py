"""quantized_matmul for GPU (Pallas Mosaic GPU): TMA and WGMMA, weights widened in registers; compute capability 9.0.

The product is computed transposed, outputs by tokens: the weights are then the operand that WGMMA takes from
registers, where they are widened, and a tile of few tokens is a narrow one (N from 8 on). One kernel serves few rows
and many: with few, D is split so that all SMs stream weights.

Block schedule: grid (tile of tokens, tile of outputs, split of D). In each block a fetching warpgroup brings steps of
weights and x into a ring of buffers by TMA; two computing warpgroups take 64 outputs each, and read the scales of
groups themselves. Tiles leave transposed, [tokens, outputs], by TMA; splits of D are added by plain JAX.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels import mosaic_gpu
from jaxinfer.pallas_kernels.quantized_matmul import gpu_schedule, tuning
from jaxinfer.pallas_kernels.quantized_matmul.costs import estimate
from jaxinfer.pallas_kernels.quantized_matmul.gpu_schedule import (
    BLOCK_F,
    CHUNK,
    COMPUTE_WARPGROUPS,
    ELSE,
    WGMMA_ROWS,
    Blocks,
    Schedule,
    count,
)
from jaxinfer.pallas_kernels.quantized_matmul.reference import quantize_rows

# Registers per thread: 2 x 128 x 232 + 128 x 40 fill the 64 K registers of an SM.
COMPUTE_REGISTERS, FETCH_REGISTERS = 232, 40
TILE_ROWS = 8  # of a swizzled buffer


def quantized_matmul(
    x: jax.Array,  # [T, D]
    qvalue: jax.Array,  # [F, D]
    scale: jax.Array,  # f32[F, G]
    offset: jax.Array | None,  # f32[F, G]
    *,
    w8a8: str | None,
    out_dtype: jnp.dtype,
    blocks: Blocks | None = None,
    compute_capability: tuple[int, int] = (9, 0),
) -> jax.Array:
    """See the package's docstring. compute_capability is that of the GPU that the program is compiled for.

    Raises:
        NotImplementedError: `refusal` has a reason.
    """
    reason = refusal(x, qvalue, w8a8, compute_capability)
    if reason is not None:
        raise NotImplementedError(f"quantized_matmul implementation 'gpu': {reason}")
    num_tokens = x.shape[0]
    if num_tokens > TILE_ROWS:  # TMA wants whole tiles of rows, or less than one
        x = jnp.pad(x, ((0, -num_tokens % TILE_ROWS), (0, 0)))
    x_scale = None
    if w8a8 is not None:
        x, x_scale = quantize_rows(x)
        x = x.astype(w8a8)
    schedule = schedule_of(x, qvalue, scale, offset, out_dtype, blocks)
    return _call(schedule, x, qvalue, scale, offset, x_scale)[:num_tokens]


def refusal(
    x: jax.Array, qvalue: jax.Array, w8a8: str | None, compute_capability: tuple[int, int]
) -> str | None:
    """Why this combination has no GPU kernel and what would work, or None."""
    if x.dtype != jnp.bfloat16 and w8a8 is None:
        return f"x is {x.dtype}, but WGMMA multiplies bfloat16: cast x, or {ELSE}"
    return gpu_schedule.refusal(qvalue.shape[0], qvalue.shape[1], compute_capability)


def schedule_of(
    x: jax.Array | jax.ShapeDtypeStruct,  # int8 for w8a8
    qvalue: jax.Array | jax.ShapeDtypeStruct,
    scale: jax.Array | jax.ShapeDtypeStruct,
    offset: jax.Array | jax.ShapeDtypeStruct | None,
    out_dtype: jnp.dtype,
    blocks: Blocks | None = None,
) -> Schedule:
    """What a call is compiled for. Only shapes and dtypes are read."""
    num_tokens, in_dim = x.shape
    out_dim, group = qvalue.shape[0], in_dim // scale.shape[1]
    if blocks is None:
        blocks = tuning.gpu_blocks(num_tokens, out_dim, in_dim, x.dtype, qvalue.dtype)
    return Schedule(
        num_tokens=num_tokens,
        out_dim=out_dim,
        in_dim=in_dim,
        group=group,
        has_offset=offset is not None,
        x_dtype=jnp.dtype(x.dtype),
        weight_dtype=jnp.dtype(qvalue.dtype),
        out_dtype=jnp.dtype(out_dtype),
        blocks=blocks,
    )


@functools.partial(jax.jit, static_argnums=0)
def _call(
    s: Schedule,
    x: jax.Array,
    qvalue: jax.Array,
    scale: jax.Array,
    offset: jax.Array | None,
    x_scale: jax.Array | None,  # f32[T, 1]
) -> jax.Array:
    b = s.blocks
    scales = [scale.reshape(s.out_dim)] if s.per_channel else [scale] if offset is None else [scale, offset]
    width = math.gcd(s.in_dim, CHUNK)  # TMA cuts rows into whole runs of a swizzle
    x_scales = []
    if x_scale is not None:
        x_scales = [jnp.pad(x_scale[:, 0], (0, s.steps_t * b.block_t - s.num_tokens))]
    sums = mosaic_gpu.kernel(
        functools.partial(_kernel, s),
        cost_estimate=estimate(count(s)),
        out_type=jax.ShapeDtypeStruct((b.num_splits, s.num_tokens, s.out_dim), s.sum_dtype),
        grid=(s.steps_t, s.steps_f, b.num_splits),
        grid_names=("tile_t", "tile_f", "split"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM(
                (b.num_stages, BLOCK_F, b.block_d), s.weight_dtype, transforms=_swizzle(width, s.weight_dtype)
            ),
            plgpu.SMEM(
                (b.num_stages, b.block_t, b.block_d), s.x_dtype, transforms=_swizzle(width, s.x_dtype)
            ),
            plgpu.SMEM(
                (COMPUTE_WARPGROUPS, b.block_t, WGMMA_ROWS),
                s.sum_dtype,
                transforms=_swizzle(WGMMA_ROWS, s.sum_dtype),
            ),
            plgpu.Barrier(num_arrivals=2, num_barriers=b.num_stages),
            plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=b.num_stages),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="quantized_matmul",
    )(x, qvalue, *scales, *x_scales)
    return sums[0] if b.num_splits == 1 else sums.sum(axis=0).astype(s.out_dtype)


def add_product(sums: jax.Array, weights, x_ref) -> jax.Array:
    """sums + weights @ x by WGMMA, accumulating in the registers of sums; weights are registers or shared memory.

    A function of its own because the simulator has no pl.run_state: tests put an equal in its place.
    """

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, weights, x_ref)

    return pl.run_state(multiply)(plgpu.ACC.init(sums))


def _kernel(s: Schedule, x_ref, weight_ref, *refs):
    """One tile of tokens and outputs over one split of D."""
    b = s.blocks
    *scale_refs, sums_ref, weight_smem, x_smem, sums_smem, filled, consumed = refs
    tile_t, tile_f = lax.axis_index("tile_t"), lax.axis_index("tile_f")
    split, warpgroup = lax.axis_index("split"), lax.axis_index("warpgroup")
    first_step = split * s.steps_of_split
    end_step = jnp.minimum(first_step + s.steps_of_split, s.steps_d)
    tokens = pl.ds(tile_t * b.block_t, b.block_t)

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _fetch():
        plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
        outputs = pl.ds(tile_f * BLOCK_F, BLOCK_F)

        @pl.loop(first_step, end_step)
        def _fetch_step(step):
            stage = lax.rem(step - first_step, b.num_stages)

            @pl.when(step - first_step >= b.num_stages)
            def _wait_for_buffer():
                plgpu.barrier_wait(consumed.at[stage])

            # What lies past an array's end arrives as zeros.
            inputs = pl.ds(step * b.block_d, b.block_d)
            plgpu.copy_gmem_to_smem(weight_ref.at[outputs, inputs], weight_smem.at[stage], filled.at[stage])
            plgpu.copy_gmem_to_smem(x_ref.at[tokens, inputs], x_smem.at[stage], filled.at[stage])

    first_output = tile_f * BLOCK_F + warpgroup * WGMMA_ROWS

    @pl.when((warpgroup < COMPUTE_WARPGROUPS) & (first_output < s.out_dim))
    def _compute():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        outputs, rows = pl.ds(first_output, WGMMA_ROWS), pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)

        def multiply_step(step, sums):
            stage = lax.rem(step - first_step, b.num_stages)
            # On their way while the step's weights are.
            scales = [] if s.per_channel else [_scales_of_step(s, ref, outputs, step) for ref in scale_refs]
            plgpu.barrier_wait(filled.at[stage])
            for start in range(0, b.block_d, CHUNK):
                inputs = pl.ds(start, CHUNK)
                weights = weight_smem.at[stage, rows, inputs]
                if s.x_dtype != jnp.int8:
                    groups = slice(start // s.group, (start + CHUNK) // s.group)
                    weights = _widen(s, weights, [columns[groups] for columns in scales])
                sums = add_product(sums, weights, x_smem.at[stage, :, inputs].T)
            plgpu.commit_smem()  # all warps have read the buffer that the copy engine writes next
            plgpu.barrier_arrive(consumed.at[stage])
            return sums

        sums = jnp.zeros((WGMMA_ROWS, b.block_t), jnp.int32 if s.x_dtype == jnp.int8 else jnp.float32)
        sums = plgpu.layout_cast(sums, plgpu.Layout.WGMMA)
        sums = lax.fori_loop(first_step, end_step, multiply_step, sums).astype(jnp.float32)
        if s.per_channel:
            scale_ref, *x_scale_refs = scale_refs
            sums = sums * lax.broadcast_in_dim(_load_column(scale_ref.at[outputs]), sums.shape, [0])
            for ref in x_scale_refs:
                x_scale = plgpu.load(ref.at[tokens], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                sums = sums * lax.broadcast_in_dim(x_scale, sums.shape, [1])
        sums = plgpu.layout_cast(sums.astype(s.sum_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        sums_smem.at[warpgroup].T[...] = sums
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums_smem.at[warpgroup], sums_ref.at[split, tokens, outputs])
        plgpu.wait_smem_to_gmem(0)

    @pl.when((warpgroup < COMPUTE_WARPGROUPS) & (first_output >= s.out_dim))
    def _no_outputs():
        @pl.loop(first_step, end_step)
        def _skip(step):
            stage = lax.rem(step - first_step, b.num_stages)
            plgpu.barrier_wait(filled.at[stage])
            plgpu.barrier_arrive(consumed.at[stage])


def _scales_of_step(s: Schedule, scale_ref, outputs, step: jax.Array) -> list[jax.Array]:
    """f32[WGMMA_ROWS] for each group of a step; what lies past D, where x is zero, gets the last group's."""
    groups = [step * s.block_groups + i for i in range(s.block_groups)]
    last = s.in_dim // s.group - 1
    return [_load_column(scale_ref.at[outputs, jnp.minimum(group, last)]) for group in groups]


def _load_column(ref) -> jax.Array:
    """[WGMMA_ROWS] of GMEM, a row of WGMMA's layout each."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def _widen(s: Schedule, weights_ref, scales: list[list[jax.Array]]) -> jax.Array:
    """bfloat16 [WGMMA_ROWS, CHUNK], scaled where groups have scales: (scales, and offsets if any) of each."""
    layout = plgpu.Layout.WGMMA_UPCAST_2X if s.weight_dtype == jnp.int8 else plgpu.Layout.WGMMA_UPCAST_4X
    weights = plgpu.layout_cast(plgpu.load(weights_ref, layout=layout), plgpu.Layout.WGMMA)
    weights = weights.astype(jnp.bfloat16)
    if s.per_channel:
        return weights
    scaled = []
    for i, columns in enumerate(zip(*scales, strict=True)):
        part = weights[:, i * s.group : (i + 1) * s.group].astype(jnp.float32)
        scale, *offset = (lax.broadcast_in_dim(column, part.shape, [0]) for column in columns)
        part = part * scale
        if offset:
            part = part + offset[0]
        scaled.append(part.astype(jnp.bfloat16))
    return scaled[0] if len(scaled) == 1 else jnp.concatenate(scaled, axis=1)


def _swizzle(width: int, dtype: jax.typing.DTypeLike) -> tuple[Any, ...]:
    """Transforms of a shared buffer that is read width elements at a time: the widest swizzle, at most 128 bytes."""
    bits = jax.dtypes.itemsize_bits(dtype)
    lanes = min(width, 128 * 8 // bits)
    return (
        plgpu.TilingTransform((TILE_ROWS, lanes)),  # type: ignore[abstract]  # mypy sees protocols' empty bodies
        plgpu.SwizzleTransform(lanes * bits // 8),  # type: ignore[abstract]
    )
