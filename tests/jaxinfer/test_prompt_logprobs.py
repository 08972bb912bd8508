"""Logprobs of prompt tokens against transformers' logits, whatever the chunks, the cache and the neighbours."""

import numpy as np
import pytest
from engines import (
    BUCKETS,
    GOLDEN,
    PLANTED_VOCAB,
    drain,
    generate,
    greedy_params,
    make_engine,
    planted_table,
    submit,
)
from planted import next_logprobs

from jaxinfer.programs.buckets import Buckets, score_program
from jaxinfer.request import Request, SequenceStatus, TopK
from jaxinfer.sampling.params import SamplingParams

NAME = "llama_gqa"
golden = np.load(GOLDEN / f"{NAME}.npz")
SHORT, LONG = golden["short_prompt"].tolist(), golden["long_prompt"].tolist()
# The engine's logits are within 1e-4 of the oracle's (float32, tests of the models): logprobs within twice that.
TOLERANCE = 2e-4


def log_softmax(logits):
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def check(entries, prompt, exact_at, num_logprobs):
    """Entry i holds the token i, and the best ones, under exact_at[i - 1] float64[V]; None: not compared."""
    assert len(entries) == len(prompt) and entries[0] is None
    for i in range(1, len(prompt)):
        exact = exact_at(i - 1)
        if exact is None:
            continue
        best = np.argsort(-exact, kind="stable")[:num_logprobs].tolist()
        assert set(entries[i]) == {*best, prompt[i]}
        for token, entry in entries[i].items():
            assert entry.logprob == pytest.approx(exact[token], abs=TOLERANCE)
            assert entry.rank == 1 + int((exact > exact[token]).sum())


def short_exact(i):
    return log_softmax(golden["short_logits"][i])


def long_exact(i):
    at = np.flatnonzero(golden["long_positions"] == i)
    return log_softmax(golden["long_logits"][at[0]]) if len(at) else None


def scored(max_tokens=0, num_logprobs=3):
    return greedy_params(max_tokens, prompt_logprobs=num_logprobs)


@pytest.mark.parametrize("budget", [4, 7, 16, 32])
def test_every_chunking_gives_the_same_entries(budget):
    engine = make_engine(NAME, budget=budget, partial=2)
    beside = [([7, 8, 9], greedy_params(30)), (LONG[:50], greedy_params(5))]
    [[short], [long], *_] = submit(engine, (SHORT, scored()), (LONG, scored(2)), *beside)
    drain(engine)
    check(short.prompt_logprobs, SHORT, short_exact, 3)
    check(long.prompt_logprobs, LONG, long_exact, 3)
    assert (short.output_token_ids, short.finish_reason) == ([], "length")
    assert long.output_token_ids == golden["long_greedy"][:2].tolist()


@pytest.mark.parametrize("num_logprobs", [0, 1, 20, -1])
def test_every_number_of_alternatives(num_logprobs):
    engine = make_engine("planted")
    prompt = [3, 3, 9, 40, 3]
    [[seq]] = submit(engine, (prompt, scored(0, num_logprobs)))
    drain(engine)
    most = PLANTED_VOCAB if num_logprobs == -1 else num_logprobs
    check(seq.prompt_logprobs, prompt, lambda i: next_logprobs(planted_table(), prompt[i]), most)


def test_prefix_hits_leave_no_entry_out():
    engine = make_engine(NAME)
    for _ in range(2):
        [[seq], _] = submit(engine, (SHORT, scored()), (SHORT, greedy_params(3)))
        drain(engine)
        check(seq.prompt_logprobs, SHORT, short_exact, 3)
    # The scored prompt took nothing from the cache; what it computed itself serves others.
    before = engine.scheduler.stats().num_cached_tokens
    generate(engine, (SHORT, greedy_params(3)))
    assert engine.scheduler.stats().num_cached_tokens - before == 16


def test_scoring_from_a_later_token_takes_the_pages_before_it():
    engine = make_engine(NAME)
    generate(engine, (SHORT, greedy_params(1)))
    request = Request("later", tuple(SHORT), scored(), score_from=18)
    [seq] = engine.add(request)
    drain(engine)
    assert seq.num_cached_tokens == 16
    assert seq.prompt_logprobs[:18] == [None] * 18
    full = [None, *seq.prompt_logprobs[1:]]
    assert len(full) == 24
    check(full, SHORT, lambda i: short_exact(i) if i >= 17 else None, 3)


def test_preempted_in_the_middle_of_a_prompt():
    # 14 pages: a row grows from 3 pages to 10 while a prompt of 9 comes in, 3 tokens a step.
    engine = make_engine(NAME, num_pages=15, budget=4, steps=1)
    [[growing]] = submit(engine, (SHORT[:20], greedy_params(60)))
    for _ in range(6):
        engine.step()
    [[long], [short]] = submit(engine, (LONG, scored(20, 20)), (SHORT, scored(20, 20)))
    when_preempted = set()
    while engine.has_unfinished:
        engine.step()
        if long.status is SequenceStatus.WAITING and long.num_preemptions:
            when_preempted.add(len(long.prompt_logprobs))
    assert any(1 < entries < len(LONG) for entries in when_preempted)
    assert growing.num_output_tokens == 60
    check(long.prompt_logprobs, LONG, long_exact, 20)
    check(short.prompt_logprobs, SHORT, short_exact, 20)


