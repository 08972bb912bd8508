"""`LLM` over planted models: text, scores, defaults, other weights, and several readers at once."""

import asyncio
import itertools
import json
import logging
import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_fixtures
from planted import greedy, make_planted, next_logprobs, plant_chain, random_table
from tiny_models import write_hf

from jaxinfer.llm import LLM, VLLM_METHODS
from jaxinfer.programs.buckets import Buckets
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text.prompts import default_sampling_params
from jaxinfer.text.records import Record

VOCAB = 320
OPTIONS = dict(
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    num_pages=96,
    page_size=8,
    buckets=Buckets(((32, 4),), (4,), 4, (4,)),
    decode_steps=4,
    background_compile=False,
)
GENERATION_CONFIG = {"temperature": 0.1, "top_k": 1, "max_new_tokens": 7, "do_sample": True}


def ids_of(text: str) -> list[int]:
    """One token per byte, in GPT-2's alphabet of bytes."""
    alphabet = {" ": "Ġ", "\n": "Ċ"}
    backend = text_fixtures.byte_level()
    return [backend.token_to_id(char) for char in "".join(alphabet.get(c, c) for c in text)]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A folder whose model continues "?" with "日é😀" in byte tokens and "A" with "BCDEFGH"; `.table` its logits."""
    table = random_table(VOCAB, "llm tests")
    backend = text_fixtures.byte_level()
    odd = [ids_of("?")[0], *backend.encode("日é😀").ids]
    end = backend.token_to_id("<|im_end|>")
    table = plant_chain(table, [*odd, end])
    table = plant_chain(table, [*ids_of("ABCDEFGH"), end])
    config, weights = make_planted(table)
    folder = write_hf(tmp_path_factory.mktemp("llm") / "planted", config, weights)
    text_fixtures.save(folder, backend, text_fixtures.BYTE_LEVEL_CONFIG)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG | {"eos_token_id": [end, 2]}))
    return SimpleNamespace(folder=folder, table=table, end=end)


@pytest.fixture(scope="module")
def llm(planted):
    return LLM(planted.folder, **OPTIONS)


def greedy_params(max_tokens=16, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def assert_idle(llm):
    """Nothing is queued, running or in flight."""
    assert not llm._loop.records and not llm.engine.has_unfinished
    assert llm.engine.scheduler.allocator.num_used == 0


def exact_pair(table, before, after):
    """[log p] of each token of `after`, in float64."""
    ids = [*before, *after]
    return [next_logprobs(table, ids[i - 1])[ids[i]] for i in range(len(before), len(ids))]


def test_loglikelihood_of_text(llm, planted):
    prompts = ["x A", "x A", "hello ", "the same long beginning of a prompt, the", "?"] * 2
    continuations = ["BCD", "BD", "world", " in", "日"] * 2
    results = llm.loglikelihood(prompts, continuations)
    for prompt, continuation, result in zip(prompts, continuations, results, strict=True):
        before = llm.tokenizer.encode(prompt.rstrip())
        after = llm.tokenizer.encode(prompt + continuation)[len(before) :]
        exact = exact_pair(planted.table, before, after)
        # float32 logits of magnitude up to 30
        np.testing.assert_allclose(result.token_logprobs, exact, atol=1e-4)
        assert result.logprob == pytest.approx(sum(exact), abs=1e-3)
        last = [*before, *after][len(before) - 1]
        assert result.is_greedy == (after == greedy(planted.table, last, len(after)))
    assert [r.is_greedy for r in results[:5]] == [True, False, False, False, True]


def test_loglikelihood_computes_a_shared_prompt_once(llm, planted):
    prompt = np.random.default_rng(0).integers(3, 250, 80).tolist()
    before = llm.stats()
    labels = [[i, i + 1] for i in range(20)]
    results = llm.loglikelihood(prompt, labels)
    after = llm.stats()
    computed = (after.num_prompt_tokens - after.num_cached_tokens) - (
        before.num_prompt_tokens - before.num_cached_tokens
    )
    # The last page of the prompt (8 tokens) and the label are each pair's own.
    assert computed <= 80 + 20 * (8 + 2)
    for label, result in zip(labels, results, strict=True):
        np.testing.assert_allclose(result.token_logprobs, exact_pair(planted.table, prompt, label), atol=1e-4)


def test_an_empty_prompt_is_the_bos_or_an_end_token(llm, planted):
    (result,) = llm.loglikelihood([""], ["AB"])
    start = llm.tokenizer.bos_token_id
    start = min(llm.tokenizer.eos_token_ids) if start is None else start
    np.testing.assert_allclose(
        result.token_logprobs, exact_pair(planted.table, [start], ids_of("AB")), atol=1e-4
    )


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        (["a", "a"], ["b", ""], "pair 1: the continuation '' has no tokens"),
        (["a"], [[3]], "pair 0: .* both be text or both be token ids"),
        ([[1], [1] * 250], [[2], [3] * 7], r"pair 1: .*257 tokens .*max_model_len=256"),
        ([[1]], [[320]], "pair 0: prompt_token_ids has 320"),
    ],
)
def test_a_pair_that_cannot_be_scored_is_named(llm, prompts, continuations, message):
    with pytest.raises(ValueError, match=message):
        llm.loglikelihood(prompts, continuations)
    assert not llm.engine.has_unfinished


def test_each_change_is_handed_on_once(llm, monkeypatch):
    """The cost of a step does not grow with the number of requests that wait."""
    calls = 0
    notify = type(llm._loop)._next_changed

    def counted(self, reader):
        nonlocal calls
        changed = notify(self, reader)
        calls += len(changed)
        return changed

    monkeypatch.setattr(type(llm._loop), "_next_changed", counted)
    llm.loglikelihood([[5, i % 250] for i in range(300)], [[7]] * 300)
    assert calls == 300


def test_logprobs_name_their_tokens_and_keep_partial_characters(llm):
    """C42, C47: entries are by id; the bytes of the chosen tokens are the text."""
    (output,) = llm.generate("?", greedy_params(logprobs=5, prompt_logprobs=1))
    completion = output.outputs[0]
    assert completion.text == "日é😀"
    chosen = [e[token] for e, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert b"".join(bytes(entry.bytes) for entry in chosen[:-1]).decode() == "日é😀"
    assert chosen[0].decoded_token == "\ufffd", "a part of a character alone"
    assert all(len(e) in (5, 6) for e in completion.logprobs)
    assert output.prompt_logprobs == [None]


def test_the_seed_in_the_output_repeats_it(llm):
    params = SamplingParams(temperature=1.0, max_tokens=12, n=2)
    (first,) = llm.generate([9], params)
    (other,) = llm.generate([9], params)
    (again,) = llm.generate([9], replace(params, seed=first.seed))
    ids = [[c.token_ids for c in output.outputs] for output in (first, other, again)]
    assert ids[0] == ids[2] != ids[1]


def test_defaults_of_the_generation_config_apply_to_requests_without_parameters(llm, planted, caplog):
    """C38."""
    assert llm.default_sampling_params == SamplingParams(temperature=0.1, top_k=1, max_tokens=7)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            (output,) = llm.generate([9, 9])
    assert caplog.text.count("generation_config.json") == 1
    assert len(output.outputs[0].token_ids) == 7
    # Given parameters are taken as they are: 16 tokens, no penalty.
    (output,) = llm.generate("A", SamplingParams(temperature=1.0, top_k=1))
    assert output.outputs[0].text == "BCDEFGH"


def test_what_of_a_generation_config_acts():
    file = {"top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.05, "num_beams": 4, "temperature": None}
    assert default_sampling_params(file) == SamplingParams(top_p=0.9, min_p=0.1, repetition_penalty=1.05)
    assert default_sampling_params(None) == SamplingParams()
    with pytest.raises(ValueError, match=r"generation_config.json: top_p=1.5 .*generation_config='none'"):
        default_sampling_params({"top_p": 1.5})


def test_the_generation_config_can_be_switched_off(planted):
    with LLM(planted.folder, generation_config="none", **OPTIONS) as other:
        assert other.default_sampling_params == SamplingParams()
        assert planted.end in other.end_token_ids, "end ids are no sampling default"
    with pytest.raises(ValueError, match="generation_config='vllm' must be one of auto, none"):
        LLM(planted.folder, generation_config="vllm", **OPTIONS)


def test_other_weights_compile_nothing_and_forget_cached_prefixes(llm, planted):
    prompt = [7] * 40
    params = greedy_params(6, ignore_eos=True)
    llm.generate(prompt, params)
    programs, old = llm.stats().num_programs, llm.engine.weights
    table = random_table(VOCAB, "other weights")
    head = table.T.astype(np.float64) * np.sqrt(1 / VOCAB + 1e-6)
    try:
        llm.update_weights(old.replace(unembed=head.astype(np.float32)))
        (output,) = llm.generate(prompt, params)
        assert output.outputs[0].token_ids == greedy(table, 7, 6)
        assert output.num_cached_tokens == 0
        assert llm.stats().num_programs == programs
    finally:
        llm.update_weights(old)


def test_wrong_weights_and_wrong_moments_are_refused(llm):
    old = llm.engine.weights
    with pytest.raises(ValueError, match=r"\.unembed is float32\[2, 2\], this model has float32\[320, 320\]"):
        llm.update_weights(old.replace(unembed=jnp.zeros((2, 2))))
    with pytest.raises(ValueError, match=r"\.unembed is bfloat16"):
        llm.update_weights(old.replace(unembed=old.unembed.astype(jnp.bfloat16)))
    with pytest.raises(ValueError, match=r"no leaf \.unembed"):
        llm.update_weights(old.replace(unembed=None))
    stream = llm.stream("A", greedy_params())
    next(stream)
    with pytest.raises(RuntimeError, match="unfinished"):
        llm.update_weights(old)
    stream.close()
    assert llm.engine.weights is old and jax.tree.leaves(old)


def test_async_streams_share_the_engine_and_leave_the_loop_free(llm, planted):
    async def read(prompt, params):
        outputs = [output async for output in llm.astream(prompt, params)]
        return outputs

    async def tick(ticks):
        while True:
            ticks.append(None)
            await asyncio.sleep(0.001)

    async def main():
        ticks = []
        ticker = asyncio.create_task(tick(ticks))
        streams = [read("A", greedy_params()), read([9], greedy_params(40, ignore_eos=True))]
        first, second = await asyncio.gather(*streams)
        ticker.cancel()
        return first, second, len(ticks)

    first, second, ticks = asyncio.run(main())
    assert first[-1].finished and first[-1].outputs[0].text == "BCDEFGH"
    assert second[-1].outputs[0].token_ids == greedy(planted.table, 9, 40)
    assert all(len(a.outputs[0].text) <= len(b.outputs[0].text) for a, b in itertools.pairwise(first))
    assert ticks > 5


def test_leaving_an_async_stream_aborts_it(llm):
    async def main():
        stream = llm.astream([[9], [8]], greedy_params(200, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()

        begun = asyncio.Event()

        async def endless():
            async for _ in llm.astream([9], greedy_params(200, ignore_eos=True)):
                begun.set()

        task = asyncio.create_task(endless())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert_idle(llm)


def test_an_aborted_request_ends_its_stream(llm):
    stream = llm.stream([[9], [8]], greedy_params(60, ignore_eos=True))
    aborted = next(stream).request_id
    llm.abort(aborted)
    last = {output.request_id: output for output in stream}
    assert {i: output.outputs[0].finish_reason for i, output in last.items()} == {
        i: "abort" if i == aborted else "length" for i in last
    }
    assert len(last) == 2 and all(output.finished for output in last.values())


def test_stats_know_the_most_pages_that_were_used(llm):
    llm.generate([[9] * 100] * 3, greedy_params(4, ignore_eos=True))
    stats = llm.stats()
    assert stats.pages_used == 0
    assert 13 <= stats.peak_pages_used <= stats.pages_total == 95
    assert stats.num_programs == len(llm.engine.programs) and stats.compile_seconds > 0


@pytest.fixture(scope="module")
def one_step(planted):
    """The same model, one token at a time."""
    return LLM(planted.folder, **OPTIONS | dict(buckets=Buckets(((32, 4),), (4,), 1, (4,)), decode_steps=1))


@pytest.mark.parametrize("stop", ["B", "C", "E", "F", "G", "H", "DEF", "GH"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_before_the_end_id_of_the_same_step_counts(llm, one_step, stop, include):
    """ "ABCDEFGH<end>" in steps of 4 tokens: the end id comes together with "FGH"."""
    params = greedy_params(stop=[stop], include_stop_str_in_output=include, logprobs=1)
    many, one = (each.generate("A", params)[0].outputs[0] for each in (llm, one_step))
    assert many.stop_reason == one.stop_reason == stop
    assert (many.text, many.token_ids, len(many.logprobs)) == (one.text, one.token_ids, len(one.logprobs))
    assert many.text == "BCDEFGH"[: "BCDEFGH".index(stop) + include * len(stop)]
    assert many.cumulative_logprob == pytest.approx(one.cumulative_logprob, abs=1e-5)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([greedy_params(), None], TypeError, "prompt 1 is None"),
        ([], ValueError, "sampling_params has 0 entries for 2 prompts"),
    ],
)
def test_wrong_sampling_params_leave_nothing_queued(llm, params, error, message):
    with pytest.raises(error, match=message):
        llm.generate(["A", "A"], params)
    assert_idle(llm)


def test_ctrl_c_while_prompts_are_queued_leaves_nothing_queued(llm, monkeypatch):
    add, calls = llm.engine.add, []

    def interrupted(request):
        calls.append(request)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return add(request)

    monkeypatch.setattr(llm.engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["A", "A"], greedy_params())
    assert_idle(llm)


def test_a_dropped_stream_leaves_nothing_queued(llm):
    endless = greedy_params(200, ignore_eos=True)
    llm.stream([[9], [8]], endless)  # never read
    assert_idle(llm)
    stream = llm.stream([[VOCAB], [9], [8]], endless)
    assert next(stream).error is not None  # broken off while refused prompts are told
    del stream
    assert_idle(llm)
    for _ in llm.stream([[9], [8]], endless):
        break
    assert_idle(llm)


def test_a_task_cancelled_while_it_waits_to_submit_leaves_nothing_queued(llm):
    async def main():
        async def read():
            async for _ in llm.astream([9], greedy_params(200, ignore_eos=True)):
                pass

        held, release = threading.Event(), threading.Event()

        def hold():
            with llm._loop.lock:
                held.set()
                release.wait(10)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(10)
        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.05)
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        holder.join()

    asyncio.run(main())
    assert_idle(llm)


def test_a_generate_inside_a_stream_loop_finishes_no_request_twice(llm):
    finished = []
    for output in llm.stream([[9], [8], [7]], greedy_params(9, ignore_eos=True)):
        llm.generate([5], greedy_params(30, ignore_eos=True))
        finished += [output.request_id] * output.finished
    assert len(finished) == len(set(finished)) == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(logprobs_mode="raw_logits"), ValueError, "logprobs_mode='raw_logits' must be one of raw"),
        (dict(implementation="cuda"), ValueError, "implementation='cuda' must be one of auto"),
        (dict(matmul_precision="best"), ValueError, "matmul_precision='best' is not known"),
        (dict(max_model_len=0), ValueError, "max_model_len=0 must be at least 1"),
        (dict(max_num_seqs=0), ValueError, "max_num_seqs=0 must be at least 1"),
        (dict(decode_steps=0), ValueError, "decode_steps=0 must be at least 1"),
        (dict(max_num_seqs=64), ValueError, "max_num_batched_tokens=32 must be at least max_num_seqs=64"),
        (dict(dtype="int3"), ValueError, "dtype='int3' must be"),
        (dict(config=object()), TypeError, "config, weights and model_module replace model"),
        (dict(model_module=json), TypeError, "config, weights and model_module replace model"),
        (dict(model=None, config=1, weights=1, dtype="bfloat16"), TypeError, "dtype='bfloat16' is for model"),
    ],
)
def test_options_are_refused_before_anything_is_loaded(options, error, message):
    with pytest.raises(error, match=message):
        LLM(**{"model": "/no/such/model"} | OPTIONS | options)


def test_a_failing_step_reaches_every_reader(llm, monkeypatch):
    """In the middle of what a step brought, too: other threads get outputs with `error`, and none waits."""
    endless = greedy_params(200, ignore_eos=True)
    for broken, name in [(llm.engine, "step"), (Record, "take")]:
        stream = llm.stream([[9], [8]], endless)
        next(stream)

        def fail(*_):
            raise OSError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(broken, name, fail)
            with pytest.raises(OSError, match="planted"):
                llm.generate([7], endless)
        last = {output.request_id: output for output in stream}
        assert len(last) == 2 and all(
            o.finished and o.error == "a step failed: OSError: planted" for o in last.values()
        )
        del stream
        assert llm.generate("A", greedy_params())[0].outputs[0].text == "BCDEFGH"
    assert_idle(llm)


def test_a_step_that_fails_on_one_thread_ends_generate_on_the_others(llm, monkeypatch):
    results = {}

    def fails_once_all_are_queued():
        if len(llm._loop.records) == 3:
            raise OSError("planted")
        return []

    def generate(i):
        try:
            llm.generate([i], greedy_params(100, ignore_eos=True))
        except OSError:
            results[i] = "raised"
        except ValueError as error:  # of the threads that did not step
            results[i] = str(error)

    monkeypatch.setattr(llm.engine, "step", fails_once_all_are_queued)
    threads = [threading.Thread(target=generate, args=(i,), daemon=True) for i in (7, 8, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(results.values()) == ["a step failed: OSError: planted"] * 2 + ["raised"]
    assert_idle(llm)


def test_a_closed_llm_says_so_and_has_freed_what_it_owned(planted):
    other = LLM(planted.folder, **OPTIONS)
    loaded = other.engine.weights
    host = jax.tree.map(np.asarray, loaded)
    other.update_weights(loaded.replace(unembed=host.unembed))  # the other leaves stay the LLM's own
    ours = jax.tree.leaves(other.engine.weights)
    stream = other.stream([9], greedy_params(200, ignore_eos=True))
    other.close()
    other.close()
    assert all(leaf.is_deleted() for leaf in ours)
    (last,) = stream
    assert "closed" in last.error
    for use in (
        lambda: other.generate("A"),
        lambda: other.stream("A"),
        lambda: other.loglikelihood("A", ["B"]),
        lambda: other.update_weights(host),
        other.warmup,
    ):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            use()


def test_weights_of_the_user_outlive_the_llm(planted):
    with LLM(planted.folder, **OPTIONS) as other:
        given = jax.tree.map(jnp.copy, other.engine.weights)
        other.update_weights(given)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(given))


@pytest.mark.parametrize(("max_tokens", "kept"), [(16, 240), (None, 255), (0, 256)])
def test_truncation_leaves_room_for_the_output(llm, max_tokens, kept):
    prompt = [3 + i % 200 for i in range(400)]
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        truncate_prompt_tokens=-1,
        ignore_eos=True,
        prompt_logprobs=0 if max_tokens == 0 else None,
    )
    (output,) = llm.generate(prompt, params)
    assert output.prompt_token_ids == prompt[-kept:]
    assert len(output.outputs[0].token_ids) == 256 - kept


def test_an_aborted_request_shows_the_text_that_was_held_back(one_step):
    """ "BC" could be the beginning of the stop string until the abort."""
    stream = one_step.stream("A", greedy_params(stop=["BCDEFGHX"]))
    first = next(stream)
    assert first.outputs[0].text == ""
    one_step.abort(first.request_id)
    (last,) = stream
    assert last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].text == "BCDEFGH"[: len(last.outputs[0].token_ids)] != ""


@pytest.mark.parametrize("name", sorted(VLLM_METHODS))
def test_names_of_vllm_say_what_to_use_instead(name):
    llm = LLM.__new__(LLM)
    with pytest.raises(AttributeError, match=r"LLM has no attribute .*: "):
        getattr(llm, name)
    assert not hasattr(LLM, name), "built by now: take it out of VLLM_METHODS"
