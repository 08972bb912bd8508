"""Sampling against numpy in float64: exact support, exact probabilities, and the same token for a row anywhere.

Tolerance of logprobs: 1e-5. They are differences of float32 numbers below 32 (ulp 2e-6) and a log of a sum.
"""

from dataclasses import replace
from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxinfer.sampling.filters import argmax, best_tokens
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.sample import (
    RowState,
    SamplingBatch,
    SamplingRow,
    init_row_state,
    purpose_keys,
    record,
    row_key,
    sample,
    set_row,
    variant_of,
    why_no_token,
)

LOGPROB_TOLERANCE = 1e-5
# Larger than a block, smaller than two, and wide enough for rows that keep more than the head of 64.
VOCAB = 200

_sample = jax.jit(
    sample,
    static_argnames=("variant", "num_logprobs", "logprobs_mode", "logits_processors", "rows_at_once"),
)


def table(num_rows, vocab=VOCAB, scale=1.0, seed=0):
    """f32[B, V] of distinct logits."""
    return (np.random.default_rng(seed).normal(size=(num_rows, vocab)) * scale).astype(np.float32)


def run(logits, rows, *, tokens=None, positions=None, variant=None, labels=False, pad_to=16, **options):
    """`sample` on f32[B, V] logits for a list of SamplingRow; `tokens`: the known tokens of each row.

    Rows and vocabulary (with -inf) are padded to a few shapes, so that the tests share their programs.
    """
    count, vocab = logits.shape
    num_rows, padded_vocab = max(pad_to, -(-count // 64) * 64 if count > 16 else 0), max(vocab, VOCAB)
    padded = np.full((num_rows, padded_vocab), -np.inf, np.float32)
    padded[:count, :vocab] = logits
    token_ids = np.zeros((num_rows + 1, 32), np.int32)
    for i, ids in enumerate(tokens or ()):
        token_ids[i, : len(ids)] = ids
    at = np.zeros(num_rows, np.int32)
    at[:count] = positions if positions is not None else [len(ids) for ids in tokens or [()] * count]
    row_ids = np.full(num_rows, num_rows, np.int32)
    row_ids[:count] = range(count)
    if labels:
        options["logprob_token_ids"] = np.tile(np.arange(padded_vocab, dtype=np.int32), (num_rows, 1))
    output = _sample(
        padded,
        at,
        RowState(token_ids[:, 0], token_ids, np.zeros(num_rows + 1, np.int32)),
        row_ids,
        SamplingBatch.from_rows(rows, num_rows, padded_vocab),
        variant=variant or ("full" if variant_of(rows) == "full" else "sample"),
        **options,
    )
    output = jax.tree.map(lambda x: np.asarray(x)[:count], output)
    return replace(output, label_logprobs=output.label_logprobs[:, :vocab]) if labels else output


def row(seed=0, sample_index=0, prompt_len=0, end_ids=(), bad_words=(), **params):
    return SamplingRow(SamplingParams(**params), seed, sample_index, prompt_len, end_ids, bad_words)


def oracle(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """f64[V] probabilities after temperature, top_k, top_p, min_p; equal logits in the order of their ids."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    if temperature == 0:
        temperature, top_k = 1.0, 1
    x = logits[order].astype(np.float64)
    p = np.exp((x - x[0]) / temperature)
    p[top_k if top_k > 0 else len(p) :] = 0
    p /= p.sum()
    p[(np.cumsum(p) - p >= top_p) & (top_p < 1)] = 0
    p[p < min_p * p[0]] = 0
    out = np.zeros(len(p))
    out[order] = p / p.sum()
    return out


FILTERS = {
    "temperature": (0.0, 0.3, 1.7),
    "top_k": (1, 5, 64, 65, 150),
    "top_p": (0.2, 0.9),
    "min_p": (0.05, 0.5),
}
PAIRS = [{a: x, b: y} for a, b in combinations(FILTERS, 2) for x in FILTERS[a] for y in FILTERS[b]] + [
    {a: x} for a in FILTERS for x in FILTERS[a]
]


@pytest.mark.parametrize("vocab", [50, VOCAB])
def test_processed_logprobs_are_the_exact_distribution_for_every_pair_of_filters(vocab):
    settings = [s for s in PAIRS if s.get("top_k", 0) <= vocab]
    logits = table(len(settings), vocab)
    out = run(logits, [row(**s) for s in settings], logprobs_mode="processed", labels=True)
    for got, x, setting in zip(out.label_logprobs, logits, settings, strict=True):
        want = oracle(x, **setting)
        np.testing.assert_array_equal(np.isfinite(got), want > 0, err_msg=str(setting))
        np.testing.assert_allclose(got[want > 0], np.log(want[want > 0]), atol=LOGPROB_TOLERANCE)


DRAWS = [
    dict(temperature=1.0),
    dict(temperature=0.7),
    dict(temperature=0.0),
    dict(top_k=10),
    dict(top_k=100),
    dict(top_p=0.9),
    dict(top_p=0.3),
    dict(min_p=0.1),
    dict(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
    dict(top_k=120, top_p=0.95),
    dict(temperature=1.2, top_p=0.97, min_p=0.02),
    dict(temperature=0.9, top_p=0.8, top_k=50),
]


# Rows with these fields need the variant "full".
EXTRAS: list[dict] = [
    dict(logit_bias={7: 2.0, 11: -1.5}),
    dict(logit_bias={7: 2.0}, top_k=10),
    dict(allowed_token_ids=list(range(40, 160))),
    dict(allowed_token_ids=list(range(40, 160)), top_p=0.8, temperature=1.3),
    dict(allowed_token_ids=[5]),
]
NUM_SEEDS, NUM_POSITIONS = 100, 200  # 20,000 draws of each setting


@partial(jax.jit, static_argnames=("variant", "num_rows", "rows_at_once"))
def _draw_many(logits, batch, positions, *, variant, num_rows, rows_at_once):
    """i32[positions, all rows] from the same logits f32[V] in each row, `num_rows` rows to a batch."""
    state, row_ids = init_row_state(1, 1), jnp.zeros(num_rows, jnp.int32)
    batches = jax.tree.map(lambda x: x.reshape(-1, num_rows, *x.shape[1:]), batch)

    def one(position, batch):
        at, here = jnp.full(num_rows, position), jnp.tile(logits, (num_rows, 1))
        return sample(here, at, state, row_ids, batch, variant=variant, rows_at_once=rows_at_once).tokens

    def all_batches(position):
        return jax.lax.map(partial(one, position), batches).reshape(-1)

    return jax.lax.map(all_batches, positions)


def assert_draws_follow_the_oracle(settings, scale, *, variant="sample", num_rows, rows_at_once=None):
    x = table(1, scale=scale, seed=3)[0]
    rows = [row(seed=s << 32, **setting) for setting in settings for s in range(NUM_SEEDS)]
    neutral = row(logit_bias={0: 0.0}) if variant == "full" else row()  # brings the extras that "full" reads
    padded = rows + [neutral] * (-len(rows) % num_rows + (num_rows if variant == "full" else 0))
    tokens = _draw_many(
        x,
        SamplingBatch.from_rows(padded, len(padded), VOCAB),
        np.arange(NUM_POSITIONS),
        variant=variant,
        num_rows=num_rows,
        rows_at_once=rows_at_once or num_rows,
    )
    tokens = np.asarray(tokens)[:, : len(rows)].reshape(NUM_POSITIONS, len(settings), NUM_SEEDS)
    for i, setting in enumerate(settings):
        counts = np.bincount(tokens[:, i].ravel(), minlength=VOCAB)
        filters = {name: value for name, value in setting.items() if name in FILTERS}
        want = oracle(with_bias(x, setting), **filters)
        assert not counts[want == 0].any(), f"{setting}: a token outside the support"
        common = want * counts.sum() >= 5
        observed = np.append(counts[common], counts[~common].sum())
        expected = np.append(want[common], want[~common].sum()) * counts.sum()
        kept = expected > 0
        if kept.sum() > 1:
            p = stats.chi2.sf(((observed - expected)[kept] ** 2 / expected[kept]).sum(), kept.sum() - 1)
            # Some 150 settings are drawn by fixed seeds: 1e-5 is passed by chance in 1 of 700 choices of seeds.
            assert p > 1e-5, f"{setting}: p = {p}"


def with_bias(x, setting):
    """f32[V] after logit_bias and allowed_token_ids."""
    x = x.copy()
    for token, bias in setting.get("logit_bias", {}).items():
        x[token] += bias
    allowed = setting.get("allowed_token_ids")
    return x if allowed is None else np.where(np.isin(np.arange(len(x)), allowed), x, -np.inf)


@pytest.mark.parametrize("scale", [0.5, pytest.param(2.0, marks=pytest.mark.slow)], ids=["flat", "peaked"])
def test_draws_follow_the_exact_distribution_for_every_pair_of_filters(scale):
    """20,000 draws of each setting in mixed batches; flat rows keep more than the head."""
    assert_draws_follow_the_oracle(DRAWS + PAIRS, scale, num_rows=100)


def test_draws_of_the_full_variant_follow_the_exact_distribution():
    assert_draws_follow_the_oracle(DRAWS + EXTRAS, 0.5, variant="full", num_rows=100)


@pytest.mark.parametrize("variant", ["sample", "full"])
@pytest.mark.parametrize("num_rows, rows_at_once", [(1, 1), (8, 1), (8, 3), (64, 64)])
@pytest.mark.slow
def test_draws_follow_the_exact_distribution_at_every_batch_size(variant, num_rows, rows_at_once):
    settings = DRAWS + (EXTRAS if variant == "full" else [])
    assert_draws_follow_the_oracle(
        settings, 0.7, variant=variant, num_rows=num_rows, rows_at_once=rows_at_once
    )


def test_a_row_gets_the_same_token_in_every_batch_variant_and_row():
    rows = [row(seed=2**40 + i, sample_index=i % 3, **s) for i, s in enumerate(DRAWS)]
    logits, positions = table(len(rows), scale=0.7), list(range(5, 5 + len(rows)))
    want = run(logits, rows, positions=positions).tokens

    def tokens(order, **options):
        picked = [rows[i] for i in order]
        at = [positions[i] for i in order]
        return run(logits[list(order)], picked, positions=at, **options).tokens

    alone = [tokens([i], pad_to=1)[0] for i in range(len(rows))]
    np.testing.assert_array_equal(alone, want)
    order = np.random.default_rng(1).permutation(len(rows))
    np.testing.assert_array_equal(tokens(order, pad_to=17, rows_at_once=5), want[order])
    # A neighbour with a bias turns the whole batch into the variant "full".
    biased = [*rows, row(logit_bias={0: 1.0})]
    mixed = run(np.concatenate([logits, logits[:1]]), biased, positions=[*positions, 0])
    np.testing.assert_array_equal(mixed.tokens[:-1], want)


def test_padding_of_the_vocabulary_does_not_change_the_draw():
    rows = [row(seed=i, **s) for i, s in enumerate(DRAWS)]
    logits = table(len(rows), scale=0.7)
    padded = np.pad(logits, ((0, 0), (0, 100)), constant_values=-np.inf)
    np.testing.assert_array_equal(run(padded, rows).tokens, run(logits, rows).tokens)


@pytest.mark.parametrize("vocab", [1, 5, 64, 127, 5000])
def test_all_spellings_of_greedy_are_the_argmax_with_the_lowest_id(vocab):
    logits = np.round(table(5, vocab))  # many ties
    logits[1] = 0.0
    logits[1, vocab // 2 :] = -0.0  # equal to 0.0
    logits[2, : vocab // 2] = -np.inf
    want = np.argmax(logits, -1)
    tokens, peak = argmax(jnp.asarray(logits))
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_array_equal(peak, logits.max(-1))
    np.testing.assert_array_equal(_sample(logits, want, None, None, None, variant="greedy").tokens, want)
    for spelling in (
        dict(temperature=0.0),
        dict(top_k=1),
        dict(top_p=1e-9),
        dict(temperature=1e-6),
    ):
        rows = [row(seed=i, **spelling) for i in range(5)]
        np.testing.assert_array_equal(run(logits, rows).tokens, want, err_msg=str(spelling))


@pytest.mark.parametrize(
    "vocab, count", [(1, 1), (100, 0), (64, 64), (1024, 64), (1025, 64), (5000, 3), (70000, 64)]
)
def test_best_tokens_are_a_stable_sort(vocab, count):
    """The way through blocks must lose no token at the cut and keep ties in the order of ids."""
    logits = np.round(table(3, vocab) * 2)  # about 15 values: ties everywhere, across blocks too
    logits[1, ::7] = -0.0
    logits[2, : vocab // 2] = -np.inf
    values, ids = best_tokens(jnp.asarray(logits), count)
    want = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, want, -1))


def support(logits, **setting):
    """The ids that survive, from processed logprobs."""
    out = run(logits[None], [row(**setting)], logprobs_mode="processed", labels=True)
    return set(np.flatnonzero(np.isfinite(out.label_logprobs[0])).tolist())


def test_order_of_the_filters():
    """Temperature comes before top_p; top_p is measured on what top_k left; min_p is about probabilities."""
    log = lambda *p: np.log(np.array(p, np.float32))  # noqa: E731
    assert support(log(0.6, 0.3, 0.1), temperature=0.5, top_p=0.7) == {0}
    assert support(log(0.4, 0.3, 0.2, 0.1), top_k=3, top_p=0.75) == {0, 1}
    assert support(log(0.6, 0.3, 0.08, 0.02), min_p=0.2) == {0, 1}


def test_top_k_keeps_exactly_k():
    distinct = table(1)[0]
    order = np.argsort(-distinct)
    for k in (1, 2, 63, 64, 65, VOCAB - 1, VOCAB):
        assert support(distinct, top_k=k) == set(order[:k].tolist()), k
    for off in (0, -1, VOCAB + 1, 10**9):
        assert len(support(distinct, top_k=off)) == VOCAB, off
    tied = np.zeros(VOCAB, np.float32)
    tied[10:15] = 1
    assert support(tied, top_k=2) == {10, 11}
    assert support(tied, top_k=105) == set(range(10, 15)) | set(range(100)) | {100, 101, 102, 103, 104}


@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_small_top_k_with_top_p_on_a_flat_row_is_never_empty(temperature):
    flat = np.zeros(100, np.float32)
    assert support(flat, top_k=1, top_p=0.8, temperature=temperature) == {0}
    assert support(flat, top_k=2, top_p=0.8, temperature=temperature) == {0, 1}
    assert support(flat, top_p=0.795, temperature=temperature) == set(range(80))


def test_tiny_temperatures_are_greedy_and_never_nan():
    logits = table(1, scale=1.0)[0]
    logits[:4] = 60, -60, 59, -np.inf
    rows = [row(seed=i, temperature=t) for i, t in enumerate((0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 2e-2))]
    out = run(np.tile(logits, (len(rows), 1)), rows, logprobs_mode="processed", labels=True)
    np.testing.assert_array_equal(out.tokens, 0)
    np.testing.assert_allclose(out.logprob, 0, atol=LOGPROB_TOLERANCE)
    assert not np.isnan(out.label_logprobs).any()


def test_a_row_with_nothing_allowed_still_gives_a_token():
    rows = [row(), row(top_p=0.5), row(top_k=80), row(temperature=0)]
    out = run(np.full((4, VOCAB), -np.inf, np.float32), rows)
    np.testing.assert_array_equal(out.tokens, 0)
    run(np.full((4, VOCAB), np.nan, np.float32), rows)  # returns


def test_keys_use_all_seed_bits_and_equal_jax():
    for seed, index in ((0, 0), (5, 1), (2**32 + 5, 1), (2**64 - 1, 7), (2**63, 2**31)):
        key = jax.random.wrap_key_data(
            jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32), impl="threefry2x32"
        )
        np.testing.assert_array_equal(
            row_key(seed, index), jax.random.key_data(jax.random.fold_in(key, index))
        )


def test_random_numbers_differ_by_seed_word_sample_index_position_and_purpose():
    cases = [(s, i, p, u) for s in (3, 3 + 2**32) for i in (0, 1) for p in (0, 1) for u in (0, 1, 2)]
    keys = jnp.array([row_key(s, i) for s, i, _, _ in cases], jnp.uint32)
    words = [
        tuple(np.asarray(jax.random.key_data(purpose_keys(keys[j : j + 1], jnp.array([p]), u)))[0].tolist())
        for j, (_, _, p, u) in enumerate(cases)
    ]
    assert len(set(words)) == len(cases)


def changed(logits, rows, tokens):
    """f32[B, V]: log-softmax after the penalties."""
    return run(logits, rows, tokens=tokens, logprobs_mode="processed", labels=True).label_logprobs


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def test_penalties_count_the_right_tokens():
    """Repetition counts prompt and output, presence and frequency the output alone (C = id 2 is in the prompt)."""
    logits = np.array([[3, 2.9, -1, 0.5]], np.float32)
    prompt = [0, 0, 2, 0]
    cases = [
        (dict(repetition_penalty=2.0), [], [1.5, 2.9, -2, 0.5]),
        (dict(presence_penalty=2.0), [], [3, 2.9, -1, 0.5]),
        (dict(frequency_penalty=1.0), [], [3, 2.9, -1, 0.5]),
        (dict(presence_penalty=2.0), [0, 0], [1, 2.9, -1, 0.5]),
        (dict(frequency_penalty=1.0), [0, 0], [1, 2.9, -1, 0.5]),
        (
            dict(repetition_penalty=2.0, frequency_penalty=-0.5, presence_penalty=1.0),
            [3, 3, 0],
            [1, 2.9, -2, 0.25],
        ),
    ]
    for params, output, want in cases:
        got = changed(logits, [row(prompt_len=4, **params)], [prompt + output])[0]
        np.testing.assert_allclose(got, log_softmax(want), atol=LOGPROB_TOLERANCE, err_msg=str(params))


def test_penalties_leave_padding_and_neighbours_alone():
    """Rows of length 3 and 30; id 0 is what padding holds and is not penalised unless it was used."""
    logits = table(3, 40)
    long = list(range(1, 31))
    rows = [
        row(prompt_len=1, repetition_penalty=1.5, frequency_penalty=1.0),
        row(prompt_len=2),
        row(prompt_len=9),
    ]
    got = changed(logits, rows, [[5, 6, 6], long, [7]])
    want = logits[0].astype(np.float64)
    for token in (5, 6):
        want[token] = want[token] / 1.5 if want[token] > 0 else want[token] * 1.5
    want[6] -= 2
    np.testing.assert_allclose(got[0], log_softmax(want), atol=LOGPROB_TOLERANCE)
    np.testing.assert_allclose(got[1], log_softmax(logits[1]), atol=LOGPROB_TOLERANCE)
    np.testing.assert_allclose(got[2], log_softmax(logits[2]), atol=LOGPROB_TOLERANCE)


def test_presence_penalty_sees_every_new_token():
    """Step by step through `record`: greedy on one table row, so each token is taken once while the next is close."""
    logits = np.array([[2.0, 1.5, 1.0, 0.3, -3.0]], np.float32)
    params = [row(temperature=0.0, presence_penalty=1.2)]
    batch = SamplingBatch.from_rows(params, 1, 5)
    rows, got, want, used = init_row_state(1, 32), [], [], set()
    for step in range(12):
        at = jnp.array([step], jnp.int32)
        token = _sample(logits, at, rows, jnp.array([0]), batch, variant="full").tokens
        rows = record(rows, jnp.array([0]), token, jnp.array([True]))
        got.append(int(token[0]))
        want.append(int(np.argmax([x - 1.2 * (i in used) for i, x in enumerate(logits[0])])))
        used.add(want[-1])
    assert got == want and len(used) > 2


def test_bias_and_allowed_tokens_act_before_penalties():
    logits = table(2, 100)
    rows = [
        row(logit_bias={3: 2.5, 99: -100.0, 0: 1.0}, repetition_penalty=2.0),
        row(allowed_token_ids=[31, 32, 99], top_k=2),
    ]
    got = changed(logits, rows, [[3], [1]])
    want = logits[0].astype(np.float64)
    want[[3, 99, 0]] += 2.5, -100, 1
    want[3] = want[3] / 2 if want[3] > 0 else want[3] * 2
    np.testing.assert_allclose(
        got[0], log_softmax(want), atol=LOGPROB_TOLERANCE * 10
    )  # one logprob near -100
    kept = sorted([31, 32, 99], key=lambda i: -logits[1, i])[:2]
    assert set(np.flatnonzero(np.isfinite(got[1]))) == set(kept)


def test_min_tokens_bans_every_end_id_until_enough_outputs_exist():
    logits = np.zeros((4, 12), np.float32)
    rows = [row(prompt_len=2, min_tokens=3, end_ids=(5, 7, 9)) for _ in range(3)] + [
        row(prompt_len=2, end_ids=(5,))
    ]
    got = changed(logits, rows, [[1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 2], [1, 1]])
    banned = [set(np.flatnonzero(~np.isfinite(x)).tolist()) for x in got]
    assert banned == [{5, 7, 9}, {5, 7, 9}, set(), set()]


def test_bad_words_ban_the_last_token_of_a_word_that_the_output_has_begun():
    words = [[4], [1, 2, 3], [6, 7]]
    logits = np.zeros((5, 12), np.float32)
    tokens = [[0, 1, 2], [1, 2], [0, 1], [9, 6], [0, 2, 1, 2]]  # the first token is the prompt
    got = changed(logits, [row(prompt_len=1, bad_words=words)] * 5, tokens)
    banned = [set(np.flatnonzero(~np.isfinite(x)).tolist()) for x in got]
    # Row 1: "1" is the prompt, so the output has not begun the word.
    assert banned == [{3, 4}, {4}, {4}, {4, 7}, {3, 4}]


def test_full_variant_matches_numpy_with_random_penalties_in_one_batch():
    rng = np.random.default_rng(7)
    logits, rows, tokens = table(8, 90, scale=2.0, seed=7), [], []
    for i in range(8):
        tokens.append(rng.integers(0, 90, 12 + i).tolist())
        rows.append(
            row(
                prompt_len=6,
                presence_penalty=float(rng.uniform(-2, 2)),
                frequency_penalty=float(rng.uniform(-2, 2)),
                repetition_penalty=float(rng.uniform(0.5, 2)),
                logit_bias={int(j): float(rng.normal()) for j in rng.choice(90, i, replace=False)},
                allowed_token_ids=range(0, 90 - i),
            )
        )
    got = changed(logits, rows, tokens)
    for x, r, known, result in zip(logits.astype(np.float64), rows, tokens, got, strict=True):
        p = r.params
        for token, bias in (p.logit_bias or {}).items():
            x[token] += bias
        x[len(p.allowed_token_ids) :] = -np.inf
        for token in set(known):
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        for token in known[6:]:
            x[token] -= p.frequency_penalty
        for token in set(known[6:]):
            x[token] -= p.presence_penalty
        np.testing.assert_allclose(result, log_softmax(x), atol=2 * LOGPROB_TOLERANCE)


# One setting per field that changes a distribution; bad_words and min_tokens go with the row.
FIELDS = {
    "temperature": dict(temperature=0.6),
    "top_k": dict(top_k=12),
    "top_p": dict(top_p=0.8),
    "min_p": dict(min_p=0.08),
    "presence": dict(presence_penalty=1.5),
    "frequency": dict(frequency_penalty=-0.75),
    "repetition": dict(repetition_penalty=1.3),
    "bias": dict(logit_bias={3: 4.0, 17: -100.0, 40: 2.5}),
    "allowed": dict(allowed_token_ids=(*range(0, 90, 2), 17, 41)),
    "min_tokens": dict(min_tokens=9, end_ids=(8, 41)),
    "bad_words": dict(bad_words=((11,), (5, 40), (40, 6))),
}
KNOWN, PROMPT_LEN = [7, 40, 9, 40, 3, 8, 40, 2, 5], 5  # four outputs: 8, 40, 2, 5


def edited(logits, setting):
    """f64[V] logits before the temperature, field by field as documented."""
    x = logits.astype(np.float64)
    for token, bias in setting.get("logit_bias", {}).items():
        x[token] += bias
    if "allowed_token_ids" in setting:
        x[np.setdiff1d(np.arange(len(x)), setting["allowed_token_ids"])] = -np.inf
    output = KNOWN[PROMPT_LEN:]
    if len(output) < setting.get("min_tokens", 0):
        x[list(setting["end_ids"])] = -np.inf
    for word in setting.get("bad_words", ()):
        if output[len(output) - len(word) + 1 :] == list(word[:-1]):
            x[word[-1]] = -np.inf
    r = setting.get("repetition_penalty", 1.0)
    for token in set(KNOWN):
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= setting.get("presence_penalty", 0.0)
        x[token] -= setting.get("frequency_penalty", 0.0) * output.count(token)
    return x


def test_every_field_and_every_pair_of_fields_gives_the_distribution_that_numpy_computes():
    names = [(name,) for name in FIELDS] + list(combinations(FIELDS, 2))
    settings = [{k: v for name in pair for k, v in FIELDS[name].items()} for pair in names]
    logits = table(len(settings), 90, scale=2.0, seed=11)
    rows = [row(prompt_len=PROMPT_LEN, **setting) for setting in settings]
    out = run(
        logits, rows, tokens=[KNOWN] * len(rows), logprobs_mode="processed", labels=True, variant="full"
    )
    for pair, setting, x, got, token in zip(
        names, settings, logits, out.label_logprobs, out.tokens, strict=True
    ):
        filters = {k: setting[k] for k in ("temperature", "top_k", "top_p", "min_p") if k in setting}
        want = oracle(edited(x, setting), **filters)
        np.testing.assert_array_equal(np.isfinite(got), want > 0, err_msg=str(pair))
        np.testing.assert_allclose(
            got[want > 0], np.log(want[want > 0]), atol=2 * LOGPROB_TOLERANCE, err_msg=str(pair)
        )
        assert want[token] > 0, f"{pair}: a token outside the support was drawn"


def test_raw_logprobs_describe_the_model_and_processed_ones_the_draw():
    p = np.array([0.5, 0.3, 0.2])
    logits = np.tile(np.log(p).astype(np.float32), (16, 1))
    rows = [row(seed=s, temperature=0.5, top_k=2, repetition_penalty=1.2, prompt_len=1) for s in range(16)]
    tokens = [[1]] * 16
    raw = run(logits, rows, tokens=tokens, num_logprobs=3)
    np.testing.assert_allclose(raw.logprob, np.log(p)[raw.tokens], atol=LOGPROB_TOLERANCE)
    np.testing.assert_array_equal(raw.top_ids, np.tile([0, 1, 2], (16, 1)))
    np.testing.assert_array_equal(raw.rank, raw.tokens + 1)
    processed = run(logits, rows, tokens=tokens, num_logprobs=3, logprobs_mode="processed")
    np.testing.assert_array_equal(processed.tokens, raw.tokens)
    changed_logits = np.log(p)
    changed_logits[1] *= 1.2
    want = oracle(changed_logits, temperature=0.5, top_k=2)
    np.testing.assert_allclose(processed.logprob, np.log(want[raw.tokens]), atol=LOGPROB_TOLERANCE)
    kept = np.argsort(-want, kind="stable")[:2]
    np.testing.assert_array_equal(processed.top_ids[:, :2], np.tile(kept, (16, 1)))
    assert np.isneginf(processed.top_logprobs[:, 2]).all()


def test_logprobs_of_zero_alternatives_labels_and_greedy():
    logits = table(2)
    want = np.stack([log_softmax(x) for x in logits])
    labels = np.array([[3, 199], [0, 0]], np.int32)
    arguments = (logits, np.zeros(2, np.int32), None, None, None)
    out = _sample(*arguments, variant="greedy", num_logprobs=0, logprob_token_ids=labels)
    assert out.top_ids.shape == out.top_logprobs.shape == (2, 0)
    np.testing.assert_allclose(out.logprob, want.max(-1), atol=LOGPROB_TOLERANCE)
    np.testing.assert_allclose(
        out.label_logprobs, np.take_along_axis(want, labels, 1), atol=LOGPROB_TOLERANCE
    )
    np.testing.assert_array_equal(out.rank, 1)
    out = _sample(*arguments, variant="greedy", num_logprobs=VOCAB)
    np.testing.assert_array_equal(out.top_ids, np.argsort(-logits, -1))
    np.testing.assert_allclose(out.top_logprobs, -np.sort(-want, -1), atol=LOGPROB_TOLERANCE)
    out = _sample(*arguments, variant="greedy", num_logprobs=1, logprobs_mode="processed")
    np.testing.assert_array_equal(out.logprob, 0)
    assert _sample(*arguments, variant="greedy").logprob is None


def test_rank_counts_tied_tokens_with_lower_ids():
    logits = np.tile(np.array([1, 2, 2, 2, 0], np.float32), (16, 1))
    out = run(logits, [row(seed=seed) for seed in range(16)], num_logprobs=0)
    rank_of = dict(zip(out.tokens.tolist(), out.rank.tolist(), strict=True))
    assert rank_of.items() >= {1: 1, 2: 2, 3: 3}.items()


def forbid_last_token(logits, rows: RowState, params):
    last = jnp.take_along_axis(rows.token_ids, rows.num_tokens[:, None] - 1, axis=1)
    return logits.at[jnp.arange(len(logits))[:, None], last].add(-params["strength"][:, None])


def test_logits_processors_come_before_temperature_in_every_variant():
    logits = np.tile(np.array([5, 4, 3], np.float32), (2, 1))
    options = dict(
        tokens=[[0], [1, 0]],
        logits_processors=(forbid_last_token,),
        processor_params={"strength": jnp.array([3.0, 0.5])},
        pad_to=2,
    )
    rows = [row(temperature=0.0), row(temperature=0.0)]
    for variant in ("greedy", "sample"):
        np.testing.assert_array_equal(run(logits, rows, variant=variant, **options).tokens, [1, 0])
    out = run(logits, [row(temperature=0.5)] * 2, num_logprobs=3, logprobs_mode="processed", **options)
    want = oracle(np.array([2.0, 4, 3]), temperature=0.5)
    np.testing.assert_allclose(out.top_logprobs[0], np.sort(np.log(want))[::-1], atol=LOGPROB_TOLERANCE)


def test_row_state_records_active_rows_only():
    rows = set_row(init_row_state(3, 4), 1, jnp.array([7, 8, 0, 0]), 2)
    row_ids, tokens = jnp.array([1, 0, 3]), jnp.array([9, 5, 6])
    for _ in range(3):
        rows = record(rows, row_ids, tokens, jnp.array([True, False, False]))
    np.testing.assert_array_equal(rows.token_ids[:3], [[0, 0, 0, 0], [7, 8, 9, 9], [0, 0, 0, 0]])
    np.testing.assert_array_equal(rows.num_tokens[:3], [0, 4, 0])
    np.testing.assert_array_equal(rows.last_token[:3], [0, 9, 0])


def test_variant_is_the_cheapest_that_serves_all_rows():
    greedy, plain, full = row(temperature=0.0), row(), row(min_tokens=1, end_ids=(3,))
    assert variant_of([greedy, greedy]) == "greedy"
    assert variant_of([greedy, plain]) == "sample"
    assert (
        variant_of([row(min_tokens=9, ignore_eos=True)]) == "sample"
    )  # no token ends it: nothing to suppress
    assert variant_of([greedy, full]) == "full"
    assert SamplingBatch.from_rows([plain], 4, 10).extras is None


@pytest.mark.parametrize("variant", ["sample", "full"])
def test_a_missing_batch_is_refused(variant):
    with pytest.raises(ValueError, match=variant):
        sample(
            jnp.zeros((1, 3)),
            jnp.zeros(1, int),
            init_row_state(1, 2),
            jnp.zeros(1, int),
            None,
            variant=variant,
        )


def test_any_draws_what_greedy_and_sample_draw():
    """One program for both: a batch of greedy rows takes the branch of the argmax, and a mixed one must not."""
    logits = table(4, 300)
    greedy = [row(seed=i, temperature=0.0) for i in range(4)]
    mixed = [row(seed=i, temperature=t) for i, t in enumerate((0.0, 1.0, 0.7, 0.0))]
    for rows in (greedy, mixed):
        drawn = [
            run(logits, rows, tokens=[(1, 2)] * 4, variant=variant).tokens for variant in ("any", "sample")
        ]
        np.testing.assert_array_equal(*drawn)
        best = np.argmax(logits, -1)
        np.testing.assert_array_equal(drawn[0][[0, 3]], best[[0, 3]])
        assert (rows is greedy) == bool(np.all(drawn[0] == best))


NOT_FINITE = {
    "one nan": ([150], np.nan),
    "one nan of the other sign": ([3], -np.float32(np.nan)),
    "one infinity": ([70], np.inf),
    "all nan": (slice(None), np.nan),
    "all infinite": (slice(None), np.inf),
    "no candidate": (slice(None), -np.inf),
}


@pytest.mark.parametrize("kind", NOT_FINITE)
@pytest.mark.parametrize("variant", ["greedy", "sample", "any", "full"])
@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_the_peak_of_a_row_that_cannot_be_sampled_is_not_finite(kind, variant, num_logprobs):
    """In every variant and with every filter; rows beside it draw as without it. Nothing hangs."""
    rows = [row(seed=i, **fields) for i, fields in enumerate(DRAWS)]
    if variant == "greedy":
        rows = [row(temperature=0) for _ in DRAWS]
    if variant == "full":
        rows = [row(seed=i, **fields, presence_penalty=0.5) for i, fields in enumerate(DRAWS)]
    logits = table(len(rows), scale=0.7)
    clean = run(logits, rows, variant=variant, num_logprobs=num_logprobs)
    assert np.isfinite(clean.peak).all()
    where, value = NOT_FINITE[kind]
    for parity in (0, 1):
        bad = np.arange(len(rows)) % 2 == parity
        spoilt = logits.copy()
        for i in np.flatnonzero(bad):
            spoilt[i, where] = value
        found = run(spoilt, rows, variant=variant, num_logprobs=num_logprobs)
        assert not np.isfinite(found.peak[bad]).any()
        assert [why_no_token(float(peak)) is None for peak in found.peak] == (~bad).tolist()
        assert (
            np.array(["no token is left" in why_no_token(float(p)) for p in found.peak[bad]])
            == (kind == "no candidate")
        ).all()
        np.testing.assert_array_equal(found.tokens[~bad], clean.tokens[~bad])
        assert ((found.tokens >= 0) & (found.tokens < VOCAB)).all()
