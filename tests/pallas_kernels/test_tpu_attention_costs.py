"""What the TPU attention kernel fetches and computes, on paper: no simulator, no device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels.ragged_paged_attention import tpu, tpu_costs
from jaxinfer.pallas_kernels.ragged_paged_attention.tpu_schedule import Blocks, cdiv, item_of, tile_of

LLAMA3_8B = (
    jax.ShapeDtypeStruct((1, 32, 128), jnp.bfloat16),  # q
    jax.ShapeDtypeStruct((1, 8, 128, 256), jnp.bfloat16),  # kv_pages: K 8, page_size 128
)


@pytest.mark.parametrize("kv_edge", [128, 256])
@pytest.mark.parametrize("sliding_window", [None, 1, 50, 300])
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 900), (40, 40), (37, 771), (300, 513), (512, 512)])
def test_every_visible_pair_is_computed_once_and_interior_blocks_need_no_mask(
    q_len, kv_len, page_size, sliding_window, kv_edge
):
    """Against the causal mask written out; also that no page is fetched of which nothing is seen."""
    blocks = Blocks(q_block=64, q_tile=16, kv_fetch=512, kv_block=256, kv_edge=kv_edge)
    queries, keys = np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len + 2 * 512)[None, :]
    visible = keys <= queries
    if sliding_window is not None:
        visible &= keys > queries - sliding_window
    covered = np.zeros(visible.shape, int)
    for block in range(cdiv(q_len, blocks.q_block)):
        item = item_of(kv_len, q_len, block, blocks, page_size, sliding_window)
        mine = visible[block * blocks.q_block : (block + 1) * blocks.q_block]
        for page in range(item.page_start, item.page_end):
            assert mine[:, page * page_size : (page + 1) * page_size].any()
        for fetch in range(item.num_fetches):
            base = item.page_start * page_size + fetch * blocks.kv_fetch
            for tile in range(cdiv(item.q_end - item.q_start, blocks.q_tile)):
                part = tile_of(item, fetch, tile, blocks, page_size, sliding_window)
                first = block * blocks.q_block + tile * blocks.q_tile
                rows = slice(first, min(first + blocks.q_tile, (block + 1) * blocks.q_block, q_len))
                for i in range(part.num_interior):
                    start = base + part.interior + i * blocks.kv_block
                    assert visible[rows, start : start + blocks.kv_block].all()
                    covered[rows, start : start + blocks.kv_block] += 1
                stop = min(part.interior, part.end)
                edges = [*range(part.start, stop, kv_edge), *range(part.rest, part.end, kv_edge)]
                for offset in edges:
                    assert 0 <= offset <= blocks.kv_fetch - kv_edge
                    covered[rows, base + offset : base + offset + kv_edge] += 1
    assert (covered[visible] == 1).all()
    assert covered.max() == 1


def test_least_by_hand():
    """Two queries at positions 1 and 2 see 2 + 3 tokens: N 32, H 128, K 8, two bytes each."""
    static = tpu.static_of(*LLAMA3_8B, is_decode=True, max_q_len=2)
    cost = tpu_costs.least(static, [2], [3])
    assert cost.flops == 4 * 128 * 32 * 5
    assert cost.bytes == 3 * 8 * 256 * 2 + 2 * 2 * 32 * 128 * 2


def test_a_path_costs_nothing_for_the_other_paths_rows():
    decode = tpu.static_of(*LLAMA3_8B, is_decode=True, max_q_len=64)
    prefill = tpu.static_of(*LLAMA3_8B, is_decode=False, max_q_len=64)
    assert tpu_costs.count(decode, [17, 0, 1], [100, 5, 0]) == (0, 0, 0)
    assert tpu_costs.count(prefill, [16, 1], [100, 100]) == (0, 0, 0)
