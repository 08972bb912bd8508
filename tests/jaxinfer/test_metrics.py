"""Metrics: counts against brute force, times in order, bounded memory, and a timeline that shows the overlap."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from engines import ROWS, drain, generate, greedy_params, make_engine, submit
from planner_shapes import tiny_shape
from tiny_models import random_tokens

from jaxinfer import metrics
from jaxinfer.metrics import Distribution, Recording, Work
from jaxinfer.tools import timeline
from jaxinfer.tools.planner import hardware, roofline
from jaxinfer.tools.planner.roofline import Row, Setting
from jaxinfer.tools.planner.utilization import utilization

NAME = "llama_gqa"


@pytest.mark.parametrize("p", [50, 90, 99])
def test_percentiles_are_nearest_rank_within_one_percent(p):
    values = np.random.default_rng(0).lognormal(-3, 2, 999)
    found = Distribution()
    found.add_all(values[:500])
    for value in values[500:]:
        found.add(value)
    exact = np.percentile(values, p, method="inverted_cdf")
    assert found.percentile(p) == pytest.approx(exact, rel=0.0101)
    assert found.summary()["mean"] == pytest.approx(values.mean()) and found.largest == values.max()


def test_a_distribution_does_not_grow_with_its_values():
    found = Distribution()
    for seed in range(20):
        found.add_all(np.random.default_rng(seed).uniform(1e-6, 1e3, 10_000))
    assert found.count == 200_000 and len(found._counts) < np.log(1e9) / np.log(metrics.RATIO) + 2


def test_zeros_and_no_values():
    found = Distribution()
    assert found.percentile(50) is None and found.summary()["max"] is None
    found.add_all([0.0, 0.0, 1.0])
    assert found.percentile(50) == 0.0 and found.percentile(99) == pytest.approx(1.0, rel=0.01)


def brute_force(rows):
    """Work of rows [(start, query tokens, tokens kept)], a forward and a position at a time."""
    work = Work()
    for start, num_tokens, accepted in rows:
        for forward in range(max(1, accepted)):
            positions = (
                range(start, start + num_tokens) if forward == 0 else [start + num_tokens + forward - 1]
            )
            work.num_tokens += len(positions)
            work.num_pairs += sum(position + 1 for position in positions)
            work.num_resident += positions[-1] + 1
        work.num_samples += accepted
    return work


def test_work_in_closed_form_is_the_sum_over_positions():
    rows = [(0, 1, 1), (0, 7, 0), (7, 5, 1), (12, 1, 1), (12, 1, 4), (3, 2, 3)]
    work = Work()
    for row in rows:
        work.add_step([row])
    assert work.num_forwards == 1 + 1 + 1 + 1 + 4 + 3
    together = Work()
    together.add_step(rows)
    assert together.num_forwards == 4  # the longest row's: they share the weights
    assert replace(work, num_forwards=0) == replace(together, num_forwards=0) == brute_force(rows)


@pytest.mark.parametrize("name", ["llama_gqa", "llama_mqa_tied"])
@pytest.mark.parametrize(
    "rows", [[Row(1, 50)], [Row(9, 30)], [Row(1, 20), Row(5, 5)], [Row(4, 9, samples=False)]]
)
def test_step_cost_is_the_roofline(name, rows):
    setting = Setting(tiny_shape(name), hardware.load("h100"))
    samples = sum(row.samples for row in rows)
    work = Work(
        1,
        sum(row.num_tokens for row in rows),
        samples,
        sum(roofline.attended(row.num_tokens, row.kv_len) for row in rows),
        sum(row.kv_len for row in rows),
    )
    cost, bound = roofline.step_cost(setting.shape, setting.kv_dtype), roofline.bound(setting, rows)
    head = setting.shape.weights_bytes("embedding" if setting.shape.tied else "head")
    assert cost.flops(work) == bound.flops
    assert cost.bytes(work) == bound.bytes + (0 if samples else head)  # a step's head counts always


def test_utilization_is_work_over_what_the_device_could_do():
    shape = tiny_shape(dtype="float32")
    cost, work = roofline.step_cost(shape, "float32"), Work(10, 10, 10, 100, 100)
    facts = replace(hardware.load("h100"), peaks={"float32": 1e9}, memory_bandwidth=1e6)
    found = utilization(cost, work, 2.0, facts, "float32")
    assert found.mfu == pytest.approx(cost.flops(work) / 2e9) and found.mbu == pytest.approx(
        cost.bytes(work) / 2e6
    )
    unknown = utilization(cost, work, 2.0, None, "float32")
    assert unknown.mfu is None and unknown.mbu is None and "not known" in unknown.peaks
    assert utilization(cost, work, 2.0, replace(facts, peaks={"int8": 1.0}), "float32").mfu is None


@pytest.mark.parametrize(("budget", "steps"), [(32, 1), (7, 1), (32, 4)])
def test_an_engine_counts_what_its_requests_need(budget, steps):
    """Whatever the chunks and the steps at once, tokens past an end and padding not counted."""
    engine = make_engine(NAME, budget=budget, steps=steps, prefix_caching=False)
    prompts, outputs = [random_tokens("a", 21), random_tokens("b", 9), random_tokens("c", 30)], [10, 1, 6]
    generate(engine, *[(ids, greedy_params(out)) for ids, out in zip(prompts, outputs, strict=True)])
    stats = engine.stats()
    lengths = [len(ids) + out - 1 for ids, out in zip(prompts, outputs, strict=True)]  # the last is no input
    assert stats.work.num_tokens == sum(lengths)
    assert stats.work.num_samples == sum(outputs)
    assert stats.work.num_pairs == sum(n * (n + 1) // 2 for n in lengths)
    assert stats.work.num_forwards >= max(outputs)
    assert sum(totals.num_tokens for totals in stats.steps.values()) == sum(lengths)
    assert stats.num_finished == {"length": 3} and stats.latency["ttft_s"]["count"] == 3
    gaps = stats.latency["itl_s"]["count"]
    assert gaps == sum(outputs) - len(outputs) if steps == 1 else 0 < gaps < sum(outputs) - len(outputs)


def test_tokens_past_an_end_are_padding():
    engine = make_engine("planted", steps=1)
    (ids,) = generate(engine, ([5], greedy_params(30)))
    engine = make_engine("planted", steps=1)
    stop = ids[3]
    (seqs,) = submit(engine, ([5], greedy_params(30, stop_token_ids=[stop])))
    drain(engine)
    kept, stats = seqs[0].num_output_tokens, engine.stats()
    assert stats.work.num_samples == kept == ids.index(stop) + 1
    surplus = sum(totals.num_steps for totals in stats.steps.values()) - kept
    assert surplus == 1 and stats.steps["decode"].padding_share > 0  # dispatched before the stop was read


def test_padding_share_of_a_prompt_in_its_bucket():
    engine = make_engine(NAME, prefix_caching=False)
    generate(engine, (random_tokens("a", 12), greedy_params(1)))
    assert engine.stats().steps["prefill"].padding_share == 1 - 12 / 16


def test_times_of_a_request_add_up():
    engine = make_engine(NAME, steps=1)
    (seqs,) = submit(engine, (random_tokens("a", 12), greedy_params(9)))
    seqs[0].metrics.arrival_time = engine.clock()
    drain(engine)
    found = seqs[0].metrics
    assert len(found.token_times) == 9 and len(found.itl_s) == 8 and min(found.itl_s) > 0
    assert (
        sum(found.itl_s)
        == pytest.approx(found.tpot_s * 8)
        == pytest.approx(found.e2e_s - found.ttft_s, abs=1e-3)
    )
    assert 0 <= found.queue_s <= found.ttft_s <= found.e2e_s


def test_tokens_that_come_together_are_one_gap():
    engine = make_engine(NAME, steps=4)
    (seqs,) = submit(engine, (random_tokens("a", 12), greedy_params(9)))
    drain(engine)
    assert seqs[0].num_output_tokens == 9 and len(seqs[0].metrics.itl_s) == 2  # 1, then 4 and 4


def test_an_aborted_request_counts_as_one_and_has_no_latency():
    engine = make_engine(NAME)
    (seqs,) = submit(engine, (random_tokens("a", 12), greedy_params(90)))
    for _ in range(3):
        engine.step()
    engine.abort(seqs[0].request.request_id)
    drain(engine)
    stats = engine.stats()
    assert stats.num_finished == {"abort": 1} and stats.latency["e2e_s"]["count"] == 0


def recorded(**options):
    engine = make_engine(NAME, steps=1, **options)
    generate(engine, (random_tokens("warm", 20), greedy_params(2)))  # compiles
    engine.recording = Recording(engine.clock)
    submit(engine, *[(random_tokens(str(i), 20), greedy_params(12)) for i in range(ROWS + 1)])
    drain(engine)
    engine.recording.close()
    return engine, engine.recording


def test_the_next_step_is_dispatched_before_the_last_one_is_read():
    _, recording = recorded()
    steps = list(recording.steps)
    assert len(steps) > 12
    for step, following in pairwise(steps):
        assert step.begun <= step.dispatched <= step.read <= step.committed and step.dispatched <= step.done
        assert following.dispatched <= step.read, "the host read a step before it had dispatched the next"
        assert step.done <= following.done


def test_a_recording_keeps_the_last_steps_only():
    engine = make_engine(NAME, steps=1)
    engine.recording = Recording(engine.clock, limit=3)
    generate(engine, *[(random_tokens(str(i), 5), greedy_params(12)) for i in range(5)])
    engine.recording.close()
    assert len(engine.recording.steps) == len(engine.recording.sequences) == 3
    assert engine.stats().steps["decode"].num_steps > 3  # totals go on


def test_the_timeline_has_a_row_for_each_sequence_and_one_for_the_device(tmp_path):
    _, recording = recorded()
    timeline.write(recording, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"host", "device"} < set(names.values())
    sequences = [key for key, name in names.items() if name.startswith("request ")]
    assert len(sequences) == len(recording.sequences) == ROWS + 1
    bars = [e for e in events if e["ph"] == "X"]
    assert all(bar["ts"] >= 0 and bar["dur"] >= 0 for bar in bars)
    for key in sequences:
        mine = [bar["name"] for bar in bars if (bar["pid"], bar["tid"]) == key]
        assert mine.count("queued") == 1 and mine.count("token") == 12
    device = [bar for bar in bars if (bar["pid"], bar["tid"]) == (timeline.ENGINE, timeline.DEVICE)]
    assert len(device) == len(recording.steps)
    for bar, following in pairwise(device):
        assert bar["ts"] + bar["dur"] <= following["ts"] + following["dur"] + 1e-3
        assert bar["ts"] + bar["dur"] <= following["ts"] + 1e-3, "the device does one step at a time"
    assert {e["name"] for e in events if e["ph"] == "C"} == {"rows", "pages"}


def test_statistics_are_plain_data():
    engine, recording = recorded()
    found = json.loads(json.dumps(metrics.to_json(engine.stats())))
    assert 0 <= found["steps"]["decode"]["padding_share"] < 1
    assert found["latency"]["ttft_s"]["p99"] > 0 and found["work"]["num_tokens"] > 0
    each = json.loads(json.dumps([metrics.request_json(seq.metrics) for seq in recording.sequences]))
    assert len(each[0]["itl_s"]) == 11 and each[0]["num_output_tokens"] == 12
