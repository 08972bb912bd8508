"""`jaxinfer plan` and `jaxinfer simulate` as commands."""

import dataclasses
import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import typer
from tiny_models import CONFIGS, make_tiny, write_hf
from typer.testing import CliRunner

from jaxinfer import metrics
from jaxinfer.cli import plan, simulate
from jaxinfer.llm import LLM
from jaxinfer.options import device_facts
from jaxinfer.tools.planner import hardware, temporaries

LLAMA_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "max_position_embeddings": 8192,
}


@pytest.fixture(scope="module")
def run():
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command("plan")(plan.run)
    app.command("simulate")(simulate.run)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def seven_b(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_7B))
    return path


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["llama_gqa"]))
    return path


def test_a_config_alone_gives_the_whole_plan(run, seven_b):
    words = ["plan", seven_b, "--hardware", "h200", "--context", 4096, "--batch", 8, "--dtype", "float16"]
    result = run(
        *words, "--compare-attention", "--observed", "800:8:256", "--mix", "512:128:0.7,2048:256:0.3"
    )
    assert result.exit_code == 0, result.output
    for piece in (
        "6,738,415,616 parameters",
        "17,179,869,184",  # eight sequences of 2 GiB
        "bound by memory",
        "TTFT at least",
        "decode turns compute-bound",
        "int4 weights",
        "MQA",
        "96.9%",
        "32.675 s",
        "32.800 s",
        "4.8 TB/s",
    ):
        assert piece in result.output
    assert max(map(len, result.output.splitlines())) < 200


def test_json_is_one_object_of_integers(run, seven_b):
    result = run(
        "plan",
        seven_b,
        "--hardware",
        "h200",
        "--dtype",
        "float16",
        "--context",
        2048,
        "--batch",
        10,
        "--json",
    )
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["kv_bytes_per_token"] == 524_288
    assert facts["kv_bytes_per_sequence"] == 2**30
    assert facts["kv_bytes_total"] == 10 * 2**30
    assert facts["weights_bytes"] == 2 * 6_738_415_616 + 2 * 65 * 4096  # norms are float32
    assert [kind["num_kv_heads"] for kind in facts["attention"]] == [32, 8, 1]
    assert facts["hardware"]["sources"]["memory_bandwidth"]


def test_a_tpu7x_chip_says_what_is_counted(run, tiny):
    result = run("plan", tiny, "--hardware", "tpu7x", "--chips", 2, "--context", 128)
    assert "2 x Google TPU7x (Ironwood) (4 JAX devices: chips are counted, each is 2)" in result.output


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--hardware", "h300"], 1, "'h300' is not known"),
        (["--dtype", "int8"], 1, "dtype='int8'"),
        (["--quantize", "fp4"], 1, "quantize='fp4'"),
        (["--kv-cache-dtype", "int2"], 1, "kv_cache_dtype='int2'"),
        (["--batch", "0"], 1, "batch=0"),
        (["--context", "10", "--output-tokens", "10"], 1, "less than context=10"),
        (["--chips", "0"], 1, "chips=0"),
        (["--mix", "512:128"], 2, "PROMPT:OUTPUT:SHARE"),
        (["--mix", "512:128:-1"], 2, "shares more than 0"),
        (["--observed", "800:0:1"], 2, "TTFT_MS"),
        (["--acceptance", "1.5"], 1, "acceptance=1.5"),
        (["--gqa-heads", "3"], 1, "3 KV heads"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(run, tiny, words, code, sentence):
    hardware_given = [] if "--hardware" in words else ["--hardware", "h100"]
    result = run("plan", tiny, *hardware_given, *words)
    assert result.exit_code == code
    assert sentence in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (
            [
                "--context=64",
                "--batch=2",
                "--page-size=16",
                "--max-num-batched-tokens=128",
                "--utilization=0.5",
            ],
            {
                "max_model_len": 64,
                "max_num_seqs": 2,
                "page_size": 16,
                "max_num_batched_tokens": 128,
                "gpu_memory_utilization": 0.5,
            },
        ),
    ],
)
def test_here_prints_the_lines_that_the_engine_logs(run, tmp_path, monkeypatch, caplog, words, options):
    monkeypatch.setattr(device_facts, "available_memory", lambda: 2**30)
    path = write_hf(tmp_path, *make_tiny("llama_gqa"))
    with (
        caplog.at_level("INFO", logger="jaxinfer"),
        LLM(path, tokenizer=SimpleNamespace(eos_token_ids=frozenset()), **options) as llm,
    ):
        expected = llm.resolved.lines()
        logged = [record.getMessage() for record in caplog.records if record.name == "jaxinfer.llm"]
        assert logged[: len(expected)] == expected
    result = run("plan", path, "--here", *words)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == expected
    assert sum(line.startswith("plan: ") for line in expected) == 2
    assert "attention: cpu, since the device is a CPU" in expected


