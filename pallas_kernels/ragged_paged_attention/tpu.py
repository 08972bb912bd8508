"""ragged_paged_attention for TPU (Pallas Mosaic): a decode and a prefill path over one kernel body.

`tpu_kernel.py` is the body, `tpu_schedule.py` what it fetches and computes, `tuning.py` the block sizes,
`tpu_costs.py` the count of bytes and FLOPs. Rows of at most 16 query tokens take the decode path (all their queries at
once, pages streamed past them), longer ones the prefill path (blocks of queries); a program for max_q_len > 16 is
two kernel calls, of which the second writes into the first's output.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.pallas_kernels.ragged_paged_attention import tpu_costs, tuning
from jaxinfer.pallas_kernels.ragged_paged_attention.tpu_kernel import attention_kernel
from jaxinfer.pallas_kernels.ragged_paged_attention.tpu_schedule import LANES, Blocks, Static

SMEM_BYTES = 1 << 20  # scalar memory of every TPU core so far
SMEM_RESERVED_BYTES = 32 << 10  # what the compiler keeps for itself, with room to spare
VMEM_SLACK_BYTES = 16 << 20  # for values that do not stay in registers


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
    decode_blocks: Blocks | None = None,
    prefill_blocks: Blocks | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See the package's docstring. Blocks left None come from `tuning`.

    Products of bfloat16 queries take bfloat16 inputs (pages widened or narrowed to it); of float32, float32 ones.
    Raises NotImplementedError for float16, page sizes that are no whole number of tiles, and page tables that
    do not fit in scalar memory.
    """
    _refuse(q, kv_pages, page_table)
    out, lse = None, None
    for is_decode in (True, False) if max_q_len > tuning.DECODE_MAX_Q_LEN else (True,):
        static = static_of(
            q,
            kv_pages,
            is_decode=is_decode,
            max_q_len=max_q_len,
            blocks=decode_blocks if is_decode else prefill_blocks,
            sm_scale=sm_scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            return_lse=return_lse,
        )
        sinks = None if sink_logits is None else _sinks_of_rows(sink_logits, static)
        scalars = (page_table.reshape(-1), kv_lens, cu_q_lens, distribution)
        out, lse = _call(static, scalars, q, kv_pages, kv_scales, sinks, out, lse)
    assert out is not None
    return out if lse is None else (out, lse[:, :, 0])


def static_of(
    q: jax.ShapeDtypeStruct | jax.Array,
    kv_pages: jax.ShapeDtypeStruct | jax.Array,
    *,
    is_decode: bool,
    max_q_len: int,
    blocks: Blocks | None = None,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
) -> Static:
    """What one path is compiled for. Only shapes and dtypes of q and kv_pages are read."""
    _, num_q_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = kv_pages.shape
    if blocks is None:
        rule = tuning.decode_blocks if is_decode else tuning.prefill_blocks
        blocks = rule(page_size, num_q_heads, num_kv_heads, head_dim, kv_pages.dtype, max_q_len)
    return Static(
        is_decode=is_decode,
        max_q_len=min(max_q_len, tuning.DECODE_MAX_Q_LEN),
        blocks=blocks,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        compute_dtype=jnp.dtype(q.dtype),
        kv_dtype=jnp.dtype(kv_pages.dtype),
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        return_lse=return_lse,
    )


def _refuse(q: jax.Array, kv_pages: jax.Array, page_table: jax.Array) -> None:
    page_size = kv_pages.shape[2]
    for name, array in (("q", q), ("kv_pages", kv_pages)):
        if array.dtype == jnp.float16:
            raise NotImplementedError(
                f"{name} is float16, which the TPU kernel lacks: use bfloat16 or float32, or implementation 'xla'"
            )
    dtype = jnp.dtype(kv_pages.dtype)
    tile = 8 * 32 // jax.dtypes.itemsize_bits(dtype)
    if page_size % tile:
        raise NotImplementedError(
            f"page_size is {page_size} but {dtype.name} pages on TPU need a multiple of {tile}; "
            "or use implementation 'xla'"
        )
    if max(page_size, LANES) % min(page_size, LANES):
        raise NotImplementedError(
            f"page_size is {page_size} but the TPU kernel needs a divisor or a multiple of {LANES}; "
            "or use implementation 'xla'"
        )
    num_rows, pages_per_row = page_table.shape
    smem_bytes = 4 * (num_rows * pages_per_row + 2 * num_rows + 4)
    limit = SMEM_BYTES - SMEM_RESERVED_BYTES
    if smem_bytes > limit:
        raise NotImplementedError(
            f"page_table of {num_rows} rows x {pages_per_row} pages, kv_lens and cu_q_lens need {smem_bytes} bytes of "
            f"scalar memory but {limit} are free: use fewer rows, or pages of more than {page_size} tokens"
        )


