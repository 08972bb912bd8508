"""What the GPU kernels move and compute, on paper: no simulator, no device. H200 is in test_attention_distance.py."""

import pytest

from jaxinfer.pallas_kernels.ragged_paged_attention import gpu_costs, gpu_decode, gpu_prefill
from jaxinfer.pallas_kernels.ragged_paged_attention.distance import (
    BATCHES,
    CONTEXTS,
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    lengths,
)


@pytest.mark.parametrize("kv_itemsize", [2, 1])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0), (8, 0), (8, 9)], ids=str)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_decode_moves_at_most_a_tenth_more_than_the_least(
    batch: int, context: int, capability: tuple[int, int], kv_itemsize: int
):
    kv_lens = lengths(batch, context)
    page_size = 16 if kv_itemsize == 2 else 64
    schedule = gpu_decode.make_schedule(
        batch,
        3 * context // 2 // page_size,
        NUM_KV_HEADS,
        NUM_Q_HEADS // NUM_KV_HEADS,
        HEAD_DIM,
        page_size,
        1,
        kv_itemsize,
        capability,
    )
    cost = gpu_costs.decode(schedule, [1] * batch, kv_lens)
    least = gpu_costs.least(
        NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, [1] * batch, kv_lens, kv_itemsize=kv_itemsize
    )
    assert 1.0 <= cost.bytes / least.bytes <= 1.10


def test_a_window_bounds_what_is_read_and_computed():
    schedule = gpu_decode.make_schedule(1, 512, 1, 4, 256, 16, 1, 2, (9, 0))
    whole = gpu_costs.decode(schedule, [1], [8192])
    windowed = gpu_costs.decode(schedule, [1], [8192], sliding_window=512)
    assert windowed.flops == whole.flops * 512 // 8192
    assert windowed.bytes < whole.bytes / 8
    tiles = gpu_prefill.make_schedule(4096, 1, 1, 4, 256, 16, 2)
    windowed = gpu_costs.prefill(tiles, [4096], [4096], sliding_window=512)
    # 16 tokens of a warpgroup see 527 positions, which lie in at most 10 blocks of 64
    assert windowed.flops <= 4096 // 16 * 10 * 64 * 64 * 4 * 256
