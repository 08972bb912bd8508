"""The planted-table model is what the sampling, stop and logprob tests stand on: the runtime must see its table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted import greedy, make_planted, next_logprobs, plant_chain, random_table
from tiny_models import write_hf

from jaxinfer import batch, checkpoints, kv_cache, models
from jaxinfer.forward import forward

pytestmark = pytest.mark.smoke
VOCAB = 96


def test_logits_are_the_rows_of_the_table(tmp_path):
    table = random_table(VOCAB, "planted")
    checkpoint = checkpoints.open_checkpoint(write_hf(tmp_path, *make_planted(table)))
    model = models.for_config(checkpoint.config)
    config = model.Config.from_hf(checkpoint.config)
    weights = checkpoints.load_weights(checkpoint, model, config, jnp.float32)
    spec = kv_cache.KVCacheSpec(
        config.num_layers, config.num_kv_heads, config.head_dim, 16, 4, implementation="xla"
    )
    prompt = [7, 3, 95, 3, 0]
    packed = batch.pack([(prompt, 0, [2])], page_size=16)
    with jax.default_matmul_precision("highest"):
        hidden, _ = forward(model, config, weights, kv_cache.init(spec), packed)
        logits = model.unembed(config, weights, hidden)
    # one product and one norm in float32: a few units in the last place of logits up to 8
    np.testing.assert_allclose(logits[: len(prompt)], table[prompt], atol=5e-6)


def test_chain_is_the_greedy_continuation():
    chain = [5, 9, 2, 40, 41, 5]
    table = plant_chain(random_table(VOCAB, "chain"), chain)
    assert greedy(table, 5, 5) == chain[1:]
    assert next_logprobs(table, 9).argmax() == 2 and np.isclose(np.exp(next_logprobs(table, 9)).sum(), 1)
    with pytest.raises(ValueError, match="two successors"):
        plant_chain(table, [1, 2, 1, 3])
