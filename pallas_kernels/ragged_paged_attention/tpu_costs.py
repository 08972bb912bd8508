"""Bytes and FLOPs of the TPU kernel, counted from its own schedule, and the least that any kernel could need."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import pallas as pl

from jaxinfer.pallas_kernels.ragged_paged_attention.tpu_schedule import (
    LANES,
    Item,
    Static,
    cdiv,
    item_of,
    tile_of,
)


class Cost(NamedTuple):
    bytes: int  # between HBM and the chip
    flops: int  # of the two products, 2 per multiply-add
    transcendentals: int  # exponentials and tanh


def count(static: Static, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Cost:
    """What one path moves and computes for its rows: every page copy, every block, padding included.

    static is what `tpu.static_of` gives for the path. Rows of the other path and empty rows cost nothing.
    """
    rows = [
        _row(static, q_len, kv_len)
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
        if kv_len > 0 and q_len > 0 and (q_len <= static.max_q_len) == static.is_decode
    ]
    return Cost(*(sum(column) for column in zip(*rows, strict=True))) if rows else Cost(0, 0, 0)


def least(static: Static, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Cost:
    """Each visible K and V read once per row, q read and out written once, no masked score computed."""
    element = jax.dtypes.itemsize_bits(static.compute_dtype) // 8
    lane_bits = jax.dtypes.itemsize_bits(static.kv_dtype)
    window = static.sliding_window
    moved = flops = exponentials = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        seen = np.arange(kv_len - q_len, kv_len) + 1  # kv tokens that each query sees
        resident = kv_len
        if window is not None:
            seen, resident = np.minimum(seen, window), min(kv_len, window + q_len - 1)
        pairs = int(seen.sum()) * static.num_q_heads
        kv_bytes = 2 * static.head_dim * lane_bits // 8 + 8 * static.quantized
        moved += resident * static.num_kv_heads * kv_bytes
        moved += 2 * q_len * static.num_q_heads * static.head_dim * element
        flops += 4 * pairs * static.head_dim
        exponentials += pairs
    return Cost(moved, flops, exponentials * (1 if static.soft_cap is None else 2))


def estimate(static: Static, num_tokens: int, num_rows: int, max_kv_len: int) -> pl.CostEstimate:
    """The compiler's hint for a call whose lengths are not known yet: every row half full, and its tokens
    split evenly over as few rows as max_q_len allows (prefill), or one token per row (decode)."""
    kv_len = max(max_kv_len // 2, 1)
    q_len, rows = 1, num_rows
    if not static.is_decode:
        q_len = min(num_tokens, kv_len)
        rows = cdiv(num_tokens, q_len)
    one = _row(static, q_len, kv_len)
    return pl.CostEstimate(
        flops=rows * one.flops, transcendentals=rows * one.transcendentals, bytes_accessed=rows * one.bytes
    )


@functools.lru_cache(maxsize=4096)
def _row(static: Static, q_len: int, kv_len: int) -> Cost:
    blocks, page_size, window = static.blocks, static.page_size, static.sliding_window
    block = np.arange(cdiv(q_len, blocks.q_block))
    items = item_of(np.int64(kv_len), q_len, block, blocks, page_size, window)

    lane_bits = jax.dtypes.itemsize_bits(static.kv_dtype)
    page_bytes = static.num_kv_heads * page_size * cdiv(2 * static.head_dim, LANES) * LANES * lane_bits // 8
    if static.quantized:
        page_bytes += static.num_kv_heads * 2 * max(page_size, LANES) * 4  # a page's scales fill whole lanes
    element = jax.dtypes.itemsize_bits(static.compute_dtype) // 8
    token_bytes = static.num_q_heads * cdiv(static.head_dim, LANES) * LANES * element
    moved = int((items.page_end - items.page_start).sum()) * page_bytes + 2 * q_len * token_bytes
    if static.return_lse:
        moved += q_len * static.num_q_heads * LANES * 4

    # [blocks, fetches, tiles]
    fetch = np.arange(items.num_fetches.max())[None, :, None]
    tile = np.arange(static.num_tiles)[None, None, :]
    item = Item(*(np.broadcast_to(field, block.shape)[:, None, None] for field in items))
    part = tile_of(item, fetch, tile, blocks, page_size, window)
    runs = (fetch < item.num_fetches) & (tile * blocks.q_tile < item.q_end - item.q_start)
    before = np.maximum(np.minimum(part.interior, part.end) - part.start, 0) // blocks.kv_edge
    after = np.maximum(part.end - part.rest, 0) // blocks.kv_edge
    columns = (before + after) * blocks.kv_edge + part.num_interior * blocks.kv_block
    scores = int((columns * runs).sum()) * static.tile_rows * static.num_kv_heads
    return Cost(moved, 4 * scores * static.width, scores * (1 if static.soft_cap is None else 2))
