"""kv_append for TPU (Pallas Mosaic): read, patch and write back the tiles that hold the new slots, in place.

A TPU copies whole tiles (8 sublanes of 32 bits; 16 tokens of bfloat16), so one slot cannot be written alone.
Tokens in consecutive slots of one tile form a run. Runs are taken in batches whose tiles differ: all tiles of
a batch are fetched together, patched, and written back together. A run that fills its tile is not fetched.
Scales are patched by the same kernel along their last axis, where a tile is one page's row of scales.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.pallas_kernels.kv_append.reference import quantize

LANES = 128
SMEM_BYTES = 1 << 20  # scalar memory of every TPU core so far
SMEM_RESERVED_BYTES = 16 << 10  # what the compiler keeps for itself, with room to spare
BUFFER_BYTES = 4 << 20  # of vector memory, for the tiles and sources of one batch
MAX_BATCH_RUNS = 32


def kv_append(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [num_pages, K, page_size, 2H]
    kv_scales: jax.Array | None,  # f32[num_pages, K, 2, page_size]
    slot_mapping: jax.Array,  # i32[T]
) -> tuple[jax.Array, jax.Array | None]:
    """See the package's docstring. Tokens with a slot in the null page are not written at all: nothing reads it.

    Raises NotImplementedError for float16 pages, for page sizes that are no whole number of tiles, and for
    more tokens than fit in scalar memory.
    """
    page_size = kv_pages.shape[2]
    tile = tile_tokens(kv_pages.dtype)
    _refuse(k.shape[0], page_size, kv_pages.dtype)
    if kv_scales is None:
        kv = jnp.concatenate([k, v], axis=-1).astype(kv_pages.dtype)  # [T, K, 2H]
    else:
        k, k_scales = quantize(k, kv_pages.dtype)  # [T, K, H], f32[T, K]
        v, v_scales = quantize(v, kv_pages.dtype)
        kv = jnp.concatenate([k, v], axis=-1)
        new_scales = jnp.stack([k_scales, v_scales]).transpose(2, 0, 1)  # f32[K, 2, T]
        kv_scales = _patch(new_scales, kv_scales, slot_mapping, token_axis=3, group=page_size, align=LANES)
    kv = kv.transpose(1, 0, 2)  # [K, T, 2H]: tokens of one head in neighbouring sublanes, as in a page
    return _patch(kv, kv_pages, slot_mapping, token_axis=2, group=tile, align=tile), kv_scales


def tile_tokens(dtype: Any) -> int:
    """Tokens (sublanes) in one tile of kv_pages: 8 for float32, 16 for bfloat16, 32 for 8 bits, 64 for int4."""
    return 8 * 32 // jax.dtypes.itemsize_bits(dtype)


def _refuse(num_tokens: int, page_size: int, dtype: Any) -> None:
    if dtype == jnp.float16:
        raise NotImplementedError(
            "kv_pages is float16, which the TPU kernel lacks: use bfloat16 or float32, or implementation 'xla'"
        )
    tile = tile_tokens(dtype)
    if page_size % tile:
        raise NotImplementedError(
            f"page_size is {page_size} but {jnp.dtype(dtype).name} pages on TPU need a multiple of {tile}; "
            "or use implementation 'xla'"
        )
    smem_bytes = 2 * 4 * num_tokens  # slot_mapping and run_ends
    limit = SMEM_BYTES - SMEM_RESERVED_BYTES
    if smem_bytes > limit:
        raise NotImplementedError(
            f"{num_tokens} tokens need {smem_bytes} bytes of scalar memory but {limit} are free: "
            f"append at most {limit // 8} tokens per call"
        )


@functools.partial(jax.jit, static_argnames=("token_axis", "group", "align"))
def _patch(
    source: jax.Array,  # pages: [K, T, 2H]; scales: f32[K, 2, T]
    target: jax.Array,  # kv_pages or kv_scales
    slot_mapping: jax.Array,  # i32[T]
    *,
    token_axis: int,  # of target: 2 for pages, 3 for scales
    group: int,  # tokens read and written at once
    align: int,  # tokens between the places where a copy from source may begin
) -> jax.Array:
    """target with source's tokens in their slots; group by group, in place."""
    num_tokens = slot_mapping.shape[0]
    page_size = target.shape[token_axis]
    window = align + _round_up(group, align)  # holds `group` tokens from any place on
    padding = [(0, 0)] * source.ndim
    padding[token_axis - 1] = (0, _round_up(num_tokens, align) + window - num_tokens)
    source = jnp.pad(source, padding)  # so that the last window is whole

    # run_ends[t]: the token after the run that token t is in
    starts = (slot_mapping != jnp.roll(slot_mapping, 1) + 1) | (slot_mapping % group == 0)  # bool[T]
    next_start = jnp.where(starts, jnp.arange(num_tokens, dtype=jnp.int32), num_tokens)
    next_start = lax.cummin(next_start, reverse=True)
    run_ends = jnp.append(next_start[1:], jnp.int32(num_tokens))  # i32[T]

    tile_shape = list(target.shape[1:])
    tile_shape[token_axis - 1] = group
    window_shape = list(tile_shape)
    window_shape[token_axis - 1] = window
    run_bytes = sum(_padded_bytes(shape, target.dtype) for shape in (tile_shape, window_shape))
    batch_runs = max(1, min(MAX_BATCH_RUNS, num_tokens, BUFFER_BYTES // run_bytes))

    kernel = functools.partial(
        _kernel,
        page_size=page_size,
        token_axis=token_axis,
        group=group,
        align=align,
        window=window,
        batch_runs=batch_runs,
    )
    moved = 2 * num_tokens * run_bytes  # every token its own run: the worst case
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((batch_runs, *tile_shape), target.dtype),
                pltpu.VMEM((batch_runs, *window_shape), target.dtype),
                pltpu.SMEM((batch_runs,), jnp.int32),  # first token of each run
                pltpu.SemaphoreType.DMA((3, batch_runs)),  # tile in, window in, tile out
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(target.shape, target.dtype),
        input_output_aliases={3: 0},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        name="kv_append_pages" if token_axis == 2 else "kv_append_scales",
    )(slot_mapping, run_ends, source, target)


def _kernel(
    slots,  # i32[T]
    run_ends,  # i32[T]
    source,  # HBM
    _target,  # target as input: the same memory as target
    target,  # HBM
    tiles,  # VMEM [batch_runs, ...group...]
    windows,  # VMEM [batch_runs, ...window...]
    firsts,  # SMEM i32[batch_runs]
    sems,
    *,
    page_size: int,
    token_axis: int,
    group: int,
    align: int,
    window: int,
    batch_runs: int,
):
    num_tokens = slots.shape[0]

    def target_tile(slot):
        if group == page_size:
            return target.at[slot // page_size]
        start = pl.multiple_of(slot % page_size // group * group, group)
        return target.at[slot // page_size, :, pl.ds(start, group), :]

    def source_window(token):
        tokens = pl.ds(pl.multiple_of(token // align * align, align), window)
        return source.at[:, tokens, :] if token_axis == 2 else source.at[:, :, tokens]

    def fills_tile(token):
        return run_ends[token] - token == group

    def tile_in(run, token):
        return pltpu.make_async_copy(target_tile(slots[token]), tiles.at[run], sems.at[0, run])

    def window_in(run, token):
        return pltpu.make_async_copy(source_window(token), windows.at[run], sems.at[1, run])

    def tile_out(run, token):
        return pltpu.make_async_copy(tiles.at[run], target_tile(slots[token]), sems.at[2, run])

    def gather(state):
        """Starts the copies of one more run, or skips a token of the null page."""
        token, count, _ = state
        slot = slots[token]
        live = slot >= page_size
        taken = lax.fori_loop(
            0, count, lambda run, found: found | (slots[firsts[run]] // group == slot // group), False
        )
        start = live & ~taken

        @pl.when(start)
        def begin():
            firsts[count] = token
            window_in(count, token).start()

            @pl.when(~fills_tile(token))
            def fetch():
                tile_in(count, token).start()

        next_token = jnp.where(live, jnp.where(taken, token, run_ends[token]), token + 1)
        return next_token, count + start.astype(jnp.int32), live & taken

    def patch(run, carry):
        token = firsts[run]
        window_in(run, token).wait()

        @pl.when(~fills_tile(token))
        def wait_for_tile():
            tile_in(run, token).wait()

        offset = slots[token] % group
        axis = token_axis - 1
        # widened: a rotation takes 32-bit lanes, and all page dtypes pass through float32 unchanged
        new = pltpu.roll(windows[run].astype(jnp.float32), (offset - token % align) % window, axis)
        new = lax.slice_in_dim(new, 0, group, axis=axis)
        places = lax.broadcasted_iota(jnp.int32, new.shape, axis)
        mine = (places >= offset) & (places < offset + run_ends[token] - token)
        old = tiles[run].astype(jnp.float32)
        tiles[run] = jnp.where(mine, new, old).astype(tiles.dtype)
        tile_out(run, token).start()
        return carry

    def batch(token):
        token, count, _ = lax.while_loop(
            lambda s: (s[0] < num_tokens) & (s[1] < batch_runs) & ~s[2], gather, (token, jnp.int32(0), False)
        )
        lax.fori_loop(0, count, patch, 0)
        lax.fori_loop(0, count, lambda run, carry: (tile_out(run, firsts[run]).wait(), carry)[1], 0)
        return token

    lax.while_loop(lambda token: token < num_tokens, batch, jnp.int32(0))


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _padded_bytes(shape: list[int], dtype: Any) -> int:
    """Bytes of a buffer whose last two axes are padded to whole tiles."""
    tile = tile_tokens(dtype)
    rows = _round_up(shape[-2], tile) // tile
    lanes = _round_up(shape[-1], LANES)
    leading = 1
    for size in shape[:-2]:
        leading *= size
    return leading * rows * lanes * 32  # a tile's row of lanes: 8 sublanes of 4 bytes
