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
from batch_jobs import OPTIONS, cached_llm, mixed, write_model
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


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """(arguments of the command without its output, folder, bytes of the output of a run without a kill)."""
    folder = tmp_path_factory.mktemp("kill")
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, mixed(LINES))))
    model = write_model(folder / "planted")
    args = ["batch", folder / "in.jsonl", "-m", model.path, *OPTIONS, "-o"]
    run_here(*args, folder / "whole.jsonl")
    return args, folder, (folder / "whole.jsonl").read_bytes()


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
        del record["response"]["body"]["created"]
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


@pytest.mark.slow
def test_twenty_kills(job, tmp_path):
    kill_and_resume(job, tmp_path, 20)


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
