"""Weights in int8: codes and products against numpy, and an LLM that runs on them.

The int32 sums of w8a8 are exact, so the oracle in float64 differs by the rounding of two scales and of the result:
a few units of 2**-24, relative.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import load
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from jaxinfer.llm import LLM
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.weights import quantization
from jaxinfer.weights.quantization import XLA, QuantizedTensor, quantize_leaf

RELATIVE = 2.0**-21
AXES = {  # logical axes, shape, the input axes
    "q_proj": (("q_heads", "head", "embed"), (4, 8, 24), (2,)),
    "o_proj": (("embed", "q_heads", "head"), (24, 4, 8), (1, 2)),
    "up_proj": (("mlp", "embed"), (40, 24), (1,)),
    "down_proj": (("embed", "mlp"), (24, 40), (1,)),
}


def random(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def codes_of(weight, in_axes):
    peak = np.abs(weight).max(axis=in_axes, keepdims=True)
    scale = np.where(peak > 0, peak / np.float32(127), np.float32(1))
    return np.rint(weight / scale), scale


@pytest.mark.parametrize("name", AXES)
def test_codes_are_the_nearest_with_one_scale_per_output(name):
    axes, shape, in_axes = AXES[name]
    weight = random(shape)
    weight[0] = 0  # an output without weight must not divide by zero
    tensor = quantize_leaf(axes, jnp.asarray(weight), "int8", "cpu")
    scale = np.asarray(tensor.scale).reshape(codes_of(weight, in_axes)[1].shape)
    assert (
        tensor.qvalue.dtype == jnp.int8 and tensor.shape == shape and tensor.group == tensor.qvalue.shape[1]
    )
    np.testing.assert_allclose(
        scale, codes_of(weight, in_axes)[1], rtol=2.0**-23
    )  # XLA multiplies by 1 / 127
    np.testing.assert_array_equal(tensor.qvalue.reshape(shape), np.rint(weight / scale))


@pytest.mark.parametrize("axes", [("embed",), ("head",), ("q_heads", "head"), ("vocab", "embed")])
def test_norms_biases_and_tables_stay(axes):
    leaf = jnp.ones((2,) * len(axes))
    assert quantize_leaf(axes, leaf, "int8", "cpu") is leaf


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("activations", ["int8", "bfloat16"])
@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu"])
def test_products_are_those_of_the_codes(name, activations, implementation):
    axes, shape, in_axes = AXES[name]
    weight, inner = random(shape, 1), shape[-len(in_axes) :]
    x = random((5, *inner), 2)
    tensor = quantize_leaf(axes, jnp.asarray(weight), activations, implementation)
    got = quantization.project(jnp.asarray(x), tensor, in_axes=len(in_axes), kernels=XLA)
    codes, scale = np.asarray(tensor.qvalue), np.asarray(tensor.scale)
    x_codes, x_scale = codes_of(x.reshape(5, -1), (1,))
    sums = x_codes.astype(np.float64) @ codes.reshape(-1, x_codes.shape[1]).T
    want = (sums * x_scale * scale.reshape(1, -1)).reshape(got.shape)
    np.testing.assert_allclose(got, want, rtol=RELATIVE, atol=1e-9)


def test_products_of_one_input_quantize_it_once():
    """XLA finds the equal parts of q, k and v, and of gate and up: `project` need not be told."""
    tensors = [
        quantize_leaf(("mlp", "embed"), jnp.asarray(random((40, 24), i)), "int8", "cpu") for i in range(3)
    ]
    x = jnp.asarray(random((5, 24), 4))
    compiled = (
        jax.jit(lambda x, tensors: [quantization.project(x, t, kernels=XLA) for t in tensors])
        .lower(x, tensors)
        .compile()
    )
    assert len(re.findall(r"= s8\[5,24\]\S* convert\(", compiled.as_text())) == 1


def grouped(rng, shape=(6, 2, 32), group=32):
    """A QuantizedTensor of groups with offsets in act order, and its value in float64."""
    outputs, inputs = shape[0], math.prod(shape[1:])
    codes, perm = rng.integers(-8, 8, (outputs, inputs)), rng.permutation(inputs)
    scale, offset = rng.normal(size=(2, outputs, inputs // group)).astype(np.float32)
    stored = codes * np.repeat(scale, group, 1).astype(np.float64) + np.repeat(offset, group, 1)
    value = np.empty_like(stored)
    value[:, perm] = stored
    tensor = QuantizedTensor(
        qvalue=jnp.asarray(codes, jnp.int4), scale=jnp.asarray(scale), offset=jnp.asarray(offset),
        perm=jnp.asarray(perm, jnp.int32), shape=shape, group=group, activations=None, implementation="reference",
    )  # fmt: skip
    return tensor, value


def test_groups_with_offsets_in_act_order_are_the_matrix():
    tensor, value = grouped(np.random.default_rng(0))
    x = random((3, 2, 32))
    got = quantization.project(jnp.asarray(x), tensor, in_axes=2, kernels=XLA)
    np.testing.assert_allclose(got, x.reshape(3, 64) @ value.T, rtol=1e-5, atol=1e-5)


def test_rows_of_an_embedding_in_codes_are_its_values():
    tensor, value = grouped(np.random.default_rng(1), shape=(6, 64))
    ids = jnp.asarray([5, 0, 0, 3])
    np.testing.assert_allclose(quantization.take(tensor, ids), value[ids], rtol=1e-6)


def test_the_leaf_names_the_kernel(monkeypatch):
    """`project` asks the implementation that stands in the leaf, whatever kernels plain matrices have."""
    asked = []
    monkeypatch.setattr(
        quantization,
        "quantized_matmul",
        lambda x, *_, implementation, **__: asked.append(implementation) or x,
    )
    for name in ("tpu", "gpu", "cpu"):
        tensor = quantize_leaf(("mlp", "embed"), jnp.ones((8, 8)), "int8", name)
        quantization.project(jnp.ones((2, 8)), tensor, kernels=XLA)
    assert asked == ["tpu", "gpu", "cpu"]


def open_llm(quantize, name="llama_gqa", **options):
    _, config, weights = load(name)
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "max_model_len": 32} | options
    return LLM(
        config=config, weights=weights, quantize=quantize, num_pages=8, decode_steps=1,
        background_compile=False, **options,
    )  # fmt: skip


def test_an_engine_runs_on_fewer_bytes_and_takes_new_weights():
    _, _, weights = load("llama_gqa")
    prompt, params = [5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
    with open_llm(None) as llm:
        whole = llm.plan.weights_bytes
        (plain,) = llm.generate([prompt], params, use_tqdm=False)
    with open_llm("w8a8") as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        leaves = jax.tree.leaves(llm.engine.weights)
        assert llm.plan.weights_bytes == sum(leaf.nbytes for leaf in leaves)
        tables = llm.engine.weights.embed.nbytes + llm.engine.weights.unembed.nbytes
        assert llm.plan.weights_bytes - tables < 0.35 * (whole - tables)
        programs = len(llm.engine.programs)
        llm.update_weights(jax.tree.map(lambda x: -x, weights))
        (other,) = llm.generate([prompt], params, use_tqdm=False)
        llm.update_weights(weights)
        (again,) = llm.generate([prompt], params, use_tqdm=False)
        assert len(llm.engine.programs) == programs
    assert other.prompt_logprobs != output.prompt_logprobs
    assert again.prompt_logprobs == output.prompt_logprobs
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    # Random weights of this size: int8 moves a log-probability by some hundredths, and never not at all.
    scores = [[next(iter(p.values())).logprob for p in o.prompt_logprobs[1:]] for o in (plain, output)]
    difference = np.abs(np.subtract(*scores))
    assert 0 < difference.max() < 0.3
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(weights))


@pytest.mark.parametrize(("name", "orders"), [("tpu", ((0, 1), None)), ("gpu", None), ("cpu", None)])
def test_only_the_tpu_kernel_needs_a_layout(name, orders):
    tensor = quantize_leaf(("mlp", "embed"), jnp.ones((8, 24)), "int8", name)
    found = quantization.formats({"w": tensor, "norm": jnp.ones(3)})
    if orders is None:
        assert found is None
    else:
        assert found["norm"] is None and found["w"].scale is None
        assert found["w"].qvalue.layout.major_to_minor == (0, 1)
    groups, _ = grouped(np.random.default_rng(0))
    found = quantization.formats(groups.replace(implementation=name))
    if orders is not None:
        assert found.scale.layout.major_to_minor == found.offset.layout.major_to_minor == (1, 0)


def test_codes_of_a_file_need_none():
    """A matrix in blocks beside its codes is of the CPU: it has no place of its own to ask for."""
    scale = jnp.ones((8, 1), jnp.float16)
    tensor = quantization.pack(jnp.ones((8, 32)), jnp.zeros((8, 1, 16), jnp.uint8), scale, None)
    assert quantization.formats({"w": tensor}) is None and quantization.placed(tensor) is tensor


def test_every_program_reads_codes_in_their_layout(monkeypatch):
    """With one that no compiler takes by itself: prefill, decode, score, and other weights."""
    prompt, params = [5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
    _, _, weights = load("llama_gqa")
    with open_llm("w8a8") as llm:
        (plain,) = llm.generate([prompt], params, use_tqdm=False)

    def transposed(self, sharding):
        place = sharding or SingleDeviceSharding(jax.devices()[0])
        return self.replace(qvalue=Format(Layout((1, 0)), place), scale=None)

    monkeypatch.setattr(QuantizedTensor, "formats", transposed)
    with open_llm("w8a8", compilation_cache_dir=None) as llm:
        for _ in range(2):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids
            assert output.prompt_logprobs == plain.prompt_logprobs
            assert llm.engine.weights.layers[0].q_proj.qvalue.format.layout.major_to_minor == (1, 0)
            llm.update_weights(weights)
        kinds = set()
        for program, executable in llm.engine.programs.compiled().items():
            kinds.add(program.kind)
            (formats, *_), _ = executable.input_formats
            if program.kind != "score":  # which reads no layer
                assert formats.layers[0].q_proj.qvalue.layout.major_to_minor == (1, 0)
        assert kinds == {"prefill", "decode", "score"}


def test_a_form_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ValueError, match=r"quantize='int3' must be one of w8a8"):
        open_llm("int3")
    with pytest.raises(TypeError, match="use quantize"):
        open_llm(None, quantization="awq")


def test_a_tree_of_codes_is_a_tree_of_weights():
    tensor = quantize_leaf(("mlp", "embed"), jnp.zeros((2, 3)), "int8", "cpu")
    doubled = jax.tree.map(lambda x: x * 2, tensor)
    assert doubled.activations == "int8" and doubled.implementation == "cpu" and doubled.scale[0, 0] == 2
