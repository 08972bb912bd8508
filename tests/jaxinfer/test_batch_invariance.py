"""`batch_invariant=True`: a request gets the same bits whatever runs beside it and however it is cut up."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import load
from tiny_models import random_tokens

from jaxinfer.checkpoints import fetch
from jaxinfer.llm import LLM
from jaxinfer.models import layers, llama
from jaxinfer.models.rope import RopeConfig
from jaxinfer.models.spec import LayerSpec
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.tiles import TILE, map_tiles
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.weights.quantization import Kernels

# Every model file and dtype once; the other pairs are slow cases.
PAIRS = [
    ("llama_gqa", "float32"),
    ("qwen3_mqa_head_dim24", "bfloat16"),
    pytest.param("llama_gqa", "bfloat16", marks=pytest.mark.slow),
    pytest.param("qwen3_mqa_head_dim24", "float32", marks=pytest.mark.slow),
]
LOGPROBS = {"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 20, "ignore_eos": True}
PROMPT = random_tokens("invariant", 75)
SUBJECTS = [
    SamplingParams(temperature=0, **LOGPROBS),
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, presence_penalty=0.5, **LOGPROBS),
]
# Neighbours of many lengths; greedy, since each variant of the sampler is three more programs to compile.
OTHERS = [
    (
        random_tokens(f"other {i}", 1 + i * 7 % 90),
        SamplingParams(temperature=0, max_tokens=1 + i % 23, logprobs=1),
    )
    for i in range(62)
]


def make_llm(name: str, dtype: str, tokens: int, rows: int, steps: int, **options) -> LLM:
    _, config, weights = load(name)
    cast = jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 and not _is_bias(x) else x, weights)
    buckets = Buckets(((tokens, rows),), decode=(rows,), decode_steps=steps, multi_step=(rows,))
    sizes = {"max_model_len": 128, "page_size": 16, "num_pages": 600}
    return LLM(
        config=replace(config, dtype=dtype),
        weights=cast,
        batch_invariant=True,
        max_num_batched_tokens=tokens,
        max_num_seqs=rows,
        decode_steps=steps,
        buckets=buckets,
        background_compile=False,
        **(sizes | options),
    )


def _is_bias(leaf: jax.Array) -> bool:
    return leaf.ndim == 2 and leaf.shape[-1] in (16, 24) and leaf.shape[0] <= 4


def run(llm: LLM, *requests) -> list[tuple]:
    """Of each request for three logprobs: ids, and all logprobs of its prompt and output as they are."""
    prompts, params = zip(*requests, strict=True)
    found = []
    for output, asked in zip(llm.generate(list(prompts), list(params), use_tqdm=False), params, strict=True):
        if asked.logprobs == LOGPROBS["logprobs"]:
            entries = [
                entry or {} for entry in (*(output.prompt_logprobs or ()), *output.outputs[0].logprobs)
            ]
            values = [[(i, e.logprob, e.rank) for i, e in entry.items()] for entry in entries]
            found.append((output.outputs[0].token_ids, values))
    return found


@cache
def alone(name: str, dtype: str) -> list[tuple]:
    """The subjects, one after the other, in an engine of one row that takes whole prompts and single steps."""
    with make_llm(name, dtype, tokens=128, rows=1, steps=1, enable_prefix_caching=False) as llm:
        found = [run(llm, (PROMPT, params))[0] for params in SUBJECTS]
    assert found[0][0] != found[1][0], "a sampled request draws other tokens than a greedy one"
    return found


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_same_bits_among_63_others_in_chunks_with_many_steps_and_from_cached_pages(name, dtype):
    greedy, sampled = ((PROMPT, params) for params in SUBJECTS)
    expected = alone(name, dtype)
    with make_llm(name, dtype, tokens=96, rows=64, steps=8, max_num_partial_prefills=3) as llm:
        assert run(llm, *OTHERS[:20], greedy, *OTHERS[20:40], sampled, *OTHERS[40:]) == expected
        assert run(llm, sampled, *OTHERS[::-1], greedy) == expected[::-1]
        # Prompts whose logprobs are wanted are computed whole; without them cached pages count.
        before = llm.stats().num_cached_tokens
        cached = [(PROMPT, replace(params, prompt_logprobs=None)) for params in SUBJECTS]
        found = run(llm, *cached)
        assert llm.stats().num_cached_tokens > before
    assert found == [(ids, entries[len(PROMPT) :]) for ids, entries in expected]


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_same_bits_after_a_preemption_and_in_short_chunks(name, dtype):
    subjects = [(PROMPT, params) for params in SUBJECTS]
    with make_llm(name, dtype, tokens=13, rows=5, steps=4, num_pages=14) as llm:
        found = run(llm, *subjects, *OTHERS[:6])
        assert llm.stats().num_preemptions > 0
    assert found == alone(name, dtype)


def digest(name: str, dtype: str) -> str:
    return hashlib.sha256(repr(alone(name, dtype)).encode()).hexdigest()


def test_same_bits_in_another_process():
    code = "from test_batch_invariance import digest; print(digest('llama_gqa', 'bfloat16'))"
    paths = [os.path.dirname(__file__), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == digest("llama_gqa", "bfloat16"), found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2(dtype):
    """A real model: alone with single steps, and in chunks among 31 others with eight steps at once."""
    if not fetch.is_here("smollm2-135m-instruct"):
        pytest.skip("run `jaxinfer fetch smollm2-135m-instruct` first")
    params = SamplingParams(temperature=0, logprobs=3, max_tokens=24, ignore_eos=True)
    prompts = [random_tokens(f"smollm2 {i}", 20 + 9 * i) for i in range(32)]
    others = [SamplingParams(temperature=i % 2, seed=i, logprobs=1, max_tokens=4 + i) for i in range(32)]
    found = []
    for tokens, rows, steps in ((512, 1, 1), (160, 32, 8)):
        buckets = Buckets(((tokens, rows),), (rows,), decode_steps=steps, multi_step=(rows,))
        with LLM(
            "smollm2-135m-instruct", dtype=dtype, max_model_len=512, max_num_batched_tokens=tokens,
            max_num_seqs=rows, decode_steps=steps, buckets=buckets, batch_invariant=True, background_compile=False,
        ) as llm:  # fmt: skip
            chosen = {7: params, 25: params}
            requests = [(prompt, chosen.get(i, others[i])) for i, prompt in enumerate(prompts)]
            found.append(run(llm, *(requests if rows > 1 else [requests[i] for i in chosen])))
    assert found[0] == found[1]


# The products of a real model: other sizes are other kernels of XLA.
SMOLLM2 = llama.Config(
    vocab_size=4096, embed_dim=576, layers=(LayerSpec(),), num_q_heads=9, num_kv_heads=3, head_dim=64, mlp_dim=1536,
    rms_norm_eps=1e-5, ropes=(RopeConfig(1e5, 64),), tie_word_embeddings=True,
    max_position_embeddings=256,
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_place_in_a_tile_does_not_matter(dtype):
    """Rows of a tile and of several tiles, permuted: the results are, bit for bit, permuted."""
    kernels = Kernels(matmul="cpu", gated_mlp="cpu")  # as resolve names them on a CPU
    config = replace(SMOLLM2, dtype=dtype, kernels=kernels)
    weights = jax.jit(llama.init, static_argnums=0)(config, jax.random.key(0))
    layer = weights.layers[0]

    def per_token(x):
        y = layers.rms_norm(x, layer.attn_norm, config.rms_norm_eps)
        q = layers.project_heads(y, layer.q_proj, kernels=kernels)
        k = layers.project_heads(y, layer.k_proj, kernels=kernels)
        x = x + layers.merge_heads(q, layer.o_proj, kernels=kernels)
        y = layers.gated_mlp(y, layer.gate_proj, layer.up_proj, layer.down_proj, kernels=kernels)
        logits = llama.unembed(config, weights, y)
        return q, k, x, y, logits, jax.nn.logsumexp(logits, axis=-1)

    @jax.jit
    def tiled(x, live):
        with jax.default_matmul_precision("highest"):
            return map_tiles(per_token, (x,), TILE, live)

    x = jax.random.normal(jax.random.key(1), (3 * TILE - 5, config.embed_dim)).astype(dtype)
    expected = tiled(x, len(x))
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(x))
        for got, want in zip(tiled(x[order], len(x)), expected, strict=True):
            np.testing.assert_array_equal(got.astype(jnp.float32), want[order].astype(jnp.float32))
    # Alone, in a program of one row.
    for got, want in zip(tiled(x[7:8], 1), expected, strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), want[7:8].astype(jnp.float32))


def test_tiles_behind_the_live_ones_are_left_out():
    x = jnp.ones((3 * TILE, 2))
    out = map_tiles(lambda x: x + 1, (x,), TILE, jnp.int32(TILE + 1))
    assert out[: 2 * TILE].min() == 2 and out[2 * TILE :].max() == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"implementation": "reference"},
            "alone, not on cpu with 'reference'",
        ),
        ({"implementation": "gpu"}, "proven on CPUs with implementation='cpu'"),
        ({"quantize": "w8a8"}, "not proven with quantize='w8a8'"),
    ],
)
def test_refused_where_it_is_not_proven(options, message):
    with pytest.raises(ValueError, match=message):
        make_llm("llama_gqa", "float32", 16, 1, 1, **options)
