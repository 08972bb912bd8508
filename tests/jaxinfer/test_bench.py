"""`jaxinfer bench` on a tiny model: loads, arrivals, comparisons, files; and the parts of the benchmark scripts."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import text_fixtures
from planted import make_planted, random_table
from tiny_models import write_hf
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.metrics import Work
from jaxinfer.tools.bench.workload import Lengths, Offer, at_rate, least_work, random_offers, read_offers

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import bench_bars
import bench_regress

SMALL = "--max-num-seqs 2 --max-num-batched-tokens 32 --max-model-len 128"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a planted-table model: 320 tokens, one for each byte among them."""
    folder = write_hf(tmp_path_factory.mktemp("bench") / "tiny", *make_planted(random_table(320, "bench")))
    text_fixtures.save(folder, text_fixtures.byte_level(), text_fixtures.BYTE_LEVEL_CONFIG)
    return str(folder)


def bench(model, options, *more):
    return CliRunner().invoke(app, ["bench", model, *SMALL.split(), *options.split(), *map(str, more)])


def result_of(model, options, *more):
    result = bench(model, f"--json {options}", *more)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def bars(arguments):
    return bench_bars.main(arguments.split())


# Loads


def test_random_loads_are_those_of_earlier_figures():
    """The formula with which ragged-64 was drawn when its figures were written down."""
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(32, 513, 64), rng.integers(16, 257, 64)
    expected = [(rng.integers(100, 40000, p).tolist(), int(o)) for p, o in zip(prompts, outputs, strict=True)]
    lengths = Lengths.parse("uniform:32:512"), Lengths.parse("uniform:16:256")
    found = random_offers(64, *lengths, vocab_size=49152, max_model_len=1024)
    assert [(offer.prompt, offer.output_len) for offer in found] == expected


def test_lengths_follow_their_distributions():
    rng = np.random.default_rng(1)
    assert Lengths.parse("7").draw(rng, 3).tolist() == [7, 7, 7]
    uniform = Lengths.parse("uniform:3:5").draw(rng, 500)
    assert set(uniform.tolist()) == {3, 4, 5}
    skewed = Lengths.parse("lognormal:200:0.8").draw(rng, 4000)
    assert np.median(skewed) == pytest.approx(200, rel=0.05)  # standard error of the median: 1.6 %
    assert np.log(skewed).std() == pytest.approx(0.8, rel=0.05)


@pytest.mark.parametrize(
    "text", ["", "0", "1.5", "uniform:5:3", "uniform:0:3", "lognormal:100", "normal:1:2", "nan"]
)
def test_lengths_that_cannot_be_are_refused(text):
    with pytest.raises(ValueError, match="must be N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"):
        Lengths.parse(text)


def test_long_requests_are_cut_to_the_model_prompt_first():
    (offer,) = random_offers(1, Lengths.parse("90"), Lengths.parse("30"), vocab_size=512, max_model_len=100)
    assert (len(offer.prompt), offer.output_len) == (70, 30) and max(offer.prompt) < 512


def test_arrivals_are_poisson():
    offers = [Offer([1], 1)] * 4000
    times = np.array([offer.time_s for offer in at_rate(offers, 8.0)])
    gaps = np.diff(times)
    assert gaps.min() >= 0 and gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.06)  # of an exponential
    assert at_rate(offers[:2], float("inf")) == offers[:2]


