"""Model files against transformers' logits, and the contract that every model file keeps."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, checksum, make_tiny

from jaxinfer import batch as batches
from jaxinfer import checkpoints, models
from jaxinfer import kv_cache as kv
from jaxinfer.checkpoints import huggingface
from jaxinfer.checkpoints.loading import weight_leaves
from jaxinfer.forward import forward
from jaxinfer.models.rope import RopeConfig, rope_frequencies
from jaxinfer.models.spec import hf_names

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny"
# Logits of these models reach about 30; float32 sums of a few hundred terms in another order differ by
# about 30 * 2**-24 * sqrt(500) = 4e-5.
LOGITS_ATOL = 1e-4


@pytest.fixture(params=CONFIGS)
def tiny(request, tmp_path):
    """(golden values, model module, config, weights) of one tiny model."""
    from tiny_models import write_hf

    hf, tensors = make_tiny(request.param)
    golden = np.load(GOLDEN / f"{request.param}.npz")
    assert checksum(tensors) == golden["checksum"], "the generator of the weights has drifted"
    checkpoint = huggingface.open_checkpoint(write_hf(tmp_path, hf, tensors))
    model = models.for_config(checkpoint.config)
    config = model.Config.from_hf(checkpoint.config)
    return golden, model, config, checkpoints.load_weights(checkpoint, model, config, jnp.float32)


def run(model, config, weights, ids, chunks, implementation):
    """Logits [T, V] of `ids` computed in chunks of the given lengths over scattered pages of 16 tokens."""
    spec = kv.KVCacheSpec(
        config.num_layers, config.num_kv_heads, config.head_dim, 16, 12, implementation=implementation
    )
    cache, pages, start, logits = kv.init(spec), [7, 2, 9, 4, 11], 0, []
    step = jax.jit(partial(forward, model, config), donate_argnums=1)
    for n in chunks:
        packed = batches.pack([(ids[start : start + n], start, pages)], page_size=16)
        hidden, cache = step(weights, cache, packed)
        logits.append(model.unembed(config, weights, hidden))
        start += n
    return np.concatenate(logits)


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu"])
def test_logits_equal_transformers(tiny, implementation):
    golden, model, config, weights = tiny
    with jax.default_matmul_precision("highest"):
        short = run(model, config, weights, golden["short_prompt"], [24], implementation)
        # A chunk, a decode step and a chunk across page edges: the same forward on other data.
        long = run(model, config, weights, golden["long_prompt"], [33, 1, 36], implementation)
    np.testing.assert_allclose(short, golden["short_logits"], atol=LOGITS_ATOL)
    np.testing.assert_allclose(long[golden["long_positions"]], golden["long_logits"], atol=LOGITS_ATOL)


@pytest.mark.parametrize("kind", models.MODELS)
def test_every_model_file_keeps_the_contract(kind):
    model = models.MODELS[kind]
    hf = CONFIGS["llama_gqa"] | {"model_type": kind, "architectures": list(model.ARCHITECTURES[:1])}
    config = model.Config.from_hf(hf)
    assert models.for_config(hf) is model and models.module_of(config) is model
    assert hash(config) == hash(model.Config.from_hf(hf))
    leaves, _ = weight_leaves(model, config)
    axes = jax.tree.leaves_with_path(
        model.logical_axes(config),
        is_leaf=lambda x: isinstance(x, tuple) and all(isinstance(a, str) for a in x),
    )
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in axes}
    assert {name: len(leaf.shape) for name, leaf in leaves.items()} == {n: len(a) for n, a in named.items()}
    patterns = {pattern.replace("{layer}", str(i)) for pattern in hf_names(model.LEAVES) for i in (0, 1)}
    assert set(leaves) <= patterns, "a leaf that no checkpoint tensor can fill"
    own = [model.LEAVES[name] for name in {name.rpartition(".")[2] for name in leaves}]
    for names in ([(leaf.hf, leaf.place) for leaf in own], [(leaf.gguf, leaf.place) for leaf in own]):
        assert len(set(names)) == len(names), "two leaves are filled by one tensor"
    assert {leaf.reads for leaf in model.LEAVES.values()} <= {None, *model.LEAVES}


@pytest.mark.parametrize("kind", models.MODELS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 30.0),
        ("hidden_act", "relu2"),
        ("rope_scaling", {"rope_type": "ntk", "factor": 4.0}),
        ("num_experts", 8),
    ],
)
def test_a_key_that_changes_the_mathematics_is_refused_by_name(kind, key, value):
    hf = {**CONFIGS["llama_gqa"], "model_type": kind, key: value}
    with pytest.raises(ValueError, match=key if key != "rope_scaling" else "ntk"):
        models.MODELS[kind].Config.from_hf(hf)


def test_a_missing_key_is_named():
    hf = {k: v for k, v in CONFIGS["llama_gqa"].items() if k != "hidden_size"}
    with pytest.raises(ValueError, match="hidden_size"):
        models.llama.Config.from_hf(hf)


def test_an_unknown_model_type_is_refused_by_name():
    with pytest.raises(ValueError, match="mamba"):
        models.for_config({"model_type": "mamba"})


def test_rope_factors_of_a_gguf_file_equal_the_llama3_rule():
    """GGUF stores the llama3 rule as divisors; both forms must give the same frequencies."""
    from tiny_models import llama3_rope_factors

    hf = CONFIGS["llama_rope_llama3"]
    by_rule = rope_frequencies(models.llama.Config.from_hf(hf).ropes[0])
    factors = tuple(float(x) for x in llama3_rope_factors(hf))
    by_factors = rope_frequencies(RopeConfig(hf["rope_theta"], hf["head_dim"], "factors", factors=factors))
    np.testing.assert_allclose(by_rule, by_factors, rtol=1e-6)


def test_angles_are_computed_once_for_all_layers(tiny):
    """On CPU, where XLA would compute them again in every fusion that reads the table."""
    _, model, config, weights = tiny
    spec = kv.KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, 16, 3)
    packed = batches.pack([(range(3, 19), 0, [1])], page_size=16)
    lowered = jax.jit(partial(forward, model, config)).lower(weights, kv.init(spec), packed)
    text = lowered.compile().as_text()
    assert text.count(" cosine(") == text.count(" sine(") == 1
