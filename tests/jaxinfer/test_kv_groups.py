"""A model whose layers see different numbers of tokens: two KV groups, through the whole engine."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import CPU, MODEL_LEN, PAGE_SIZE, assert_greedy, drain, greedy_params, load, submit
from tiny_models import random_tokens

from jaxinfer import kv_cache as kv
from jaxinfer.engine import Engine
from jaxinfer.forward import forward
from jaxinfer.llm import LLM
from jaxinfer.models.rope import rope_table
from jaxinfer.options.llm_options import LLMOptions
from jaxinfer.options.resolve import resolve
from jaxinfer.programs.buckets import Buckets
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.weights.weight_forms import ModelFacts

WINDOWS = (12, None, 12)  # of the layers; those with a window are group 1
TOKENS, ROWS, STEPS = 16, 4, 4


@cache
def windowed(windows=WINDOWS):
    """(model file, config, weights) of tiny Llama with a third layer, and a window in two of them, or in all."""
    model, config, weights = load("llama_gqa")
    layers = []
    for layer, window in zip(config.with_layers(3).layers, windows, strict=True):
        group = int(None in windows and window is not None)
        layers.append(replace(layer, attention=replace(layer.attention, window=window, group=group)))
    three = (*weights.layers, weights.layers[0])
    return model, replace(config, layers=tuple(layers)), weights.replace(layers=three)


@partial(jax.jit, static_argnums=0)
def dense_logits(windows, token_ids):
    """f32[T, V] by one softmax over all tokens with a mask: no pages, no batch, no engine."""
    model, config, weights = windowed()
    x, positions = model.embed(config, weights, token_ids), jnp.arange(len(token_ids))
    rope = rope_table(config.ropes[0], positions)
    for window, w in zip(windows, weights.layers, strict=True):
        layer = config.layers[0]
        q, k, v = model.before_attention(config, layer, w, x, rope)
        k, v = (jnp.repeat(y, config.num_q_heads // config.num_kv_heads, axis=1) for y in (k, v))
        scores = jnp.einsum("tnh,snh->nts", q, k) * config.head_dim**-0.5
        distance = positions[:, None] - positions
        seen = (distance >= 0) & (distance < (window or len(token_ids)))
        weights_of_tokens = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        x = model.after_attention(config, layer, w, x, jnp.einsum("nts,snh->tnh", weights_of_tokens, v))
    return model.unembed(config, weights, model.final(config, weights, x))


@cache
def expected(prompt: tuple[int, ...], count: int, windows=WINDOWS) -> tuple[np.ndarray, np.ndarray]:
    """Greedy ids of the dense model, and the lead of each over the second."""
    ids, gaps = list(prompt), []
    with jax.default_matmul_precision("highest"):
        for _ in range(count):
            padded = jnp.asarray(ids + [0] * (MODEL_LEN - len(ids)))
            logits = np.asarray(dense_logits(windows, padded)[len(ids) - 1])
            best, second = np.sort(logits)[-1], np.sort(logits)[-2]
            ids.append(int(logits.argmax()))
            gaps.append(best - second)
    return np.array(ids[len(prompt) :]), np.array(gaps)


def make_engine(implementation: str, num_pages: int = 60, window_pages: int = 40) -> Engine:
    model, config, weights = windowed()
    buckets = Buckets(((TOKENS, ROWS),), decode=(ROWS,), decode_steps=STEPS, multi_step=(ROWS,))
    settings = LLMOptions(
        max_model_len=MODEL_LEN, max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, max_num_partial_prefills=2,
        decode_steps=STEPS, page_size=PAGE_SIZE, buckets=buckets, implementation=implementation,
        background_compile=False,
    )  # fmt: skip
    resolved = resolve(settings, ModelFacts(model, config, weights_given=True), CPU)
    full, narrow = resolved.spec.groups
    assert (full.layers, full.window, narrow.layers, narrow.window) == ((1,), None, (0, 2), 12)
    groups = replace(full, num_pages=num_pages), replace(narrow, num_pages=window_pages)
    spec = replace(resolved.spec, num_pages=max(num_pages, window_pages), groups=groups)
    programs = replace(resolved, spec=spec).compiler(weights=weights)
    return Engine(programs, weights, resolved.engine_config())


PROMPTS = [random_tokens(f"kv groups {i}", n) for i, n in enumerate((50, 3, 33, 21, 40, 12))]


def check(sequences, prompts) -> int:
    return sum(
        assert_greedy(seq, *expected(tuple(prompt), seq.num_output_tokens))
        for (seq, *_), prompt in zip(sequences, prompts, strict=True)
    )


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_tokens_equal_a_dense_model_chunked_preempted_and_from_cached_pages(implementation):
    engine = make_engine(implementation, num_pages=11, window_pages=17)
    sequences = submit(engine, *((prompt, greedy_params(16 + i)) for i, prompt in enumerate(PROMPTS)))
    most = 0
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.allocator.check_invariants()
        most = max(most, engine.scheduler.allocator.groups[1].num_used)
    drain(engine)
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0 and most > 0
    assert check(sequences, PROMPTS) > 60
    # A prompt that goes on where the pages of another are cached, in both groups.
    longer = [[*PROMPTS[-1], *random_tokens("tail", 9)], [*PROMPTS[-2], *random_tokens("tail", 9)]]
    for prompt in longer:
        (seq,) = submit(engine, (prompt, greedy_params(6)))
        drain(engine)
        check([seq], [prompt])
    assert engine.scheduler.stats().num_cached_tokens > stats.num_cached_tokens


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_model_whose_layers_all_have_a_window_keeps_no_more_than_it(batch_invariant):
    """Its pool of 12 pages of 4 runs two sequences of up to 128 tokens at a time, and is never short."""
    windows = (12, 12, 12)
    model, config, weights = windowed(windows)
    with LLM(
        config=config, weights=weights, model_module=model, max_model_len=128, page_size=4, max_num_seqs=4,
        max_num_batched_tokens=8, decode_steps=4, num_pages=13, batch_invariant=batch_invariant,
        background_compile=False,
    ) as llm:  # fmt: skip
        assert [group.window for group in llm.engine.spec.groups] == [12]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert llm.stats().num_preemptions == 0 and llm.stats().peak_pages_used <= 12
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_greedy(output.outputs[0].token_ids, *expected(tuple(prompt), 40, windows))


def test_samples_of_a_request_share_pages_of_both_groups():
    """A partly filled page is copied in each group."""
    engine = make_engine("cpu")
    params = SamplingParams(temperature=0, max_tokens=8, n=3, ignore_eos=True)
    (sequences,) = submit(engine, (PROMPTS[2], params))
    drain(engine)
    assert engine.scheduler.stats().num_cached_tokens >= 2 * (len(PROMPTS[2]) - 1)
    for seq in sequences:
        check([(seq,)], [PROMPTS[2]])


def test_the_resolver_makes_the_groups_and_divides_memory_among_them():
    model, config, weights = windowed()
    sizes = {"max_model_len": 128, "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    with LLM(
        config=config, weights=weights, model_module=model, decode_steps=1, background_compile=False, **sizes
    ) as llm:
        spec = llm.engine.spec
        # 32 pages for all tokens; 12 + 15 tokens of a step over 8 pages at the most
        assert [group.num_pages for group in spec.groups] == [1 + 4 * 32, 1 + 4 * 8]
        assert [group.layers for group in spec.groups] == [(1,), (0, 2)]
        assert spec.total_bytes == sum(page.nbytes for page in llm.engine._cache.pages)
        output = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
        assert_greedy(output.outputs[0].token_ids, *expected(tuple(PROMPTS[0]), 12))
    budget = 80_000
    with LLM(
        config=config, weights=weights, model_module=model, kv_cache_memory_bytes=budget,
        background_compile=False, **sizes,
    ) as llm:  # fmt: skip
        spec = llm.engine.spec
        assert budget * 0.9 < spec.total_bytes <= budget
        usable = [group.num_pages - 1 for group in spec.groups]
        assert usable[1] / 8 >= usable[0] / 32 > 1


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_pages_are_copied_moved_and_gathered_by_group(implementation):
    groups = kv.KVGroup((1,), None, 9), kv.KVGroup((0, 2), 12, 5)
    spec = kv.KVCacheSpec(3, 2, 16, 4, 9, implementation=implementation, groups=groups)
    rng = np.random.default_rng(0)
    shapes = [page.shape for page in kv.init(spec).pages]
    pages = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    cache = kv.KVCache(pages, None, spec)

    def of(cache, layer, page):
        return np.concatenate(kv.gather(cache, layer, jnp.array([page]), 4))

    copied = kv.copy_pages(cache, (jnp.array([7]), jnp.array([4])), (jnp.array([2]), jnp.array([1])))
    for layer, source, target in ((0, 4, 1), (1, 7, 2), (2, 4, 1)):
        np.testing.assert_array_equal(of(copied, layer, target), of(cache, layer, source))
        others = {1, 2, 3, 4} - {target}
        assert all((of(copied, layer, page) == of(cache, layer, page)).all() for page in others)
    exported = kv.export_pages(cache, (jnp.array([7, 8]), jnp.array([4, 2])))
    empty = kv.KVCache(tuple(jnp.zeros(shape) for shape in shapes), None, spec)
    moved = kv.import_pages(empty, exported, (jnp.array([1, 2]), jnp.array([3, 1])))
    for layer, source, target in ((0, 4, 3), (0, 2, 1), (1, 7, 1), (1, 8, 2), (2, 4, 3)):
        np.testing.assert_array_equal(of(moved, layer, target), of(cache, layer, source))


def test_a_cache_that_keeps_less_than_a_layer_sees_is_refused():
    model, config, weights = windowed()
    groups = kv.KVGroup((1,), None, 9), kv.KVGroup((0, 2), 8, 9)
    spec = kv.KVCacheSpec(3, 2, 16, 4, 9, groups=groups)
    with pytest.raises(ValueError, match="layer 0 sees 12 tokens, its KV group keeps 8"):
        forward(model, config, weights, kv.init(spec), None)
    with pytest.raises(ValueError, match="each layer is in one group"):
        replace(spec, groups=groups[:1])
