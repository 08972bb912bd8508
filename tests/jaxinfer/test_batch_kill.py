"""A batch job that is killed (SIGKILL) at random moments and run again ends as if it had run through."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import text_fixtures
from batch_jobs import OPTIONS, VOCAB, cached_llm, mixed, write_model
from tiny_models import make_tiny, write_hf
from typer.testing import CliRunner

import jaxinfer.llm
from jaxinfer.cli import app

LINES = 120
# The command with the few programs of the tests.
CHILD = """
import contextlib
import jaxinfer.llm
from batch_jobs import cached_llm
jaxinfer.llm.LLM = lambda path, **options: cached_llm(path, tuple(sorted(options.items())))
from jaxinfer.cli import main
main()
"""


def start(*args):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def wait_for(process, output, size: int) -> bool:
    """Until the output has so many bytes. False if the process ended before."""
    while not output.exists() or output.stat().st_size < size:
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return True


def make_job(folder, model, lines, *options):
    """(arguments of the command without its output, folder, bytes of the output of a run without a kill)."""
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    args = ["batch", folder / "in.jsonl", "-m", model, *OPTIONS, *options, "-o"]
    run_here(*args, folder / "whole.jsonl")
    return args, folder, (folder / "whole.jsonl").read_bytes()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    return make_job(folder, write_model(folder / "planted").path, mixed(LINES))


@pytest.fixture(scope="module")
def exact_job(tmp_path_factory):
    """Of a model of random weights, whose logprobs tell every rounding, and lines that ask for them."""
    folder = tmp_path_factory.mktemp("exact")
    config, weights = make_tiny("llama_gqa")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:VOCAB]
    path = write_hf(folder / "random", config | {"vocab_size": VOCAB}, weights)
    template = {"chat_template": text_fixtures.TEMPLATES["chatml"]}
    text_fixtures.save(path, text_fixtures.byte_level(), text_fixtures.BYTE_LEVEL_CONFIG | template)
    lines = mixed(LINES)
    for line in lines:
        line |= {"logprobs": 2} if "prompt" in line else {"logprobs": True, "top_logprobs": 2}
    return make_job(folder, path, lines, "--exact")


def run_here(*args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxinfer.llm, "LLM", shared)
        result = CliRunner().invoke(app, [str(word) for word in args])
    assert result.exit_code == 0, result.stderr


def shared(path, **options):
    return contextlib.nullcontext(cached_llm(path, tuple(sorted(options.items()))))


def without_start(data: bytes) -> list[dict]:
    """Records in the order of the input, without the time at which their job was begun."""
    found = [json.loads(line) for line in data.splitlines()]
    for record in found:
        del record["response"]["body"]["created"], record["checksum"]
    return sorted(found, key=lambda record: record["line"])


def kill_and_resume(job, tmp_path, num_kills: int) -> None:
    args, _, whole = job
    output = tmp_path / "out.jsonl"
    chance = random.Random(num_kills)
    torn = 0
    for i in range(num_kills):
        process = start(*args, output)
        # A random moment of the i-th part of the work, with a little chance after the last write.
        size = int(len(whole) * (i + chance.random()) / (num_kills + 1))
        if wait_for(process, output, size):
            time.sleep(chance.random() * 0.01)
            process.send_signal(signal.SIGKILL)
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, stderr.decode()
        if chance.random() < 0.5:  # a kill hits the middle of a write too seldom to wait for it
            os.truncate(output, output.stat().st_size - chance.randrange(1, 50))
        torn += not output.read_bytes().endswith(b"\n")
    assert torn
    run_here(*args, output)
    assert without_start(output.read_bytes()) == without_start(whole)


def test_three_kills(job, tmp_path):
    kill_and_resume(job, tmp_path, 3)


def test_two_kills_of_an_exact_job(exact_job, tmp_path):
    """Lines that are done again run in other company: equal to the last bit all the same."""
    _, _, whole = exact_job
    assert b'"logprobs": {' in whole or b'"logprobs":{' in whole
    kill_and_resume(exact_job, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["job", "exact_job"])
def test_twenty_kills(kind, request, tmp_path):
    kill_and_resume(request.getfixturevalue(kind), tmp_path, 20)


def test_a_job_is_exact_or_not(exact_job, tmp_path):
    args, folder, _ = exact_job
    args = [word for word in args if word != "--exact"]
    lines = (folder / "whole.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines[:-1]))
    manifest = json.loads((folder / "whole.jsonl.manifest.json").read_bytes()) | {"finished": False}
    (tmp_path / "out.jsonl.manifest.json").write_text(json.dumps(manifest))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxinfer.llm, "LLM", shared)
        result = CliRunner().invoke(app, [str(word) for word in (*args, tmp_path / "out.jsonl")])
    assert result.exit_code == 1
    assert "exact was true, is false" in result.stderr


@pytest.mark.slow
def test_sigterm_of_a_busy_process(job, tmp_path):
    """Exit code 143 within five seconds, with whole lines; a second process is refused meanwhile.

    (The default tests send the signals inside one process, and to a process without a model.)
    """
    args, _, whole = job
    output = tmp_path / "out.jsonl"
    process = start(*args, output)
    assert wait_for(process, output, 1000), process.stderr.read().decode()
    process.send_signal(signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxinfer.llm, "LLM", shared)
        second = CliRunner().invoke(app, [str(word) for word in (*args, output)])
    assert second.exit_code == 1
    assert second.stderr == f"Error: process {process.pid} is writing {output} now\n"
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    process.send_signal(signal.SIGCONT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143 and time.monotonic() - sent < 5
    assert stderr.decode().splitlines()[-1].endswith("the same command goes on.")
    assert output.read_bytes().endswith(b"\n")
    run_here(*args, output)
    assert without_start(output.read_bytes()) == without_start(whole)
