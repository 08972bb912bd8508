"""Bytes and FLOPs of the GPU kernels, counted from their own schedules, and the least that any kernel could need.

Bytes are those between device memory and the chip, the passes around the kernels included (q into tiles, merging of
splits, tokens back in order); a copy that would hit in L2 counts as if it did not. q and out have 2 bytes, K and V
kv_itemsize, with 4 more per token and kv head for each scale where that is 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.experimental import pallas as pl

from jaxinfer.pallas_kernels.ragged_paged_attention import gpu_decode, gpu_prefill

BYTES = 2  # of an element of q and out
F32_BYTES = 4


class Cost(NamedTuple):
    bytes: int
    flops: int  # of the two products, 2 per multiply-add
    transcendentals: int

    def as_estimate(self, times: int = 1) -> pl.CostEstimate:
        return pl.CostEstimate(
            flops=times * self.flops,
            bytes_accessed=times * self.bytes,
            transcendentals=times * self.transcendentals,
        )


def token_bytes(head_dim: int, kv_itemsize: int) -> int:
    """K and V of one token and kv head, and their scales."""
    return 2 * (head_dim * kv_itemsize + (F32_BYTES if kv_itemsize == 1 else 0))


def least(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    sliding_window: int | None = None,
    kv_itemsize: int = 2,
) -> Cost:
    """Each visible K and V read once per row, q read and out written once, no masked score computed."""
    moved = pairs = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        seen = np.arange(kv_len - q_len, kv_len) + 1  # kv tokens that each query sees
        resident = kv_len
        if sliding_window is not None:
            seen, resident = np.minimum(seen, sliding_window), min(kv_len, sliding_window + q_len - 1)
        pairs += int(seen.sum()) * num_q_heads
        moved += resident * num_kv_heads * token_bytes(head_dim, kv_itemsize)
        moved += 2 * q_len * num_q_heads * head_dim * BYTES
    return Cost(moved, 4 * pairs * head_dim, pairs)


def decode(
    schedule: gpu_decode.Schedule,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    sliding_window: int | None = None,
) -> Cost:
    """A decode call, from gpu_decode's grid and copies; every row has at most max_q_len query tokens."""
    s = schedule
    moved = scores = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        if not q_len or not kv_len:
            continue
        first_seen = 0 if sliding_window is None else max(kv_len - q_len - sliding_window + 1, 0)
        num_blocks = -(-kv_len // s.block_kv) - first_seen // s.block_kv
        splits = min(max(-(-num_blocks * s.block_kv // s.min_split_tokens), 1), s.num_splits)
        splits = -(-num_blocks // -(-num_blocks // splits))  # those that get a block
        if s.by_tma:
            copies = -(-kv_len // s.fetch_kv) - first_seen // s.fetch_kv
        else:  # unseen parts of a block cost a copy of the null page
            copies = num_blocks * s.block_kv // s.fetch_kv
        moved += copies * s.fetch_kv * token_bytes(s.head_dim, s.kv_itemsize)
        tile = q_len * s.group * s.head_dim
        moved += splits * tile * (BYTES + (BYTES if s.num_splits == 1 else F32_BYTES))  # q in, out away
        moved += 2 * tile * BYTES  # tokens back in order: read (of what was merged) and write
        scores += num_blocks * s.block_kv * s.tile_rows
    if s.num_splits > 1:  # merging reads every split of every row, used or not, and writes the merged
        tile = s.max_q_len * s.group * s.head_dim
        moved += s.num_rows * tile * (s.num_splits * F32_BYTES + BYTES)
    moved += 2 * s.num_splits * s.num_rows * s.tile_rows * F32_BYTES  # lse
    return Cost(s.num_kv_heads * moved, 4 * s.num_kv_heads * scores * s.head_dim, s.num_kv_heads * scores)


def prefill(
    schedule: gpu_prefill.Schedule,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    sliding_window: int | None = None,
) -> Cost:
    """A prefill call, from gpu_prefill's tiles, blocks and copies."""
    s = schedule
    moved = scores = 0

    def first_seen_from(position: np.ndarray) -> np.ndarray:
        return np.maximum(position - (sliding_window - 1), 0) if sliding_window else np.zeros_like(position)

    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        if not q_len or not kv_len:
            continue
        start = np.arange(0, q_len, s.tile_tokens)  # [tiles of the row]
        first_position = kv_len - q_len + start
        tokens = np.minimum(q_len - start, s.tile_tokens)
        first_seen = first_seen_from(first_position)
        end = -(-(first_position + tokens) // s.block_kv)
        fetched_end = np.minimum(end * s.block_kv, -(-kv_len // s.fetch_kv) * s.fetch_kv)
        fetched = fetched_end - first_seen // s.fetch_kv * s.fetch_kv
        moved += int(fetched.sum()) * token_bytes(s.head_dim, s.kv_itemsize)
        for warpgroup in range(s.compute_warpgroups):
            own_start = warpgroup * s.warpgroup_tokens
            own_tokens = np.clip(tokens - own_start, 0, s.warpgroup_tokens)
            own_position = first_position + own_start
            own_end = -(-(own_position + own_tokens) // s.block_kv)
            blocks = np.where(own_tokens > 0, own_end - first_seen_from(own_position) // s.block_kv, 0)
            scores += int(blocks.sum()) * s.block_kv * gpu_prefill.WGMMA_ROWS
    # q and out in tiles and in order: each is read and written by the pass, and once by the kernel
    tile_elements = s.num_tiles * s.compute_warpgroups * gpu_prefill.WGMMA_ROWS * s.head_dim
    moved += 4 * tile_elements * BYTES + 2 * sum(q_lens) * s.group * s.head_dim * BYTES
    moved += 2 * tile_elements // s.head_dim * F32_BYTES  # lse
    return Cost(s.num_kv_heads * moved, 4 * s.num_kv_heads * scores * s.head_dim, s.num_kv_heads * scores)


def estimate_decode(schedule: gpu_decode.Schedule, max_kv_len: int) -> pl.CostEstimate:
    """The compiler's hint for a call whose lengths are not known yet: every row half full, one token each."""
    rows = schedule.num_rows
    return decode(schedule, [1] * rows, [max(max_kv_len // 2, 1)] * rows).as_estimate()


def estimate_prefill(schedule: gpu_prefill.Schedule, num_tokens: int, max_kv_len: int) -> pl.CostEstimate:
    """The compiler's hint: all tokens in rows that end half full."""
    kv_len = max(max_kv_len // 2, 1)
    q_len = min(num_tokens, kv_len)
    return prefill(schedule, [q_len], [kv_len]).as_estimate(times=-(-num_tokens // q_len))