def _sinks_of_rows(sink_logits: jax.Array, static: Static) -> jax.Array:
    """f32[N] -> f32[K, R, LANES]: the sink of each row of a tile, in the path's order of rows."""
    by_head = sink_logits.reshape(static.num_kv_heads, 1, static.group)
    rows = jnp.broadcast_to(by_head, (static.num_kv_heads, static.blocks.q_tile, static.group))
    if not static.is_decode:
        rows = rows.transpose(0, 2, 1)
    rows = rows.reshape(static.num_kv_heads, -1)
    rows = jnp.pad(rows, ((0, 0), (0, static.tile_rows - rows.shape[1])))
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))


@functools.partial(jax.jit, static_argnums=0)
def _call(
    static: Static,
    scalars: tuple[jax.Array, ...],  # page_table i32[B * P], kv_lens, cu_q_lens, distribution
    q: jax.Array,
    kv_pages: jax.Array,
    kv_scales: jax.Array | None,
    sinks: jax.Array | None,  # f32[K, R, LANES]
    out: jax.Array | None,  # [T, N, H], and lse f32[T, N, LANES], of the other path, to be written into;
    lse: jax.Array | None,  # None: this is the first
) -> tuple[jax.Array, jax.Array | None]:
    """One path over its rows."""
    blocks, num_kv_heads, head_dim = static.blocks, static.num_kv_heads, static.head_dim
    q_block = (2, blocks.q_block, static.num_q_heads, head_dim)
    lse_block = (*q_block[:3], LANES)
    state = (num_kv_heads, static.num_tiles, static.tile_rows)
    # float32 where a row of G queries is stored at any sublane, which packed types do not allow
    fold_dtype = jnp.float32 if static.is_decode else q.dtype
    scratch: list[tuple[tuple[int, ...], Any] | None] = [
        (q_block, q.dtype),
        ((2, num_kv_heads, blocks.kv_fetch, 2 * head_dim), kv_pages.dtype),
        ((2, blocks.kv_fetch // static.page_size, num_kv_heads, 2, static.page_size), jnp.float32)
        if static.quantized
        else None,
        (q_block, q.dtype),
        (lse_block, jnp.float32) if static.return_lse else None,
        ((blocks.q_tile, static.num_q_heads, head_dim), jnp.float32),
        ((*state, static.width), fold_dtype),
        ((*state, LANES), jnp.float32),
        ((*state, LANES), jnp.float32),
        ((*state, static.width), jnp.float32),
    ]
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if static.return_lse:
        results.append(jax.ShapeDtypeStruct((*q.shape[:2], LANES), jnp.float32))
    operands = [*scalars, q, kv_pages, kv_scales, sinks, out, lse]
    present = [x is not None for x in operands]
    aliases = {}
    if out is not None:  # the last operands become the results
        aliases = {sum(present) - len(results) + i: i for i in range(len(results))}
    present += [True, static.return_lse, *(buffer is not None for buffer in scratch), True, True]
    buffers = [buffer for buffer in scratch if buffer is not None]
    anywhere, on_chip = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    arrays = [(q, anywhere), (kv_pages, anywhere), (kv_scales, anywhere), (sinks, on_chip), (out, anywhere)]
    arrays.append((lse, anywhere))
    max_kv_len = scalars[0].size // scalars[1].size * static.page_size
    outputs = pl.pallas_call(
        functools.partial(_with_absent, static, tuple(present)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[spec for x, spec in arrays if x is not None],
            out_specs=[anywhere] * len(results),
            scratch_shapes=[
                *(pltpu.VMEM(*buffer) for buffer in buffers),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((4, 2)),
            ],
        ),
        out_shape=results,
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=sum(_padded_bytes(*buffer) for buffer in buffers) + VMEM_SLACK_BYTES
        ),
        cost_estimate=tpu_costs.estimate(static, q.shape[0], scalars[1].size, max_kv_len),
        name="ragged_paged_attention_" + ("decode" if static.is_decode else "prefill"),
    )(*(x for x in operands if x is not None))
    return outputs[0], outputs[1] if static.return_lse else None


def _with_absent(static: Static, present: tuple[bool, ...], *refs: Any) -> None:
    """attention_kernel with None in the place of every ref that this program does not have."""
    remaining = iter(refs)
    attention_kernel(*(next(remaining) if here else None for here in present), static=static)


def _padded_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of a buffer in vector memory, whose last two axes are padded to whole tiles."""
    bits = jax.dtypes.itemsize_bits(dtype)
    sublanes = 8 * 32 // bits
    *leading, rows, lanes = shape
    count = -(-rows // sublanes) * sublanes * -(-lanes // LANES) * LANES
    for size in leading:
        count *= size
    return count * bits // 8
