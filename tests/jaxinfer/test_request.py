import copy
import dataclasses
import pickle

import numpy as np
import pytest

from jaxinfer.outputs import RequestMetrics
from jaxinfer.request import Request, Sequence
from jaxinfer.sampling.params import SamplingParams


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    expected = {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "ignore_eos": False,
        "min_tokens": 0,
        "max_tokens": 16,
        "logprobs": None,
        "prompt_logprobs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "detokenize": True,
        "truncate_prompt_tokens": None,
    }
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 10**6, 1.5, True, "2"]),
        ("temperature", [-1, 1e9, float("nan"), float("inf"), "1", True, None]),
        ("top_p", [-1, 0, 1.5, float("nan")]),
        ("top_k", [-2, 1.0, True, 2**40]),
        ("min_p", [-0.1, 2, float("nan")]),
        ("repetition_penalty", [0, -1, float("inf")]),
        ("presence_penalty", [-2.1, 3, float("nan")]),
        ("frequency_penalty", [-2.1, 3, float("nan")]),
        ("seed", [-2, 2**64, 1.5, True]),
        ("min_tokens", [-1, 17, 1.5]),
        ("max_tokens", [-1, 2**40, 1.0]),
        ("logprobs", [-2, 21, True]),
        ("prompt_logprobs", [-2, 21, 128_000]),
        ("truncate_prompt_tokens", [0, -2]),
        ("stop", ["", [""], ["", "X"], ["x"] * 65, "x" * 1001, [3], 3, {"a": 1}]),
        ("bad_words", [[""], "word", [b"x"], ["x"] * 1025]),
        ("stop_token_ids", [[-1], ["a"], [1.5], "12", list(range(129)), 5, 0]),
        ("logprob_token_ids", [[-1], list(range(129))]),
        ("allowed_token_ids", [[], [-1], "12"]),
        ("logit_bias", [{1: 101}, {1: float("nan")}, {"a": 1}, {-1: 1}, [1], dict.fromkeys(range(1025), 1)]),
        ("ignore_eos", [1, None, "yes"]),
        ("detokenize", [0]),
        ("extra_args", [[1]]),
    ],
)
def test_value_out_of_range_is_refused_by_name(field, values):
    """C31, C60, C108: no such value reaches the device or allocates without bound."""
    for value in values:
        with pytest.raises(ValueError, match=field) as error:
            SamplingParams(**{field: value})
        assert len(str(error.value)) < 250 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("top_k", 10**9, 10**9),
        ("top_k", -1, 0),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", -1, None),
        ("max_tokens", 0, 0),
        ("max_tokens", None, None),
        ("stop", "END", ("END",)),
        ("stop", None, ()),
        ("stop", [], ()),
        ("logit_bias", {"7": 1}, {7: 1.0}),
        ("temperature", np.float32(0.5), 0.5),
        ("n", np.int64(3), 3),
        ("logprobs", -1, -1),
        ("stop_token_ids", np.array([1, 2]), (1, 2)),
        ("allowed_token_ids", range(3), (0, 1, 2)),
    ],
)
def test_accepted_spellings(field, given, kept):
    assert getattr(SamplingParams(**{field: given}), field) == kept


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_vllm_fields_that_do_not_act_are_refused_with_the_way_out():
    with pytest.raises(TypeError, match="no best_of: use n"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_params_can_be_copied_pickled_and_replaced_but_not_changed():
    params = SamplingParams(seed=2**63, logit_bias={3: 1}, stop=["a"], extra_args={"x": 1})
    assert (
        pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == dataclasses.replace(params) == params
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_greedy_and_history_flags():
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy
    assert not SamplingParams(logit_bias={1: 1}, min_tokens=1).needs_history
    for field in ({"presence_penalty": 1}, {"repetition_penalty": 1.1}, {"bad_words": ["a"]}):
        assert SamplingParams(**field).needs_history


def test_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="request r: the prompt has no tokens"):
        Request("r", (), SamplingParams())


def append_until_end(tokens: list[int], params: SamplingParams, end_ids: set[int], limit: int) -> Sequence:
    seq = Sequence(Request("r", (1, 2), params, frozenset(end_ids)), max_total_tokens=2 + limit)
    for token in tokens:
        if seq.append(token):
            break
    return seq


@pytest.mark.parametrize(
    ("params", "output", "finish_reason", "stop_reason"),
    [
        ({}, [5, 6, 7], "stop", None),
        ({"ignore_eos": True}, [5, 6, 7, 9, 7, 8], "length", None),
        ({"ignore_eos": True, "stop_token_ids": [9]}, [5, 6, 7, 9], "stop", 9),  # C37
        ({"ignore_eos": True, "stop_token_ids": [7]}, [5, 6, 7], "stop", 7),
        ({"stop_token_ids": [7]}, [5, 6, 7], "stop", None),
        ({"min_tokens": 3, "stop_token_ids": [9]}, [5, 6, 7, 9], "stop", 9),  # C35: both kinds wait
        ({"min_tokens": 4, "stop_token_ids": [9]}, [5, 6, 7, 9, 7], "stop", None),
    ],
)
def test_end_rules(params, output, finish_reason, stop_reason):
    seq = append_until_end([5, 6, 7, 9, 7, 8, 5], SamplingParams(**params), {7}, limit=6)
    assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == (output, finish_reason, stop_reason)


def test_metrics_follow_the_definitions():
    metrics = RequestMetrics(arrival_time=1.0)
    assert metrics.queue_s is metrics.ttft_s is metrics.tpot_s is metrics.e2e_s is None
    metrics.first_scheduled_time, metrics.first_token_time = 1.5, 2.0
    metrics.last_token_time, metrics.finished_time, metrics.num_output_tokens = 4.0, 4.25, 5
    assert (metrics.queue_s, metrics.ttft_s, metrics.tpot_s, metrics.e2e_s) == (0.5, 1.0, 0.5, 3.25)
