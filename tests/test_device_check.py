"""scripts/device_check.py: what happens to cases that fail, hang or end the process, and each stage tried on a CPU."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.pallas_kernels.ragged_paged_attention.cases import CASES_BY_NAME
from jaxinfer.programs import compile_cache

ROOT = Path(__file__).parents[1]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


device_check, device_stages = load("device_check"), load("device_stages")
device_engine, device_kernels = load("device_engine"), load("device_kernels")

# Works through the names it is given: what a name says is what happens to it.
FAKE_CHILD = """
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("names", nargs="*")
parser.add_argument("--skip", type=int)
parser.add_argument("--limit", type=float)
args = parser.parse_args()

def say(message):
    print(json.dumps(message), flush=True)

if "unborn" in args.names:
    sys.exit("no device here")
say({"plan": args.names})
print("a library's line")
for name in args.names[args.skip:]:
    say({"begin": name})
    if name == "dies":
        print("illegal address", file=sys.stderr, flush=True)
        os.abort()
    if name == "hangs":
        time.sleep(60)
    if name == "stops":
        say({"stopped": "the time limit"})
        sys.exit()
    say({"record": {"name": name, "result": "failed" if name == "fails" else "ok"}})
    say({"end": name})
"""


def supervise(tmp_path, *names, limit=30.0):
    out = tmp_path / "out.jsonl"
    with out.open("w") as file:
        report = device_check.Report(file)
        device_check.supervise([sys.executable, "-c", FAKE_CHILD, *names], report, limit, silence=1.0)
        lines = [
            json.loads(line) for line in out.read_text().splitlines()
        ]  # flushed before the file is closed
    return lines, report.counts


def test_one_bad_case_of_any_kind_leaves_the_others_running(tmp_path):
    names = ("one", "fails", "two", "dies", "three", "hangs", "four")
    lines, counts = supervise(tmp_path, *names)
    assert [line["name"] for line in lines] == list(names)
    assert {line["name"] for line in lines if line["result"] == "failed"} == {"fails", "dies", "hangs"}
    assert "illegal address" in lines[3]["error"] and "no answer for 1 s" in lines[5]["error"]
    assert counts == {"ok": 4, "failed": 3}


def test_what_the_limit_leaves_out_is_named(tmp_path):
    lines, counts = supervise(tmp_path, "one", "stops", "two")
    assert lines[-1] == {"result": "not run", "why": "the time limit", "names": ["stops", "two"]}
    assert counts == {"ok": 1, "not run": 2}
    lines, _ = supervise(tmp_path, "one", "dies", "two", limit=0.0)  # restarted children get no more time
    assert lines[-1]["names"] == ["two"] and "limit of 0 s" in lines[-1]["why"]


def test_what_runs_on_past_the_limit_is_cut_short(tmp_path, monkeypatch):
    monkeypatch.setattr(device_check, "GRACE", 0.3)
    lines, counts = supervise(tmp_path, "hangs", "two", limit=0.2)
    assert [line.get("name", line.get("names")) for line in lines] == ["hangs", ["two"]]
    assert counts == {"cut short": 1, "not run": 1}


def test_a_child_that_cannot_start_is_started_once(tmp_path):
    lines, counts = supervise(tmp_path, "unborn", "one")
    assert counts == {"failed": 1} and "no device here" in lines[0]["error"]


def test_ctrl_c_leaves_no_child_and_keeps_what_is_known(tmp_path):
    """A process that holds the device after the script has gone keeps everybody else from it."""
    out, pid = tmp_path / "out.jsonl", tmp_path / "pid"
    code = FAKE_CHILD.replace(
        "time.sleep(60)", f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )

    def interrupt(*arguments, **options):
        while not pid.exists() or not pid.read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    with out.open("w") as file:
        report = device_check.Report(file)
        report.add = lambda record: (device_check.Report.add(report, record), interrupt())
        with pytest.raises(KeyboardInterrupt):
            device_check.supervise([sys.executable, "-c", code, "one", "hangs"], report, 30.0, silence=30.0)
        assert json.loads(out.read_text())["name"] == "one"
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_an_exception_is_the_result_of_its_case_alone(capsys):
    def refuse(emit):
        raise NotImplementedError("use xla")

    def fail(emit):
        raise ZeroDivisionError("by zero")

    items = [("a", refuse), ("b", fail), ("c", lambda emit: emit({"result": "ok"}))]
    device_stages.run_items(items, skip=0, limit=1e9)
    messages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    records = [message["record"] for message in messages if "record" in message]
    assert [record["result"] for record in records] == ["refused", "failed", "ok"]
    assert records[1]["error"] == "ZeroDivisionError: by zero"
    assert [message["end"] for message in messages if "end" in message] == ["a", "b", "c"]


@pytest.mark.parametrize("wrong", [None, "value", "nan", "unstable"])
def test_a_wrong_kernel_does_not_pass(wrong):
    """One element off by 1e-3 in float32, a NaN, or other bits in the second call."""
    case = CASES_BY_NAME["smollm2_decode_one"]
    ready = device_kernels.prepare("ragged_paged_attention", case, "xla", jax.devices()[0])
    compiled, calls = ready.compiled, []

    def altered(**arrays):
        out, lse = (np.array(x) for x in compiled(**arrays))
        calls.append(1)
        if wrong != "unstable" or len(calls) > 1:
            out.flat[5] += {"value": 1e-3, "nan": np.nan, "unstable": 1e-6}.get(wrong, 0.0)
        return out, lse

    pending = Future()
    pending.set_result(replace(ready, compiled=altered))
    records = []
    device_kernels.check_case(pending, "ragged_paged_attention", records.append)
    assert records[0]["result"] == ("failed" if wrong else "ok"), records


def test_the_nano_bench_is_nano_vllms():
    """bench.py of github.com/GeeeekExplorer/nano-vllm prints 133,966 output tokens."""
    requests = device_engine.NANO.requests(151936)
    assert len(requests) == 256 and sum(n for _, n in requests) == 133_966


@pytest.mark.parametrize("stage", ["check", "kernels", "engine"])
def test_each_stage_runs_where_gguf_and_platformdirs_are_missing(stage, tmp_path):
    for name in ("gguf", "platformdirs"):  # found before the installed ones
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError(f'no {__name__} here')")
    out = tmp_path / "out.jsonl"
    command = [sys.executable, str(ROOT / "scripts" / "device_check.py"), "--stage", stage, "--tiny"]
    command += ["--hardware", "h200", "--out", str(out)]
    command += ["--compile-cache", str(compile_cache.default_folder())]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert result.returncode == 0, lines
    assert lines[0]["device"] == "cpu" and set(lines[-1]["summary"]) == {"ok"}
    passed = {line["name"]: line for line in lines if line.get("result") == "ok"}
    if stage == "check":
        assert len(passed) == 12 and all(line["twice_the_same_bits"] for line in passed.values())
    elif stage == "kernels":
        assert len(passed) == 3 and all(0 < line["mbu"] < 1 for line in passed.values())
    else:
        nano = passed["nano"]
        assert nano["output_tokens"] == nano["of"] > 0 and nano["output_tok_per_s"] > 0
        assert 0 < nano["decode"]["mbu"] < 1 and 0 < nano["prefill"]["mfu"] < 1
        assert [line["programs"] for line in lines if "programs" in line] == [3]