def test_the_first_of_several_samples_has_them():
    engine = make_engine("planted")
    prompt = [3, 9] * 12
    [seqs] = submit(engine, (prompt, SamplingParams(n=3, seed=0, max_tokens=4, prompt_logprobs=1)))
    drain(engine)
    check(seqs[0].prompt_logprobs, prompt, lambda i: next_logprobs(planted_table(), prompt[i]), 1)
    assert [len(seq.output_token_ids) for seq in seqs] == [4, 4, 4]


@pytest.mark.parametrize("budget", [5, 32])
def test_arrays_hold_what_dicts_hold(budget):
    """More alternatives than a request may name; in chunks, cut short as by a stop string, beside other rows."""
    engine = make_engine("planted", budget=budget, partial=2)
    prompt, table = [3, 9, 4, 40] * 5, planted_table()
    wanted = TopK(30, 25)
    [seq] = engine.add(Request("arrays", tuple(prompt), greedy_params(9), arrays=wanted))
    [tail] = engine.add(Request("tail", tuple(prompt), greedy_params(0), arrays=wanted, score_from=7))
    [[plain]] = submit(engine, (prompt, scored(9, 20)))
    while seq.num_output_tokens < 7:
        engine.step()
    engine.finish(seq, "stop", "x", 5)
    drain(engine)
    check(seq.prompt_logprobs, prompt, lambda i: next_logprobs(table, prompt[i]), 30)
    check(tail.prompt_logprobs[6:], prompt[6:], lambda i: next_logprobs(table, prompt[6 + i]), 30)
    assert tail.prompt_logprobs[:7] == [None] * 7 and len(tail.logprobs) == 0
    assert seq.output_token_ids == plain.output_token_ids[:5]
    last = [prompt[-1], *seq.output_token_ids]
    check([None, *seq.logprobs], last, lambda i: next_logprobs(table, last[i]), 25)
    arrays = seq.logprobs.arrays()
    assert arrays.token_ids.tolist() == seq.output_token_ids and arrays.top_ids.shape == (5, 25)
    assert seq.cumulative_logprob == pytest.approx(float(arrays.logprobs.sum()), abs=1e-6)
    narrow = seq.prompt_logprobs.narrow(2)
    assert len(narrow) == len(prompt) and len(narrow[3]) in (2, 3)


def test_arrays_survive_a_preemption():
    engine = make_engine(NAME, num_pages=15, budget=4, steps=1)
    submit(engine, (SHORT[:20], greedy_params(60)))
    for _ in range(6):
        engine.step()
    [long] = engine.add(Request("a", tuple(LONG), greedy_params(20), arrays=TopK(20, None)))
    submit(engine, (SHORT, scored(20, 20)))
    drain(engine)
    assert long.num_preemptions
    check(long.prompt_logprobs, LONG, long_exact, 20)


def test_a_whole_vocabulary_is_refused_beyond_the_cap(monkeypatch):
    engine = make_engine("planted")
    monkeypatch.setattr("jaxinfer.engine.MAX_LOGPROB_ENTRIES", 10 * PLANTED_VOCAB)
    submit(engine, ([3] * 10, scored(0, -1)), ([3] * 10, greedy_params(10, logprobs=-1)))
    with pytest.raises(ValueError, match=r"prompt_logprobs=-1 asks for 11 tokens x 64 .* at most 640"):
        submit(engine, ([3] * 11, scored(0, -1)))
    with pytest.raises(ValueError, match="logprobs=-1 asks for 11 tokens"):
        submit(engine, ([3], greedy_params(11, logprobs=-1)))
    with pytest.raises(ValueError, match=r"prompt_logprobs=64 .* \[-1, 20\]"):  # other spellings of "all"
        scored(0, 64)
    drain(engine)


def test_declared_score_programs_are_compiled_at_warmup():
    buckets = Buckets(
        BUCKETS.prefill,
        BUCKETS.decode,
        BUCKETS.decode_steps,
        BUCKETS.multi_step,
        prompt_logprobs=(20,),
    )
    engine = make_engine("planted", strict=True, buckets=buckets)
    engine.warmup()
    programs = len(engine.programs)
    generate(engine, ([3, 8] * 20, scored(2)))
    assert len(engine.programs) == programs
    with pytest.raises(ValueError, match=r"prompt_logprobs=0 \(compiled: \[20\]\)"):
        generate(engine, ([3, 8] * 20, scored(2, 0)))


def test_memory_grows_with_a_piece_of_the_prompt_not_with_all_of_it():
    """C44: with a large vocabulary, no program of a step holds logits of all its tokens."""
    engine = make_engine("wide", budget=1024, buckets=Buckets(((1024, 4),), (4,), 1, (4,)))
    vocab = engine.model_config.vocab_size
    generate(engine, ([5, 6, 7] * 50, scored(1, 1)), ([9] * 20, scored(0, 0)))
    wide = score_program(1024, 20)
    for program, compiled in engine.programs.compiled().items():
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        # A few copies of float32[64, V]; float32[1024, V] alone would be sixteen.
        assert temporaries < 6 * 64 * vocab * 4, (program, temporaries / (64 * vocab * 4))
    assert wide in engine.programs.compiled()