def test_here_refuses_what_the_engine_refuses_and_what_it_has_not(run, tiny, monkeypatch):
    monkeypatch.setattr(device_facts, "available_memory", lambda: 2**20)
    result = run("plan", tiny, "--here")
    assert result.exit_code == 1 and "does not fit" in result.output
    result = run("plan", tiny, "--here", "--hardware", "h100", "--chips", 2)
    assert result.exit_code == 2 and "leave out --hardware, --chips" in " ".join(result.output.split())


def test_compiling_for_a_device_that_is_not_here_is_refused(run, tiny):
    result = run("plan", tiny, "--hardware", "h100", "--compile")
    assert result.exit_code == 2 and "leave one of them out" in " ".join(result.output.split())


def test_temporaries_of_a_compiled_program_replace_the_estimate(run, tiny, monkeypatch):
    """Compiled for the largest step that the load asks for. (What compiling finds: test_planner_engine.)"""
    asked = {}

    def compiled(resolved):
        asked.update(vars(resolved.scheduler), num_pages=resolved.spec.num_pages)
        return 12_345_678

    monkeypatch.setattr(temporaries, "compiled", compiled)
    cpu = dataclasses.replace(hardware.load("h100"), platform="cpu")
    monkeypatch.setattr(hardware, "cpu", lambda: cpu)
    result = run(
        "plan",
        tiny,
        "--hardware",
        "cpu",
        "--context",
        64,
        "--batch",
        3,
        "--page-size",
        32,
        "--compile",
        "--json",
    )
    facts = json.loads(result.stdout)
    assert (facts["temporaries_source"], facts["temporaries_bytes"]) == ("compiled", 12_345_678)
    assert (asked["max_model_len"], asked["max_num_seqs"], asked["num_pages"]) == (64, 3, 1 + 3 * 2)


def test_simulate_prints_latency_pages_and_preemptions(run, tiny):
    words = ["simulate", tiny, "--hardware", "h100", "--workload", "code", "--requests", 40, "--rate", 1000]
    result = run(*words, "--max-num-seqs", 8, "--num-pages", 30, "--max-num-batched-tokens", 64)
    assert result.exit_code == 0, result.output
    for piece in ("TTFT", "TPOT", "E2E", "p99", "of 29 at the most", "preemptions", "an estimate"):
        assert piece in result.output
    facts = json.loads(run(*words, "--efficiency", 0.9, "--json").stdout)
    assert set(facts["percentiles"]) == {"ttft_s", "tpot_s", "e2e_s", "queue_s"}
    assert facts["efficiency"] == 0.9 and facts["requests"] == 40


def test_simulate_refuses_what_it_does_not_know(run, tiny):
    assert run("simulate", tiny, "--hardware", "h100", "--workload", "chat").exit_code == 2
    result = run("simulate", tiny, "--hardware", "h100", "--requests", 5, "--rate", 0)
    assert result.exit_code == 1 and "rate=0" in result.output


def test_plots_without_matplotlib_say_what_to_install(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("plan", tiny, "--hardware", "h100", "--plot", tmp_path / "roofline.png")
    assert result.exit_code == 1
    assert "pip install 'jaxinfer[plot]'" in result.output


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="the extra `plot` is not installed"
)
def test_plots_are_pictures(run, tiny, tmp_path):
    roofline, queue = tmp_path / "roofline.png", tmp_path / "queue.png"
    assert run("plan", tiny, "--hardware", "h100", "--plot", roofline).exit_code == 0
    words = ["simulate", tiny, "--hardware", "h100", "--requests", 20, "--rate", 100, "--plot", queue]
    assert run(*words).exit_code == 0
    for path in (roofline, queue):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_idle_spans_lie_between_the_end_of_a_step_and_the_start_of_the_next():
    plots = importlib.import_module("jaxinfer.tools.planner.plots")
    fields = dict(kind="decode", num_slots=1, num_steps=1, num_rows=1, pages_used=1, num_running=1)
    times = dict(num_waiting=0, begun=0.0, dispatched=0.0, compile_s=0.0)
    steps = [
        metrics.StepRecord(**fields, **times, done=done, device_s=device_s)
        for done, device_s in ((1.0, 1.0), (2.0, 1.0), (5.0, 0.5))
    ]
    recording = SimpleNamespace(steps=steps, sequences=[])
    assert plots.idle_spans(recording) == [(2.0, 4.5)]
