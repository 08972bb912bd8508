"""Factors of activations' channels: what they leave alone, what they save, and that a model needs none to run."""

import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import load

from jaxinfer import batch as batches
from jaxinfer import kv_cache as kv
from jaxinfer.checkpoints.loading import named_leaves
from jaxinfer.forward import forward
from jaxinfer.llm import LLM
from jaxinfer.weights import quantization, smoothing
from jaxinfer.weights.quantization import is_axes, quantize_leaf

NAMES = {"llama": "llama_gqa", "qwen3": "qwen3_mqa_head_dim24"}
PROMPT = list(range(3, 27))


def logits(module, config, weights):
    spec = kv.KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, 32, 2)
    batch = batches.pack([(PROMPT, 0, [1])], page_size=32)
    hidden, _ = forward(module, config, weights, kv.init(spec), batch)
    return np.asarray(module.unembed(config, weights, hidden))


def smoothed(module, config, weights):
    found = smoothing.factors(module, config, weights)
    return smoothing.apply(module, config, weights, "int8", "cpu", found)


def with_outliers(weights, channel=5, factor=60.0):
    """The same function, but for rounding: one channel of all that is smoothed is large, as in real models."""

    def change(layer):
        def scaled(norm, *matrices):
            return norm.at[channel].multiply(factor), *(w.at[..., channel].divide(factor) for w in matrices)

        attn_norm, q, k, v = scaled(layer.attn_norm, layer.q_proj, layer.k_proj, layer.v_proj)
        mlp_norm, gate, up = scaled(layer.mlp_norm, layer.gate_proj, layer.up_proj)
        up, down = up.at[channel].multiply(factor), layer.down_proj.at[:, channel].divide(factor)
        return layer.replace(
            attn_norm=attn_norm, q_proj=q, k_proj=k, v_proj=v,
            mlp_norm=mlp_norm, gate_proj=gate, up_proj=up, down_proj=down,
        )  # fmt: skip

    return weights.replace(layers=tuple(change(layer) for layer in weights.layers))


@pytest.mark.parametrize("kind", NAMES)
def test_factors_change_nothing_but_the_rounding(kind):
    """The leaves that a model file names together, multiplied in float32: float32's rounding of the logits is left."""
    module, config, weights = load(NAMES[kind])
    found = smoothing.factors(module, config, weights)
    axes = dict(named_leaves(module.logical_axes(config), is_leaf=is_axes))

    def multiplied(name, leaf):
        inputs, outputs = found.get(name, smoothing.Factors())
        in_axes = len(axes[name]) - 1 if axes[name][0] == "embed" else 1
        if inputs is not None:
            leaf = leaf * inputs.reshape(leaf.shape[-in_axes:])
        return leaf if outputs is None else leaf * outputs.reshape(-1, *(1,) * (leaf.ndim - 1))

    changed = [multiplied(name, leaf) for name, leaf in named_leaves(weights)]
    assert (
        sum(a is not b for a, b in zip(changed, jax.tree.leaves(weights), strict=True))
        == 8 * config.num_layers
    )
    changed = jax.tree.unflatten(jax.tree.structure(weights), changed)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(
            logits(module, config, changed), logits(module, config, weights), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("kind", NAMES)
def test_large_channels_cost_next_to_nothing(kind):
    """A channel 60 times as large costs some 6 bits of all others in its row; factors give them back."""
    module, config, weights = load(NAMES[kind])
    weights = with_outliers(weights)
    exact = logits(module, config, weights)

    def error(quantized):
        return np.abs(logits(module, config, quantized) - exact).mean()

    plain = error(quantization.quantize(weights, module.logical_axes(config), "int8", "cpu"))
    smooth = error(smoothed(module, config, weights))
    assert smooth < plain / 5


@pytest.mark.parametrize("kind", NAMES)
def test_matrices_of_k_and_v_stay_in_the_dtype_of_the_weights(kind):
    module, config, weights = load(NAMES[kind])
    layer = smoothing.apply(module, config, weights, "int8", "cpu", {}).layers[0]
    whole = {
        name
        for name, leaf in vars(layer).items()
        if leaf is not None and leaf is getattr(weights.layers[0], name)
    }
    assert {"k_proj", "v_proj", "attn_norm", "mlp_norm"} <= whole
    quantized = {name for name, leaf in vars(layer).items() if isinstance(leaf, quantization.QuantizedTensor)}
    assert quantized == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("kind", NAMES)
def test_sizes_are_of_what_matrices_multiply(kind):
    """The norms' channels are told by their weights: what reads them is multiplied by a unit vector times these."""
    module, config, weights = load(NAMES[kind])
    scale = np.linspace(0.5, 4, config.embed_dim, dtype=np.float32)
    layers = tuple(
        w.replace(attn_norm=jnp.asarray(scale), mlp_norm=jnp.asarray(scale)) for w in weights.layers
    )
    readers = ("q_proj", "gate_proj", "down_proj")
    sizes = smoothing._sizes(module, config, weights.replace(layers=layers), readers)
    assert len(sizes) == config.num_layers
    for layer in sizes:
        assert layer["down_proj"].shape == (config.mlp_dim,)
        for name in ("q_proj", "gate_proj"):
            # A norm leaves a mean square of 1 before its weights.
            np.testing.assert_allclose(np.mean((layer[name] / scale) ** 2), 1, rtol=1e-3)


def test_equal_weights_get_equal_codes():
    trees = [smoothed(*load("llama_gqa")) for _ in range(2)]
    for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_array_equal(a, b)


def test_codes_are_of_the_matrix_times_its_factors():
    rng = np.random.default_rng(0)
    weight, inputs, outputs = (
        rng.uniform(0.5, 2, shape).astype(np.float32) for shape in ((6, 8), (8,), (6,))
    )
    tensor = quantize_leaf(("mlp", "embed"), jnp.asarray(weight), "int8", "cpu", inputs, outputs)
    scale, want = np.asarray(tensor.scale), weight * inputs * outputs[:, None]
    np.testing.assert_allclose(scale[:, 0], np.abs(want).max(axis=1) / 127, rtol=1e-6)
    assert (np.abs(scale * tensor.qvalue - want) <= scale / 2 * (1 + 1e-5)).all()
    np.testing.assert_array_equal(
        quantize_leaf(("embed",), inputs, "int8", "cpu", None, inputs), inputs * inputs
    )


def test_a_model_file_without_groups_is_quantized_as_it_is():
    module, config, weights = load("llama_gqa")
    bare = types.ModuleType("bare")
    vars(bare).update(vars(module))
    bare.LEAVES = {name: replace(leaf, reads=None) for name, leaf in module.LEAVES.items()}
    with LLM(
        config=config, weights=weights, model_module=bare, quantize="w8a8", num_pages=8, max_model_len=32,
        max_num_seqs=2, max_num_batched_tokens=16, background_compile=False,
    ) as llm:  # fmt: skip
        want = quantization.quantize(weights, module.logical_axes(config), "int8", "cpu")
        assert (llm.engine.weights.layers[0].q_proj.qvalue == want.layers[0].q_proj.qvalue).all()
