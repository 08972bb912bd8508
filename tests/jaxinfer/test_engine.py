"""The engine against transformers' greedy continuations, whatever runs beside a request, and its housekeeping."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    BUCKETS,
    GOLDEN,
    PLANTED_VOCAB,
    ROWS,
    TOKENS,
    assert_greedy,
    drain,
    generate,
    greedy_params,
    make_engine,
    planted_table,
    submit,
)
from planted import greedy, next_logprobs

from jaxinfer.batch import pack
from jaxinfer.programs.buckets import Buckets, Program
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.sample import init_row_state
from jaxinfer.scheduler import RequestTooLong, SchedulerConfig
from jaxinfer.step import step

NAME = "llama_gqa"
golden = np.load(GOLDEN / f"{NAME}.npz")
SHORT, LONG = golden["short_prompt"].tolist(), golden["long_prompt"].tolist()


def check_golden(short, long):
    compared = assert_greedy(short, golden["short_greedy"], golden["short_gaps"])
    compared += assert_greedy(long, golden["long_greedy"], golden["long_gaps"])
    assert compared == 40, "the oracle's leads are large here: no difference is expected"


@pytest.mark.smoke
def test_batched_greedy_equals_one_at_a_time_in_transformers():
    engine = make_engine(NAME)
    noise = [([5, 9, 300][: 1 + i % 3] * (i + 1), greedy_params(5 + 3 * i)) for i in range(6)]
    out = generate(engine, *noise[:3], (SHORT, greedy_params(20)), (LONG, greedy_params(20)), *noise[3:])
    check_golden(out[3], out[4])


@pytest.mark.parametrize("budget", [4, 7, 16, 32])
def test_chunked_prefill_changes_nothing(budget):
    engine = make_engine(NAME, budget=budget, partial=2)
    out = generate(
        engine, (LONG, greedy_params(20)), ([7, 8, 9], greedy_params(30)), (SHORT, greedy_params(20))
    )
    check_golden(out[2], out[0])


def test_preempted_sequences_end_with_the_same_tokens():
    # 20 pages of 8 tokens cannot hold 4 rows of 44 to 90 tokens.
    engine = make_engine(NAME, num_pages=21)
    out = generate(engine, *[(SHORT, greedy_params(20)), (LONG, greedy_params(20))] * 3)
    assert engine.scheduler.stats().num_preemptions > 0
    for i in (0, 2, 4):
        check_golden(out[i], out[i + 1])


def test_prefix_hits_change_nothing():
    engine = make_engine(NAME)
    cold = generate(engine, (SHORT, greedy_params(20)), (LONG, greedy_params(20)))
    before = engine.scheduler.stats().num_cached_tokens
    warm = generate(engine, (LONG, greedy_params(20)), (SHORT, greedy_params(20)))
    assert (
        engine.scheduler.stats().num_cached_tokens - before == 64 + 16
    )  # all full pages but the last token's
    check_golden(cold[0], cold[1])
    check_golden(warm[1], warm[0])


def test_prefix_caching_can_be_switched_off():
    engine = make_engine(NAME, prefix_caching=False)
    for _ in range(2):
        check_golden(*generate(engine, (SHORT, greedy_params(20)), (LONG, greedy_params(20))))
    assert engine.scheduler.stats().num_cached_tokens == 0


def test_one_step_at_a_time_equals_several():
    outs = [
        generate(make_engine(NAME, steps=k), (SHORT, greedy_params(19)), (LONG, greedy_params(13)))
        for k in (1, 4)
    ]
    assert outs[0] == outs[1]
    assert outs[0][0] == golden["short_greedy"][:19].tolist()


def test_nan_in_every_unused_page_and_slot_changes_nothing():
    engine = make_engine(NAME)
    engine._cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), engine._cache)
    check_golden(*generate(engine, (SHORT, greedy_params(20)), (LONG, greedy_params(20))))


def test_a_page_that_held_nan_serves_the_next_request():
    """The token 5 has a NaN embedding: it fills its pages with NaN, and dies of it alone."""
    engine = make_engine(NAME, prefix_caching=False)
    engine.weights = engine.weights.replace(embed=engine.weights.embed.at[5].set(jnp.nan))
    sick = ([5] * 30, greedy_params(10))
    beside = generate(engine, sick, (SHORT, greedy_params(20)))
    after = generate(engine, (SHORT, greedy_params(20)), (LONG, greedy_params(20)))
    assert beside[1] == after[0]
    check_golden(after[0], after[1])


def test_nothing_compiles_after_warmup():
    """Neither programs nor what runs between steps (page copies of n=2), as jax itself counts compilations."""
    few = replace(BUCKETS, prefill=((TOKENS, ROWS),), decode=(ROWS,), multi_step=(ROWS,))
    engine = make_engine("planted", strict=True, partial=2, buckets=few)
    built: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: built.append(event))
    engine.warmup()
    compiles = "/jax/core/compile/backend_compile_duration"
    programs, helpers = len(engine.programs), engine.programs.num_helpers
    assert (programs, helpers) == (2 * 3, 2) and built.count(compiles) >= 8
    built.clear()
    rng, pending, steps = np.random.default_rng(0), 0, 0
    while steps < 200:
        if pending < 40 and rng.random() < 0.4:
            ids = rng.integers(1, PLANTED_VOCAB, rng.integers(1, 60)).tolist()
            most = int(rng.integers(1, 30))
            params = (
                greedy_params(most),
                SamplingParams(temperature=0.8, top_p=0.9, max_tokens=most),
                SamplingParams(n=2, max_tokens=most),
            )
            submit(engine, (ids, params[pending % 3]))
            pending += 1
        engine.step()
        steps += 1
    drain(engine)
    assert (len(engine.programs), engine.programs.num_helpers) == (programs, helpers)
    assert built.count(compiles) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": 0}, "programs for logprobs, which"),
        ({"presence_penalty": 1.0}, r"variant 'full' \(compiled: \['greedy'\]\)"),
        ({"temperature": 1.0}, r"variant 'sample' \(compiled: \['greedy'\]\)"),
        ({"prompt_logprobs": 3}, r"prompt_logprobs=3 \(compiled: \[\]\)"),
    ],
)
def test_strict_compile_refuses_a_request_without_programs_and_its_neighbours_go_on(fields, message):
    engine = make_engine("planted", strict=True, buckets=replace(BUCKETS, variants=("greedy",)))
    engine.programs.warm = True  # nothing is compiled here: the request is refused before
    [[neighbour]] = submit(engine, ([8], greedy_params(12)))
    with pytest.raises(ValueError, match=message):
        submit(engine, ([8], SamplingParams(**{"temperature": 0.0, **fields})))
    assert not neighbour.finished and list(engine._unfinished) == [neighbour]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 64, 256, 1024])
@pytest.mark.parametrize("tokens", [1, 100, 512, 8192])
@pytest.mark.parametrize("k", [1, 8])
def test_default_buckets_hold_every_step_and_are_at_most_16_programs(platform, rows, tokens, k):
    tokens = max(tokens, rows)
    buckets = Buckets.default(rows, tokens, k, platform)
    multi = buckets.max_multi_step_rows
    buckets.check(SchedulerConfig(rows, tokens, 64, decode_steps=k, max_multi_step_rows=multi))
    assert len(set(buckets.programs())) == len(buckets.programs()) <= 16
    for b in range(1, rows + 1):
        buckets.shape(b, b, 1)
        buckets.shape(tokens, b, 1, scores_prompt=True)
        if b <= multi:
            buckets.shape(b, b, k)


def test_on_a_cpu_one_program_serves_greedy_and_sampled_rows_and_a_single_prompt_has_its_own():
    buckets = Buckets.default(64, 512, 8, "cpu")
    assert len(buckets.programs()) == 8 and {p.variant for p in buckets.programs()} == {"any"}
    assert [buckets.variant(v) for v in ("greedy", "sample", "full")] == ["any", "any", "full"]
    assert [str(p) for p in buckets.first_programs()] == ["prefill[128,1] any", "decode[1,8] any"]
    assert Buckets.default(64, 512, 8, "gpu").variant("greedy") == "greedy"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefill": ((31, 4), (32, 3))}, r"max_num_batched_tokens=32 and max_num_seqs=4: add \(32, 4\)"),
        ({"decode": (1, 3)}, r"no decode bucket of \(1, 3\) holds max_num_seqs=4"),
        ({"multi_step": (1,)}, r"4 rows may take decode_steps=4 .* multi_step=\(1,\)"),
        ({"decode_steps": 3}, "decode_steps=3, the scheduler 4"),
        ({"variants": ("full",)}, r"variants \['full'\]"),
    ],
)
def test_buckets_that_miss_a_step_are_refused_with_the_numbers(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(BUCKETS, **fields).check(SchedulerConfig(4, 32, 64, decode_steps=4))


def test_a_compile_after_warmup_is_logged_with_its_shape(caplog):
    engine = make_engine("planted", num_pages=90)
    engine.programs.warm = True
    with caplog.at_level(logging.WARNING):
        engine.programs.get(Program("decode", 1, 1))
    assert "decode[1,1] greedy was not among those compiled at warm-up" in caplog.text


def test_a_compile_after_warmup_raises_when_strict():
    engine = make_engine("planted", strict=True)
    engine.programs.warm = True
    with pytest.raises(RuntimeError, match=r"decode\[1,1\] greedy.*strict_compile"):
        engine.programs.get(Program("decode", 1, 1))


def test_the_cache_is_donated_and_exists_once():
    engine = make_engine(NAME, strict=True)
    old = engine._cache
    generate(engine, (SHORT, greedy_params(3)))
    assert all(page.is_deleted() for page in old.pages)
    for program, compiled in engine.programs.compiled().items():
        analysis = compiled.memory_analysis()
        assert analysis.alias_size_in_bytes >= engine.spec.total_bytes, program
        assert analysis.temp_size_in_bytes < engine.spec.total_bytes, f"{program} holds a second cache"


@pytest.mark.smoke
def test_greedy_follows_the_planted_table_with_exact_logprobs():
    engine, table = make_engine("planted"), planted_table()
    params = greedy_params(12, logprobs=3)
    [[seq]] = submit(engine, ([3, 8], params))
    drain(engine)
    assert seq.output_token_ids == greedy(table, 8, 12)
    last = 8
    for token, entries in zip(seq.output_token_ids, seq.logprobs, strict=True):
        exact = next_logprobs(table, last)
        best = np.argsort(-exact)[:3].tolist()
        assert set(entries) == {*best, token}
        for i, entry in entries.items():
            assert entry.logprob == pytest.approx(exact[i], abs=1e-4)
            assert entry.rank == 1 + int((exact > exact[i]).sum())
        last = token


def test_labels_are_scored_beside_the_chosen_token():
    """C39, and alternatives are kept by id: labels equal to the chosen token or to each other are one entry."""
    engine, table = make_engine("planted"), planted_table()
    labels = [7, 7, 40, greedy(table, 8, 1)[0]]
    [[seq], [top], [plain]] = submit(
        engine,
        ([3, 8], greedy_params(9, logprob_token_ids=labels)),
        ([3, 8], greedy_params(9, logprob_token_ids=labels, logprobs=2)),
        ([3, 8], greedy_params(9)),
    )
    drain(engine)
    last = 8
    for token, entries, with_top in zip(seq.output_token_ids, seq.logprobs, top.logprobs, strict=True):
        exact = next_logprobs(table, last)
        assert set(entries) == {token, *labels}
        assert set(with_top) == {token, *labels, *np.argsort(-exact)[:2].tolist()}
        for i, entry in (entries | with_top).items():
            assert entry.logprob == pytest.approx(exact[i], abs=1e-4)
        last = token
    assert plain.logprobs == [] and plain.output_token_ids == seq.output_token_ids


def test_end_ids_stop_ids_and_lengths():
    engine, table = make_engine("planted"), planted_table()
    chain = greedy(table, 8, 12)
    first = {token: chain.index(token) for token in chain}
    end = max(first, key=first.__getitem__)  # appears first at the latest place
    place = first[end]
    requests = [
        ([8], greedy_params(12)),
        ([8], greedy_params(12, ignore_eos=True)),
        ([8], greedy_params(12, ignore_eos=True, stop_token_ids=[end])),
        ([8], greedy_params(place)),
    ]
    sequences = [s for [s] in submit(engine, *requests, ends=frozenset([end]))]
    drain(engine)
    assert [len(s.output_token_ids) for s in sequences] == [place + 1, 12, place + 1, place]
    assert [s.finish_reason for s in sequences] == ["stop", "length", "stop", "length"]
    assert [s.stop_reason for s in sequences] == [None, None, end, None]


def test_samples_of_a_request_share_the_pages_of_its_prompt():
    engine = make_engine("planted")
    prompt = [4] * 41  # five full pages and one token
    submit(engine, (prompt, SamplingParams(n=4, seed=1, max_tokens=6)))
    most = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, engine.scheduler.allocator.num_used)
    # 5 shared pages, and for each sample one or two of its own; apart they would be 4 x 6.
    assert most <= 5 + 4
    engine.scheduler.allocator.check_invariants()


SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=2**63 + 11, max_tokens=12)


def test_a_seeded_request_draws_the_same_tokens_whatever_runs_beside_it():
    alone = generate(make_engine("planted"), ([3, 1, 4], SAMPLED))[0]
    others = [([9] * n, SamplingParams(seed=n, max_tokens=9 + n)) for n in (2, 30, 17)]
    engine = make_engine("planted", budget=9)
    assert generate(engine, ([3, 1, 4], SAMPLED), *others)[0] == alone
    assert generate(engine, *others, ([3, 1, 4], SAMPLED), ([5], greedy_params(20)))[3] == alone
    small = make_engine("planted", num_pages=12, steps=1)
    assert generate(small, *others, ([3, 1, 4], SAMPLED))[3] == alone


def test_high_seed_bits_and_sample_index_count():
    engine = make_engine("planted")
    [seqs, [low]] = submit(
        engine,
        ([3, 1, 4], SamplingParams(n=2, seed=2**63 + 11, max_tokens=12)),
        ([3, 1, 4], SamplingParams(seed=11, max_tokens=12)),
    )
    drain(engine)
    ids = [s.output_token_ids for s in (*seqs, low)]
    assert ids[0] != ids[1] and ids[0] != ids[2]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    engine = make_engine("planted", num_pages=12)
    with pytest.raises(RequestTooLong, match=r"150 tokens \+ max_tokens=20 .*=160 .* 88 tokens"):
        submit(engine, ([3] * 150, greedy_params(20)))
    with pytest.raises(RequestTooLong, match="88 tokens"):
        submit(engine, ([3] * 80, greedy_params(20)))
    out = generate(engine, ([3] * 80, greedy_params(9)))  # 88 slots; the last token needs none
    assert out[0] == greedy(planted_table(), 3, 9)


def test_token_ids_outside_the_vocabulary_are_refused():
    engine = make_engine("planted")
    with pytest.raises(ValueError, match=r"prompt_token_ids has 64; .* 0 to 63"):
        submit(engine, ([64], greedy_params(1)))
    with pytest.raises(ValueError, match="logit_bias has 99"):
        submit(engine, ([1], greedy_params(1, logit_bias={99: 1.0})))


@pytest.mark.parametrize("moment", ["before dispatch", "after dispatch", "in commit"])
def test_an_interrupt_in_the_middle_of_a_step_leaves_a_working_engine(moment, monkeypatch):
    engine = make_engine(NAME)
    [[running]] = submit(engine, (LONG, greedy_params(20)))
    engine.step()
    engine.step()

    def interrupt(*args, **kwargs):
        if moment == "after dispatch":  # the donated buffers are gone
            jax.tree.map(lambda x: x.delete(), engine._cache)
        raise KeyboardInterrupt

    target, name = (engine, "_pack") if moment != "in commit" else (engine.scheduler, "commit")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(target, name, interrupt)
        while True:
            engine.step()
    assert running.finish_reason == "abort"
    check_golden(*generate(engine, (SHORT, greedy_params(20)), (LONG, greedy_params(20))))


def test_a_failure_of_the_device_leaves_a_working_engine(monkeypatch):
    """It is found out late: the cache is then what a failed program was to return, and is not deleted."""
    engine = make_engine(NAME)
    submit(engine, (LONG, greedy_params(20)))
    engine.step()

    def fail(*args, **kwargs):
        engine._cache = jax.tree.map(lambda x: x[:1], engine._cache)  # every later use of it raises
        raise RuntimeError("INTERNAL: device")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="INTERNAL"):
        patch.setattr(engine.scheduler, "commit", fail)
        while True:
            engine.step()
    check_golden(*generate(engine, (SHORT, greedy_params(20)), (LONG, greedy_params(20))))


def test_steps_in_flight_behind_the_last_end_are_drained():
    """An end id is seen when the next step is already under way: its pages, and new weights, waited for it."""
    engine = make_engine("planted")
    end = greedy(planted_table(), 8, 3)[-1]
    [[seq]] = submit(engine, ([8], greedy_params(60)), ends=frozenset([end]))
    engine.step()
    engine.drain()
    assert not seq.finished, "a request is unfinished: nothing to drain"
    while not seq.finished:
        engine.step()
    assert engine.scheduler.allocator.num_used > 0, "a surplus step is in flight"
    engine.drain()
    assert engine.scheduler.allocator.num_used == 0 and not engine.has_unfinished
    [[seq]] = submit(engine, ([8], greedy_params(60)), ends=frozenset([end]))
    while not seq.finished:
        engine.step()
    engine.update_weights(engine.weights)
    assert engine.scheduler.allocator.num_used == 0


def test_a_stop_before_the_last_token_corrects_all_that_was_counted():
    engine = make_engine("planted")
    [[seq]] = submit(engine, ([8], greedy_params(6, logprobs=2)))
    drain(engine)
    six = [entries[token].logprob for token, entries in zip(seq.output_token_ids, seq.logprobs, strict=True)]
    assert seq.cumulative_logprob == pytest.approx(sum(six), abs=1e-6) and seq.finish_reason == "length"
    engine.finish(seq, "stop", "text", 4)
    assert len(seq.logprobs) == len(seq.output_token_ids) == seq.metrics.num_output_tokens == 4
    assert seq.cumulative_logprob == pytest.approx(sum(six[:4]), abs=1e-6)


def test_padded_rows_leave_the_last_token_alone(monkeypatch):
    """Two decode rows fill both tokens of a step, and two padded rows have no token of their own."""
    # draws each row's input id
    monkeypatch.setattr(
        "jaxinfer.step.forward", lambda model, config, weights, cache, batch: (batch.token_ids, cache)
    )
    echo = SimpleNamespace(unembed=lambda config, weights, ids: jax.nn.one_hot(ids, 16))
    rows = init_row_state(4, 8).replace(last_token=jnp.array([5, 7, 0, 0, 0], jnp.int32))
    batch = pack(
        [((0,), 3, (1,)), ((0,), 3, (2,))], page_size=8, num_rows=4, spare_row=4, from_row=[True, True]
    )
    output, _, _ = step(echo, None, None, None, rows, jax.tree.map(jnp.asarray, batch), None)
    assert output.sampled.tokens[:2].tolist() == [5, 7]


def test_abort_frees_the_pages_of_a_running_request():
    engine = make_engine(NAME)
    [[running], [other]] = submit(engine, (LONG, greedy_params(60)), (SHORT, greedy_params(20)))
    for _ in range(6):
        engine.step()
    engine.abort(running.request.request_id)
    drain(engine)
    assert running.finish_reason == "abort"
    assert_greedy(other, golden["short_greedy"], golden["short_gaps"])


def test_times_are_in_order():
    engine = make_engine("planted")
    [[seq]] = submit(engine, ([3] * 40, greedy_params(9)))
    seq.metrics.arrival_time = engine.clock()
    drain(engine)
    m = seq.metrics
    assert (
        m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.last_token_time <= m.finished_time
    )
    assert m.num_output_tokens == 9
    assert m.e2e_s == pytest.approx(m.ttft_s + 8 * m.tpot_s, abs=0.05)
