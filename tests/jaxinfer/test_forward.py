"""How layers are run: the named strategies agree, also where layers differ in window, rope and KV group."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import load
from tiny_models import random_tokens

from jaxinfer import batch as batches
from jaxinfer import kv_cache as kv
from jaxinfer.forward import forward
from jaxinfer.models import spec
from jaxinfer.models.spec import Leaf

PROMPT = random_tokens("forward", 40)
PAGE_SIZE = 8


def variant(*attention, **fields):
    """Llama with a third layer: the attention of each has fields of these, and its config those."""
    model, config, weights = load("llama_gqa")
    config = config.with_layers(3)
    given = attention or ({},) * 3
    layers = [
        replace(layer, attention=replace(layer.attention, **its))
        for layer, its in zip(config.layers, given, strict=True)
    ]
    config = replace(config, layers=tuple(layers), **fields)
    return model, config, weights.replace(layers=(*weights.layers, weights.layers[0]))


def hidden(model, config, weights, implementation, strategy="auto", chunks=(17, 1, 22)):
    """Hidden states [T, D] of PROMPT, in chunks over scattered pages."""
    cache_spec = kv.KVCacheSpec(
        config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE, 9,
        implementation=implementation, layer_strategy=strategy,
    )  # fmt: skip
    assert cache_spec.strategy in ("one_loop", "unrolled")
    step, cache, start, out = jax.jit(partial(forward, model, config)), kv.init(cache_spec), 0, []
    for n in chunks:
        packed = batches.pack([(PROMPT[start : start + n], start, [7, 2, 8, 4, 1])], page_size=PAGE_SIZE)
        x, cache = step(weights, cache, packed)
        out.append(x)
        start += n
    return np.concatenate(out)


def assert_equal_hidden(got, want):
    # float32 sums of at most 128 terms in another order, states of about 1 after the norm
    np.testing.assert_allclose(got, want, atol=5e-5)


STRATEGIES = [("xla", "unrolled"), ("cpu", "one_loop"), ("cpu", "unrolled"), ("xla", "one_loop")]


@pytest.mark.parametrize(("implementation", "strategy"), STRATEGIES)
def test_windows_and_ropes_of_layers(implementation, strategy):
    """Layer 1 sees 5 tokens and turns twice as slowly; a window that is longer than the prompt changes nothing."""
    (rope,) = load("llama_gqa")[1].ropes
    slow = replace(rope, kind="linear", factor=2.0)

    def made(windows=(64, 5, None), ropes=(rope, slow), of_layers=(0, 1, 0)):
        attention = [{"window": w, "rope": r} for w, r in zip(windows, of_layers, strict=True)]
        return variant(*attention, ropes=ropes)

    with jax.default_matmul_precision("highest"):
        want = hidden(*made(), "reference", chunks=(len(PROMPT),))
        assert_equal_hidden(hidden(*made(), implementation, strategy), want)
        others = [made(windows) for windows in ((64, None, None), (64, 6, None), (5, None, None))]
        for other in (*others, made(ropes=(rope, rope)), made(of_layers=(0, 1, None))):
            assert np.abs(hidden(*other, implementation, strategy) - want).max() > 1e-2
        unturned = made(of_layers=(0, None, 1))
        want = hidden(*unturned, "reference", chunks=(len(PROMPT),))
        assert_equal_hidden(hidden(*unturned, implementation, strategy), want)


@pytest.mark.parametrize(("implementation", "strategy"), STRATEGIES)
def test_sinks_and_a_soft_cap(implementation, strategy):
    """The leaf of sinks is another in each layer."""
    model, config, weights = variant(*({"sinks": "sinks", "soft_cap": 2.0},) * 3)
    leaves = {**model.LEAVES, "sinks": Leaf("bias", "N", "model.layers.{layer}.sinks", "blk.{layer}.sinks")}
    given = [vars(w) | {"sinks": jnp.arange(4.0) - i} for i, w in enumerate(weights.layers)]
    layer_type = type(spec.init(leaves, config, jax.random.key(0)).layers[0])
    weights = weights.replace(layers=tuple(layer_type(**fields) for fields in given))
    with jax.default_matmul_precision("highest"):
        want = hidden(model, config, weights, "reference", chunks=(len(PROMPT),))
        assert_equal_hidden(hidden(model, config, weights, implementation, strategy), want)
        swapped = weights.replace(layers=tuple(w.replace(sinks=jnp.zeros(4)) for w in weights.layers))
        assert np.abs(hidden(model, config, swapped, implementation, strategy) - want).max() > 1e-2


def test_layers_that_one_attention_cannot_serve_are_refused():
    model, config, weights = variant(*({"soft_cap": float(1 + layer)} for layer in range(3)))
    with pytest.raises(NotImplementedError, match="layer_strategy='unrolled'"):
        hidden(model, config, weights, "cpu")
    want = hidden(model, config, weights, "reference")
    assert_equal_hidden(hidden(model, config, weights, "cpu", "unrolled"), want)


def test_an_unknown_strategy_is_refused_by_name():
    with pytest.raises(ValueError, match="layer_strategy='scan' must be one of unrolled, one_loop"):
        kv.KVCacheSpec(1, 1, 8, 4, 4, layer_strategy="scan")
