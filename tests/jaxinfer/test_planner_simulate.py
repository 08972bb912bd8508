"""The simulation: the engine's scheduler on a clock that the roofline drives."""

import dataclasses
import math
import time

import numpy as np
import pytest
from planner_shapes import tiny_shape

from jaxinfer.programs.buckets import Buckets
from jaxinfer.scheduler import RequestTooLong, SchedulerConfig
from jaxinfer.tools.planner import hardware, roofline
from jaxinfer.tools.planner.roofline import Row, Setting
from jaxinfer.tools.planner.simulate import StepTime, percentile, simulate
from jaxinfer.tools.planner.workload import LENGTHS, QUANTILES, Arrival, arrivals, quantile

SETTING = Setting(tiny_shape(), hardware.load("h100"))


def exact_buckets(rows):
    """Buckets without padding for one row, so that times can be worked out by hand."""
    return Buckets(
        prefill=((16, 1), (rows * 16, rows)), decode=(1, rows), decode_steps=1, multi_step=(1, rows)
    )


def run(requests, *, rows=4, num_pages=200, page_size=4, tokens=16, k=1, max_model_len=256, buckets=None):
    config = SchedulerConfig(
        max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=max_model_len, decode_steps=k
    )
    buckets = buckets or Buckets.default(rows, tokens, k, "gpu")
    return simulate(
        requests, StepTime(SETTING, 1.0), config, buckets, num_pages=num_pages, page_size=page_size
    )


@pytest.mark.parametrize(
    "rows",
    [
        [Row(1, 50)],
        [Row(1, 50)] * 7,
        [Row(9, 30)],
        [Row(1, 20), Row(5, 5)],
    ],
)
@pytest.mark.parametrize("chips", [1, 2])
def test_the_closed_form_is_the_roofline(rows, chips):
    setting = dataclasses.replace(SETTING, chips=chips)
    pairs = sum(roofline.attended(row.num_tokens, row.kv_len) for row in rows)
    tokens, resident = sum(row.num_tokens for row in rows), sum(row.kv_len for row in rows)
    found = StepTime(setting, 0.5, 1e-6)(tokens, len(rows), pairs, resident)
    assert found == pytest.approx(roofline.bound(setting, rows).time_s / 0.5 + 1e-6, rel=1e-9)


def test_one_request_alone_takes_the_sum_of_its_steps():
    prompt, output = 16, 5
    result = run([Arrival(2.0, prompt, output)], buckets=exact_buckets(4))
    (times,) = result.times
    prefill = roofline.bound(SETTING, [Row(prompt, prompt)]).time_s
    decode = [roofline.decode_bound(SETTING, 1, prompt + i).time_s for i in range(1, output)]
    assert times.ttft_s == pytest.approx(prefill, rel=1e-6)
    assert times.tpot_s == pytest.approx(sum(decode) / (output - 1), rel=1e-6)
    assert times.e2e_s == pytest.approx(prefill + sum(decode), rel=1e-6)
    assert (times.num_tokens, result.num_steps, result.peak_pages) == (
        output,
        output,
        math.ceil((16 + 4) / 4),
    )


@pytest.mark.parametrize("bandwidth", [1e9, 1e18])
def test_several_iterations_in_one_program_take_as_long_as_one_by_one(bandwidth):
    """Bound by memory (K and V grow) and by compute (pairs grow)."""
    chip = dataclasses.replace(SETTING.hardware, memory_bandwidth=bandwidth)
    step_time = StepTime(dataclasses.replace(SETTING, hardware=chip), 1.0)
    ends = []
    for k in (1, 4):
        config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64, decode_steps=k)
        buckets = Buckets(prefill=((16, 1),), decode=(1,), decode_steps=k, multi_step=(1,))
        result = simulate([Arrival(0.0, 16, 9)], step_time, config, buckets, num_pages=20, page_size=4)
        assert result.num_steps == 1 + 8 // k
        ends.append(result.times[0].last_token)
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("num_pages", [200, 40])
def test_every_request_gets_its_tokens_and_every_page_comes_back(k, num_pages):
    requests = list(arrivals(LENGTHS["code"], 60, 1e5, max_model_len=120, seed=3))
    result = run(requests, k=k, num_pages=num_pages)
    assert [times.num_tokens for times in result.times] == [request.output_len for request in requests]
    assert result.peak_pages <= num_pages - 1
    assert all(
        t.arrival <= t.scheduled <= t.first_token <= t.last_token <= result.duration_s for t in result.times
    )
    assert result.curve[-1][0] <= result.duration_s


