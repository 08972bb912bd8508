"""quantized_matmul for TPU (Pallas Mosaic): a grid over T, F and D; weights widened in vector memory.

Blocks of x, weights and scales are double-buffered by their BlockSpecs; the accumulator [block_t, block_f] stays in
vector memory while D is walked. Weights of one scale per output are widened exactly, and their scale multiplies the
sum. Of weights that groups scale
- few rows scale the sums: the rows of x are laid out once per group of a chunk, zero outside the group, so that one
  product gives the sums of all its groups, exactly widened, and widening is all that is done to a weight;
- many rows scale the weights, which are rounded to x's dtype, so that the matrix unit computes nothing twice.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.pallas_kernels.quantized_matmul import tuning
from jaxinfer.pallas_kernels.quantized_matmul.costs import estimate
from jaxinfer.pallas_kernels.quantized_matmul.reference import quantize_rows
from jaxinfer.pallas_kernels.quantized_matmul.tpu_schedule import LANES, Blocks, Schedule, count

VMEM_SLACK_BYTES = 16 << 20  # for values that do not stay in registers
PRODUCT_INPUTS = 512  # whose weights are widened before a product: as many as stay near the matrix unit
VMEM_BYTES = 60 << 20  # that a call may ask for: tpu7x has 64 MiB per core, the others more


def quantized_matmul(
    x: jax.Array,  # [T, D]
    qvalue: jax.Array,  # [F, D]
    scale: jax.Array,  # f32[F, G]
    offset: jax.Array | None,  # f32[F, G]
    *,
    w8a8: str | None,
    out_dtype: jnp.dtype,
    blocks: Blocks | None = None,
    device_kind: str | None = None,
) -> jax.Array:
    """See the package's docstring. Blocks left None come from `tuning`, for the chip that device_kind names if any.

    Nothing is copied where qvalue lies by rows in memory and scale and offset of groups by columns (docs/kernels.md).

    Raises NotImplementedError where D cannot be cut into blocks of whole lanes and groups and is too long for one.
    """
    if w8a8 is None:
        return _call(
            schedule_of(x, qvalue, scale, offset, out_dtype, blocks, device_kind), x, qvalue, scale, offset
        )
    x8, x_scale = quantize_rows(x)
    if w8a8 == "int8":
        schedule = schedule_of(x8, qvalue, scale, None, out_dtype, blocks, device_kind)
        return _call(schedule, x8, qvalue, scale, None, x_scale)
    widened = x8.astype(jnp.bfloat16)
    schedule = schedule_of(widened, qvalue, scale, None, jnp.dtype(jnp.float32), blocks, device_kind)
    return (_call(schedule, widened, qvalue, scale, None) * x_scale).astype(out_dtype)


def schedule_of(
    x: jax.Array | jax.ShapeDtypeStruct,  # int8 for w8a8
    qvalue: jax.Array | jax.ShapeDtypeStruct,
    scale: jax.Array | jax.ShapeDtypeStruct,
    offset: jax.Array | jax.ShapeDtypeStruct | None,
    out_dtype: jnp.dtype,
    blocks: Blocks | None = None,
    device_kind: str | None = None,
) -> Schedule:
    """What a call is compiled for. Only shapes and dtypes are read."""
    num_tokens, in_dim = x.shape
    out_dim, group = qvalue.shape[0], in_dim // scale.shape[1]
    scales_sums = num_tokens <= tuning.TPU_FEW_ROWS
    if blocks is None:
        blocks = tuning.tpu_blocks(num_tokens, out_dim, in_dim, group, x.dtype, qvalue.dtype, device_kind)
    schedule = Schedule(
        num_tokens=num_tokens,
        out_dim=out_dim,
        in_dim=in_dim,
        group=group,
        has_offset=offset is not None,
        x_dtype=jnp.dtype(x.dtype),
        weight_dtype=jnp.dtype(qvalue.dtype),
        out_dtype=jnp.dtype(out_dtype),
        scales_sums=scales_sums,
        blocks=blocks,
    )
    needed = _vmem_bytes(schedule)
    if needed > VMEM_BYTES:
        raise NotImplementedError(
            f"x [{num_tokens}, {in_dim}] in blocks of {blocks.block_t} x {blocks.block_d} and weights in blocks of "
            f"{blocks.block_f} x {blocks.block_d} need {needed} bytes of vector memory but {VMEM_BYTES} are free: "
            "pad D to a multiple of 128 and of 8 groups, or use implementation 'xla'"
        )
    return schedule


@functools.partial(jax.jit, static_argnums=0)
def _call(
    s: Schedule,
    x: jax.Array,
    qvalue: jax.Array,
    scale: jax.Array,
    offset: jax.Array | None,
    x_scale: jax.Array | None = None,  # f32[T, 1]
) -> jax.Array:
    b = s.blocks
    in_specs = [
        pl.BlockSpec((b.block_t, b.block_d), lambda t, f, d: (t, d)),
        pl.BlockSpec((b.block_f, b.block_d), lambda t, f, d: (f, d)),
    ]
    scales = [scale] if offset is None else [scale, offset]
    if s.per_channel:
        scales = [scale.reshape(1, s.out_dim)]
        scale_spec = pl.BlockSpec((1, b.block_f), lambda t, f, d: (0, f))
    else:
        # f32[G, F]: what the compiler keeps an [F, G] of few groups as, since that has fewer lanes to pad
        scales = [a.T for a in scales]
        scale_spec = pl.BlockSpec((s.block_groups, b.block_f), lambda t, f, d: (d, f))
    body = _per_channel if s.per_channel else _scaled_sums if s.scales_sums else _scaled_weights
    in_specs += [scale_spec] * len(scales)
    operands = [x, qvalue, *scales]
    if x_scale is not None:
        operands.append(x_scale)
        in_specs.append(pl.BlockSpec((b.block_t, 1), lambda t, f, d: (t, 0)))
    return pl.pallas_call(
        functools.partial(_kernel, body=body, schedule=s),
        grid=s.grid,
        in_specs=in_specs,
        out_specs=pl.BlockSpec((b.block_t, b.block_f), lambda t, f, d: (t, f)),
        out_shape=jax.ShapeDtypeStruct((s.num_tokens, s.out_dim), s.out_dtype),
        scratch_shapes=[pltpu.VMEM((b.block_t, b.block_f), _accumulator(s))],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_vmem_bytes(s),
        ),
        cost_estimate=estimate(count(s)),
        name="quantized_matmul",
    )(*operands)


def _kernel(x_ref, weight_ref, *refs, body: Any, schedule: Schedule):
    """One step of the grid: adds a block of D to the accumulator, and leaves the result after the last."""
    s = schedule
    *side_refs, out_ref, acc_ref = refs
    step, last = pl.program_id(2), s.grid[2] - 1

    @pl.when(step == 0)
    def _start():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def tile(index, _):
        columns = pl.ds(pl.multiple_of(index * s.blocks.tile_f, s.blocks.tile_f), s.blocks.tile_f)
        body(s, x_ref, weight_ref.at[columns], columns, side_refs, acc_ref.at[:, columns])
        return _

    lax.fori_loop(0, s.blocks.block_f // s.blocks.tile_f, tile, 0)

    @pl.when(step == last)
    def _finish():
        out = acc_ref[...].astype(jnp.float32)
        if s.per_channel:
            out = out * side_refs[0][...]
        if s.x_dtype == jnp.int8:
            out = out * side_refs[1][...]
        out_ref[...] = out.astype(out_ref.dtype)


def _per_channel(s: Schedule, x_ref, weight_ref, columns, side_refs, acc_ref):
    acc_ref[...] += _dot(x_ref[...], weight_ref[...].astype(x_ref.dtype))


def _scaled_sums(s: Schedule, x_ref, weight_ref, columns, side_refs, acc_ref):
    """Sums of each group by one product per chunk, then scaled in float32."""
    block_t, block_d = x_ref.shape
    scale_ref, *offset_refs = side_refs
    for start in range(0, block_d, s.blocks.chunk):
        size = min(s.blocks.chunk, block_d - start)
        x = x_ref[:, pl.ds(start, size)].astype(jnp.float32)
        group_of_lane = lax.broadcasted_iota(jnp.int32, x.shape, 1) // s.group
        parts = [jnp.where(group_of_lane == i, x, 0.0) for i in range(size // s.group)]
        spread = jnp.concatenate([part.astype(x_ref.dtype) for part in parts])  # [groups * block_t, size]
        sums = _dot(spread, weight_ref[:, pl.ds(start, size)].astype(x_ref.dtype))
        total = jnp.zeros((block_t, s.blocks.tile_f), jnp.float32)
        for i, part in enumerate(parts):
            row = pl.ds(start // s.group + i, 1)
            total += sums[i * block_t : (i + 1) * block_t] * scale_ref[row, columns]
            for offset_ref in offset_refs:
                total += part.sum(axis=1, keepdims=True) * offset_ref[row, columns]
        acc_ref[...] += total


def _scaled_weights(s: Schedule, x_ref, weight_ref, columns, side_refs, acc_ref):
    """Weights scaled in float32 and rounded to x's dtype, then a product for every PRODUCT_INPUTS of them."""
    tile_f, block_d = weight_ref.shape
    by_output = [ref[:, columns].T for ref in side_refs]  # f32[tile_f, groups of the block]

    def of_lanes(values: jax.Array, start: int, size: int) -> jax.Array:
        """f32[tile_f, size]: of each lane that of its group."""
        group_of_lane = lax.broadcasted_iota(jnp.int32, (tile_f, size), 1) // s.group
        first = start // s.group
        lanes = values[:, first : first + 1]
        for i in range(1, size // s.group):
            lanes = jnp.where(group_of_lane == i, values[:, first + i : first + i + 1], lanes)
        return lanes

    for product in range(0, block_d, PRODUCT_INPUTS):
        end = min(product + PRODUCT_INPUTS, block_d)
        widened = []
        for start in range(product, end, LANES):
            size = min(LANES, end - start)
            value = weight_ref[:, pl.ds(start, size)].astype(jnp.float32) * of_lanes(
                by_output[0], start, size
            )
            if s.has_offset:
                value = value + of_lanes(by_output[1], start, size)
            widened.append(value.astype(x_ref.dtype))
        acc_ref[...] += _dot(x_ref[:, pl.ds(product, end - product)], jnp.concatenate(widened, axis=1))


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [M, D] times the transposed b [N, D]: int8 in int32, float32 in float32 proper, bfloat16 in float32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32 if a.dtype == jnp.int8 else jnp.float32,
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
    )


def _accumulator(s: Schedule) -> Any:
    return jnp.int32 if s.x_dtype == jnp.int8 else jnp.float32


def _vmem_bytes(s: Schedule) -> int:
    """Of the two buffers of each block, the accumulator and the slack."""
    b = s.blocks
    bits = jax.dtypes.itemsize_bits
    buffers = b.block_t * b.block_d * bits(s.x_dtype) + b.block_f * b.block_d * bits(s.weight_dtype)
    buffers += b.block_t * b.block_f * bits(s.out_dtype)
    rows = (
        8 if s.per_channel else (1 + s.has_offset) * pl.cdiv(s.block_groups, 8) * 8
    )  # of scales, in sublanes
    buffers += rows * b.block_f * 32
    return 2 * buffers // 8 + b.block_t * b.block_f * 4 + VMEM_SLACK_BYTES
