"""Distance to the limit, on paper: Llama-3-8B on v6e and H200, every batch and context of the table."""

import pytest

from jaxinfer.pallas_kernels.ragged_paged_attention.distance import BATCHES, CONTEXTS, PAGE_SIZE, distance


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("chip", PAGE_SIZE)
def test_decode_moves_and_prefill_computes_little_more_than_the_least(chip: str, batch: int, context: int):
    ratios = distance(chip, batch, context)
    assert min(ratios) >= 1.0  # nothing is left uncounted
    assert ratios.decode_bytes <= 1.10
    assert ratios.prefill_flops <= 1.15