def test_a_dataset_has_its_own_prompts_and_lengths(tmp_path):
    path = tmp_path / "load.jsonl"
    path.write_text(
        '{"prompt": "hello", "max_tokens": 3}\n\n{"prompt_token_ids": [5, 6]}\n{"prompt": "more"}\n'
    )
    assert read_offers(path, Lengths.parse("9"), count=2) == [Offer("hello", 3), Offer([5, 6], 9)]
    for line, message in [
        ("{", "line 1 is not JSON"),
        ("{}", "must be an object with prompt or prompt_token_ids"),
        ('{"prompt": "a", "n": 2}', "has 'n'; known are"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0 must be a whole number from 1 on"),
        ("", "has no requests"),
    ]:
        path.write_text(line)
        with pytest.raises(ValueError, match=message):
            read_offers(path, Lengths.parse("9"))


def test_the_static_card_is_one_piece_of_prompt_and_a_forward_per_token():
    found = least_work([(5, 3), (2, 1)])
    # prompts 5 and 2, then two more inputs at positions 5 and 6
    assert found == Work(
        num_forwards=3, num_tokens=9, num_samples=4, num_pairs=15 + 3 + 6 + 7, num_resident=5 + 2 + 6 + 7
    )


# The command


def test_throughput_with_all_its_files(model, tmp_path):
    files = {name: tmp_path / f"{name}.json" for name in ("trace", "metrics-json")} | {
        "plot": tmp_path / "plot.png"
    }
    arguments = [part for name, path in files.items() for part in (f"--{name}", path)]
    found = result_of(model, "--requests 5 --prompt-len 20 --output-len uniform:3:9", *arguments)
    assert found["requests"] == 5 and found["card"]["num_prompt_tokens"] == 100
    tokens = found["card"]["num_prompt_tokens"] + found["card"]["num_output_tokens"]
    assert found["total_tok_per_s"] == pytest.approx(tokens / found["seconds"])
    assert found["work"]["num_samples"] == found["card"]["num_output_tokens"]  # of the measured run alone
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert 0 < found["latency"][name]["p50"] <= found["latency"][name]["p99"]
    assert 0 < found["utilization"]["mfu"] < 1 and 0 < found["utilization"]["mbu"] < 1
    assert "measured" in found["utilization"]["peaks"]
    assert found["work"]["num_tokens"] == tokens - 5  # the last token of each is no input
    assert json.loads(files["trace"].read_text())["traceEvents"]
    written = json.loads(files["metrics-json"].read_text())
    assert len(written["requests"]) == 5 and written["stats"]["steps"]["decode"]["num_steps"] > 0
    assert files["plot"].read_bytes()[:4] == b"\x89PNG"


def test_latency_mode_runs_one_request_at_a_time(model):
    found = result_of(model, "--mode latency --requests 3 --prompt-len 8 --output-len 4")
    assert all(
        totals["num_rows"] == totals["num_steps"] for totals in found["steps"].values() if totals["num_steps"]
    )
    assert found["latency"]["queue_s"]["p99"] < found["latency"]["e2e_s"]["p50"]


def test_requests_come_at_their_rate(model):
    found = result_of(model, "--rate 20 --requests 6 --prompt-len 8 --output-len 2")
    last = float(np.cumsum(np.random.default_rng(0).exponential(1 / 20, 6))[-1])
    assert found["seconds"] >= last and found["requests_per_s"] <= 6 / last


def test_tables_for_people(model):
    result = bench(model, "--requests 2 --prompt-len 8 --output-len 3")
    assert result.exit_code == 0, result.output
    for word in ("tok/s total", "MFU", "MBU", "TTFT", "ITL", "p99", "padding", "at most", "measured"):
        assert word in result.stdout


def test_without_a_cache_the_same_tokens_cost_more_the_further_they_are(model):
    found = result_of(model, "--compare-no-cache --requests 2 --prompt-len 8 --output-len 80")
    assert found["num_equal"] == found["output_tokens"] == 160
    first, last = found["points"][0], found["points"][-1]
    assert last["recomputed_least_ms"] > 2 * first["recomputed_least_ms"]
    assert last["cached_least_ms"] < 1.1 * first["cached_least_ms"]
    assert last["recomputed_ms"] > last["cached_ms"]


def test_contiguous_reservation_wastes_what_pages_do_not(model):
    """A pool for two sequences of max_model_len: as pages it holds all four rows."""
    load = "--requests 8 --prompt-len 20 --output-len 12"
    found = result_of(model, f"--compare-contiguous --max-num-seqs 4 --num-pages 17 --page-size 16 {load}")
    pages, reserved = found["ways"]
    assert (pages["rows_allowed"], reserved["rows_allowed"]) == (4, 2) and found["pool_slots"] == 256
    assert pages["mean_rows"] > reserved["mean_rows"]
    assert reserved["reserved"] == pytest.approx(reserved["mean_rows"] * 128, rel=0.01)
    assert pages["wasted_share"] < 0.5 < reserved["wasted_share"]
    assert found["num_equal"] == found["num_requests"] == 8


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--compare-no-cache --compare-contiguous", "give one"),
        ("--compare-no-cache --trace x.json", "--trace goes with the plain benchmark"),
        ("--compare-no-cache --temperature 1", "leave --temperature out"),
        ("--mode latency --rate 3", "leave --rate out"),
        ("--rate 0", "must be more than 0"),
        ("--prompt-len uniform:9:3", "must be N, uniform:LOW:HIGH"),
        ("--dataset nowhere.jsonl", "there is no file nowhere.jsonl"),
        ("--top-p 0.5", "--temperature too"),
    ],
)
def test_wrong_usage_is_one_sentence_before_anything_is_loaded(arguments, sentence):
    result = CliRunner().invoke(app, ["bench", "no such model", *arguments.split()])
    assert result.exit_code == 2 and sentence in " ".join(result.stderr.split())


def test_a_refused_request_ends_the_benchmark_with_exit_code_1(model, tmp_path):
    (tmp_path / "load.jsonl").write_text(json.dumps({"prompt_token_ids": [5] * 200, "max_tokens": 4}))
    result = bench(model, "--dataset", tmp_path / "load.jsonl")
    assert result.exit_code == 1 and "a prompt of 200 tokens" in result.stderr


# Scripts


def test_a_shared_preamble_is_computed_once():
    found = bars("prefix --questions 16 --rows 4")
    # 900 + 16 x (60 + part of a page) of 16 x 960 tokens, in turn and at once
    for way in ("at_once", "in_turn"):
        assert found[way]["computed_share"] < (900 + 16 * (60 + 64)) / found[way]["prompt_tokens"]
        assert found[way]["equal_outputs"] == 16
    assert found["without"]["computed_share"] == 1


def test_a_long_prompt_beside_decoding_rows_is_measured_with_both_settings():
    found = bars("latency --rows 3 --prompt 256 --budgets 64 8")
    for budget in ("budget_64", "budget_8"):
        assert found[budget]["itl_p99_ms_alone"] > 0 and found[budget]["itl_p99_ms_beside"] > 0
    assert found["budget_8"]["ttft_s_of_the_prompt"] > found["budget_64"]["ttft_s_of_the_prompt"]


def test_memory_and_host_share_are_measured():
    found = bars("memory --rows 2 --calls 5 --kv-mib 1")
    assert found["pool_mb"] <= 1.05 and found["peak_rss_mb"] >= found["rss_after_warmup_mb"] > 0
    found = bars("share --rows 2 --steps 10")
    assert found["host_ms"] > 0 and found["token_steps"] > 0


def test_ratios_of_two_commits_are_of_neighbouring_runs():
    pairs = [
        ({"seconds": a, "ttft_ms": 5.0}, {"seconds": b}) for a, b in [(1.0, 2.0), (10.0, 15.0), (2.0, 2.0)]
    ]
    ((name, found),) = bench_regress.compare(pairs).items()
    assert name == "seconds" and (found["a"], found["b"]) == (2.0, 2.0)
    assert (found["ratio"], found["smallest"], found["largest"], found["spread"]) == (1.5, 1.0, 2.0, 1.0)
