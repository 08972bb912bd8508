"""quantized_matmul for GPU (Pallas Mosaic GPU): TMA and WGMMA, weights widened in registers; compute capability 9.0.

The product is computed transposed, outputs by tokens: the weights are then the operand that WGMMA takes from
registers, where they are widened, and a tile of few tokens is a narrow one (N from 8 on). One kernel serves few rows
and many: with few, D is split so that all SMs stream weights.

Block schedule: grid (tile of tokens, tile of outputs, split of D). In each block a fetching warpgroup brings steps of
weights, x and scales into a ring of buffers by TMA; two computing warpgroups take 64 outputs each. They leave sums
[split, F, T]; a plain JAX pass adds the splits and transposes.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic_gpu
from pallas_kernels.quantized_matmul import tuning
from pallas_kernels.quantized_matmul.gpu_schedule import (
    BLOCK_F,
    CHUNK,
    COMPUTE_WARPGROUPS,
    TMA_ROW_ALIGNMENT,
    WGMMA_ROWS,
    Blocks,
    Schedule,
    estimate,
)
from pallas_kernels.quantized_matmul.reference import quantize_rows

# Registers per thread: 2 x 128 x 232 + 128 x 40 fill the 64 K registers of an SM.
COMPUTE_REGISTERS, FETCH_REGISTERS = 232, 40
ELSE = "use implementation='xla'"


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
    if w8a8 is None:
        return _call(schedule_of(x, qvalue, scale, offset, out_dtype, blocks), x, qvalue, scale, offset, None)
    x8, x_scale = quantize_rows(x)
    if w8a8 == "int8":
        schedule = schedule_of(x8, qvalue, scale, None, out_dtype, blocks)
        return _call(schedule, x8, qvalue, scale, None, x_scale)
    schedule = schedule_of(x8.astype(jnp.bfloat16), qvalue, scale, None, out_dtype, blocks)
    return _call(schedule, x8.astype(jnp.bfloat16), qvalue, scale, None, x_scale)


def refusal(
    x: jax.Array, qvalue: jax.Array, w8a8: str | None, compute_capability: tuple[int, int]
) -> str | None:
    """Why this combination has no GPU kernel and what would work, or None."""
    out_dim, in_dim = qvalue.shape
    if compute_capability[0] != 9:
        return f"WGMMA exists on compute capability 9.0 only, not {compute_capability}: {ELSE}"
    if x.dtype != jnp.bfloat16 and w8a8 is None:
        return f"x is {x.dtype}, but WGMMA multiplies bfloat16: cast x, or {ELSE}"
    lanes = TMA_ROW_ALIGNMENT * 8 // jax.dtypes.itemsize_bits(qvalue.dtype)
    if in_dim % lanes:
        return f"D {in_dim} is no multiple of {lanes}, which TMA needs of {qvalue.dtype}: {ELSE}"
    if out_dim % WGMMA_ROWS:
        return f"F {out_dim} is no multiple of {WGMMA_ROWS}: pad the weight, or {ELSE}"
    return None


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
        blocks = tuning.gpu_blocks(num_tokens, out_dim, in_dim, group, x.dtype, qvalue.dtype)
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
    scales = [scale] if offset is None else [scale, offset]
    scale_buffers = []
    if s.per_channel:
        scales = [scale.reshape(s.out_dim)]
    else:
        # TMA needs rows of whole 16 bytes: a copy, but only where G is no multiple of 4
        spare = -scale.shape[1] % (TMA_ROW_ALIGNMENT // 4)
        scales = [jnp.pad(a, ((0, 0), (0, spare))) if spare else a for a in scales]
        scale_buffers = [plgpu.SMEM((b.num_stages, BLOCK_F, s.block_groups), jnp.float32)] * len(scales)
    sums = mosaic_gpu.kernel(
        functools.partial(_kernel, s),
        cost_estimate=estimate(s),
        out_type=jax.ShapeDtypeStruct((b.num_splits, s.out_dim, s.steps_t * b.block_t), s.sum_dtype),
        grid=(s.steps_t, s.steps_f, b.num_splits),
        grid_names=("tile_t", "tile_f", "split"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM(
                (b.num_stages, BLOCK_F, b.block_d), s.weight_dtype, transforms=_swizzle(s.weight_dtype)
            ),
            plgpu.SMEM((b.num_stages, b.block_t, b.block_d), s.x_dtype, transforms=_swizzle(s.x_dtype)),
            *scale_buffers,
            plgpu.Barrier(num_arrivals=2 + len(scale_buffers), num_barriers=b.num_stages),
            plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=b.num_stages),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="quantized_matmul",
    )(x, qvalue, *scales)
    out = sums[0] if b.num_splits == 1 else sums.sum(axis=0)
    out = out.T[: s.num_tokens]  # [T, F]
    if x_scale is not None:
        out = out * x_scale
    return out.astype(s.out_dtype)


def _kernel(s: Schedule, x_ref, weight_ref, *refs):
    """One tile of tokens and outputs over one split of D."""
    b = s.blocks
    num_scales = 1 + s.has_offset
    scale_refs, (sums_ref, weight_smem, x_smem) = refs[:num_scales], refs[num_scales : num_scales + 3]
    *scale_smems, filled, consumed = refs[num_scales + 3 :]
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
            groups = pl.ds(step * s.block_groups, s.block_groups)
            for scale_ref, scale_smem in zip(scale_refs[: len(scale_smems)], scale_smems, strict=True):
                plgpu.copy_gmem_to_smem(scale_ref.at[outputs, groups], scale_smem.at[stage], filled.at[stage])

    first_output = tile_f * BLOCK_F + warpgroup * WGMMA_ROWS

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        rows = pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)

        def multiply(acc_ref):
            @pl.loop(first_step, end_step)
            def _multiply_step(step):
                stage = lax.rem(step - first_step, b.num_stages)
                plgpu.barrier_wait(filled.at[stage])
                for start in range(0, b.block_d, CHUNK):
                    inputs = pl.ds(start, CHUNK)
                    weights = weight_smem.at[stage, rows, inputs]
                    if s.x_dtype != jnp.int8:
                        weights = _widen(s, weights, [ref.at[stage, rows] for ref in scale_smems], start)
                    plgpu.wgmma(acc_ref, weights, x_smem.at[stage, :, inputs].T)
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(consumed.at[stage])

            return acc_ref[...]

        acc_dtype = jnp.int32 if s.x_dtype == jnp.int8 else jnp.float32
        sums = pl.run_scoped(multiply, plgpu.ACC((WGMMA_ROWS, b.block_t), acc_dtype))

        @pl.when(first_output < s.out_dim)
        def _store():
            outputs = pl.ds(first_output, WGMMA_ROWS)
            result = sums.astype(jnp.float32)
            if s.per_channel:
                scale = plgpu.load(
                    scale_refs[0].at[outputs], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
                )
                result = result * lax.broadcast_in_dim(scale, result.shape, [0])
            mosaic_gpu.store_to_gmem(sums_ref.at[split, outputs, tokens], result.astype(s.sum_dtype))


def _widen(s: Schedule, weights_ref, scale_refs, start: int) -> jax.Array:
    """bfloat16 [WGMMA_ROWS, CHUNK] of inputs from `start` of a step on, scaled where groups have scales."""
    layout = plgpu.Layout.WGMMA_UPCAST_2X if s.weight_dtype == jnp.int8 else plgpu.Layout.WGMMA_UPCAST_4X
    weights = plgpu.layout_cast(plgpu.load(weights_ref, layout=layout), plgpu.Layout.WGMMA)
    weights = weights.astype(jnp.bfloat16)
    if s.per_channel:
        return weights
    scaled = []
    for i in range(CHUNK // s.group):
        part = weights[:, i * s.group : (i + 1) * s.group].astype(jnp.float32)

        def of_group(ref, i=i, shape=part.shape):
            column = ref.at[:, start // s.group + i]
            column = plgpu.load(column, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            return lax.broadcast_in_dim(column, shape, [0])

        part = part * of_group(scale_refs[0])
        if s.has_offset:
            part = part + of_group(scale_refs[1])
        scaled.append(part.astype(jnp.bfloat16))
    return scaled[0] if len(scaled) == 1 else jnp.concatenate(scaled, axis=1)


def _swizzle(dtype: jax.typing.DTypeLike) -> tuple[Any, ...]:
    """Transforms of a shared buffer whose rows are cut into CHUNK inputs: the widest swizzle, at most 128 bytes."""
    bits = jax.dtypes.itemsize_bits(dtype)
    lanes = min(CHUNK, 128 * 8 // bits)
    return (
        plgpu.TilingTransform((8, lanes)),  # type: ignore[abstract]  # mypy sees protocols' empty bodies
        plgpu.SwizzleTransform(lanes * bits // 8),  # type: ignore[abstract]
    )