def test_too_few_pages_preempt_and_cost_time():
    requests = [Arrival(0.0, 40, 60)] * 4
    plenty, scarce = run(requests, num_pages=200), run(requests, num_pages=60)
    assert plenty.num_preemptions == 0 and plenty.peak_pages > 59
    assert scarce.num_preemptions > 0 and scarce.peak_pages <= 59
    assert scarce.duration_s > plenty.duration_s


def test_more_requests_per_second_wait_longer():
    def waits(rate):
        return run(arrivals(LENGTHS["conv"], 100, rate, max_model_len=200)).percentiles()["queue_s"]["p90"]

    assert waits(10.0) < waits(1e6)


def test_a_request_that_never_fits_is_refused():
    with pytest.raises(RequestTooLong):
        run([Arrival(0.0, 300, 10)])


def test_the_same_seed_gives_the_same_run():
    runs = [run(arrivals(LENGTHS["conv"], 50, 1e5, max_model_len=200, seed=7)) for _ in range(2)]
    assert runs[0].times == runs[1].times and runs[0].curve == runs[1].curve


@pytest.mark.parametrize("p", [50, 90, 99])
@pytest.mark.parametrize("n", [1, 7, 100])
def test_percentiles_are_nearest_rank(n, p):
    values = np.random.default_rng(n).permutation(n).astype(float).tolist()
    assert percentile(values, p) == np.percentile(values, p, method="inverted_cdf")


def test_percentile_of_nothing_is_none():
    assert percentile([], 50) is None


# p5, p50 and p95 of the traces, as published collections of them print: prompts, outputs.
PUBLISHED = {"conv": ((181, 1020, 4083), (41, 129, 451)), "code": ((75, 1469, 7315), (6, 13, 90))}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_drawn_lengths_are_those_of_the_traces(name):
    drawn = list(arrivals(LENGTHS[name], 20_000, 5.0, max_model_len=20_000))
    lengths = (
        np.array([request.prompt_len for request in drawn]),
        np.array([request.output_len for request in drawn]),
    )
    for found, published in zip(lengths, PUBLISHED[name], strict=True):
        assert np.percentile(found, [5, 50, 95]) == pytest.approx(published, rel=0.08, abs=1)
    gaps = np.diff([request.time_s for request in drawn])
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)  # 4 standard errors of 20,000 exponential gaps
    assert gaps.std() == pytest.approx(1 / 5, rel=0.05)  # a Poisson process


def test_quantiles_are_met_exactly_and_rise():
    table = LENGTHS["conv"].prompt
    assert [quantile(table, share) for share in QUANTILES] == list(table)
    assert sorted(table) == list(table)


def test_long_requests_are_cut_to_the_model():
    assert all(
        r.prompt_len >= 1 and r.prompt_len + r.output_len <= 64
        for r in arrivals(LENGTHS["conv"], 500, 1, max_model_len=64)
    )


@pytest.mark.slow
def test_twenty_thousand_requests_in_a_minute():
    """On a machine that does nothing else: of its own processor time, so that a busy one can tell too."""
    setting = Setting(tiny_shape(), hardware.load("h200"))
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=16_000)
    start = time.process_time()
    result = simulate(
        arrivals(LENGTHS["conv"], 20_000, 5.53, max_model_len=16_000),
        StepTime(setting, 0.6),
        config,
        Buckets.default(64, 2048, 8, "gpu"),
        num_pages=16_000,
        page_size=64,
    )
    assert len(result.times) == 20_000
    assert time.process_time() - start < 60


def test_the_curve_is_at_zero_while_nothing_is_asked_for():
    """Rows and pages go back to none between two requests that do not meet, not from one to the next."""
    result = run([Arrival(1.0, 16, 5), Arrival(5.0, 16, 5)], buckets=exact_buckets(4))
    first, second = result.times
    idle = [time for time, pages, running, waiting in result.curve if pages == running == waiting == 0]
    assert any(first.last_token <= time < second.arrival for time in idle)
