"""Logits processors against numpy on the planted table, and what requests may hand to them."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import BUCKETS, ROWS, TOKENS, drain, generate, greedy_params, make_engine, planted_table, submit

from jaxinfer.sampling.logits_processors import ProcessorArgs
from jaxinfer.sampling.params import SamplingParams


def push(logits, rows, params):
    """Adds `strength` to the logit of `target`; forbids the newest token."""
    logits = logits + params["strength"][:, None] * jax.nn.one_hot(params["target"], logits.shape[1])
    newest = jnp.take_along_axis(rows.token_ids, rows.num_tokens[:, None] - 1, axis=1)
    return jnp.where(jnp.arange(logits.shape[1]) == newest, -jnp.inf, logits)


def expected(last, n, strength=0.0, target=0):
    table, ids = planted_table().astype(np.float64), []
    for _ in range(n):
        logits = table[last].copy()
        logits[target] += strength
        logits[last] = -np.inf
        last = int(logits.argmax())
        ids.append(last)
    return ids


def test_every_row_has_its_own_values_and_its_own_history():
    engine = make_engine("planted", logits_processors=(push,), budget=9)
    requests = [
        ([3] * 20, greedy_params(12, extra_args={"strength": 4.5, "target": 9})),
        ([8], greedy_params(12, extra_args={"strength": 3, "target": 40})),
        ([5, 6], greedy_params(12)),
    ]
    out = generate(engine, *requests)
    assert out == [expected(3, 12, 4.5, 9), expected(8, 12, 3.0, 40), expected(6, 12)]
    assert out[0].count(9) > 3, "the push is strong enough to show"


def test_a_sampled_row_never_draws_what_a_processor_forbids():
    engine = make_engine("planted", logits_processors=(push,))
    params = SamplingParams(temperature=5.0, seed=1, max_tokens=40, extra_args={"strength": 0.0, "target": 0})
    [[seq]] = submit(engine, ([3], params))
    drain(engine)
    ids = [3, *seq.output_token_ids]
    assert all(a != b for a, b in itertools.pairwise(ids))


def test_declared_args_need_no_compile_after_warmup():
    engine = make_engine(
        "planted",
        strict=True,
        logits_processors=(push,),
        logits_processor_args={"strength": 4.5, "target": 9},
        buckets=replace(
            BUCKETS, prefill=((TOKENS, ROWS),), decode=(ROWS,), multi_step=(ROWS,), variants=("greedy",)
        ),
    )
    engine.warmup()
    out = generate(engine, ([3], greedy_params(5)), ([3], greedy_params(5, extra_args={"strength": 0.0})))
    assert out == [expected(3, 5, 4.5, 9), expected(3, 5)]  # the declared values are the defaults


def test_extra_args_without_a_processor_are_refused():
    with pytest.raises(ValueError, match=r"extra_args need LLM\(logits_processors"):
        submit(make_engine("planted"), ([3], greedy_params(1, extra_args={"x": 1})))


def test_values_become_arrays_with_one_entry_per_row():
    args = ProcessorArgs({"scale": 1.5})
    args.learn({"on": True, "n": 3, "bias": [0.5, 1], "many": [[1, 2], [3, 4]]})
    batch = args.batch([{"n": 7, "bias": [1, 2]}, None], 3)
    assert {key: (str(value.dtype), value.shape) for key, value in batch.items()} == {
        "scale": ("float32", (3,)),
        "on": ("bool", (3,)),
        "n": ("int32", (3,)),
        "bias": ("float32", (3, 2)),
        "many": ("int32", (3, 2, 2)),
    }
    assert batch["n"].tolist() == [7, 0, 0] and batch["scale"].tolist() == [1.5] * 3
    assert batch["bias"].tolist() == [[1, 2], [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"bias": [1.0, 2.0, 3.0]}, r"\['bias'\] is float32\[3\]; .* float32\[2\]"),
        ({"n": 1.5}, r"\['n'\] is float32\[\]; .* int32\[\]"),
        ({"new": "text"}, "must be a number"),
        ({"new": [1, [2, 3]]}, "must be a number"),
        ({"new": 2**40}, "does not fit 32 bits"),
    ],
)
def test_values_of_another_type_or_length_are_refused(extra_args, message):
    args = ProcessorArgs({"bias": [0.0, 0.0], "n": 3})
    before = args.signature
    with pytest.raises(ValueError, match=message):
        args.learn(extra_args)
    assert args.signature == before
