"""What an LLM took it gives back, and processes that had one end well."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OPEN_AND_CLOSE = """
import gc, json, os, sys
sys.path.append("tests")
from engines import load
from jaxinfer import LLM, SamplingParams

model, config, weights = load("planted")
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
maps, resident = [], []
for i in range(int(sys.argv[1])):
    options = dict(max_num_seqs=4, max_model_len=64, num_pages=8, background_compile=i % 4 == 3)
    llm = LLM(config=config, weights=weights, **options)
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
    llm.close()
    del llm
    gc.collect()
    with open("/proc/self/maps") as file:
        maps.append(len(file.readlines()))
    with open("/proc/self/statm") as file:
        resident.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
print(json.dumps([maps, resident]))
"""


def run(code: str, *arguments: str, timeout: float = 300) -> str:
    """Standard output of a fresh process that ends well."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=timeout
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def assert_flat(number: int, timeout: float) -> None:
    """Memory maps and resident memory after each of so many LLMs, from the second on."""
    maps, resident = json.loads(run(OPEN_AND_CLOSE, str(number), timeout=timeout).splitlines()[-1])
    assert len(maps) == number
    # An LLM of two programs has about 400 maps more while it lives.
    assert max(maps[1:]) - maps[1] < 200, maps
    assert max(resident[1:]) - resident[1] < 50e6, resident


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells its memory maps")
def test_memory_is_flat_over_llms_that_are_opened_and_closed():
    assert_flat(8, timeout=240)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells its memory maps")
def test_memory_is_flat_over_two_hundred_llms():
    assert_flat(200, timeout=3600)


REFUSED_IN_THE_MIDDLE = """
import sys
sys.path.append("tests")
import jax
from engines import load
from jaxinfer import LLM, SamplingParams

def slow(logits, rows, params):  # the prefill is on the device for about a second
    return jax.lax.fori_loop(0, 3_000_000, lambda i, x: x + 1e-9, logits)

model, config, weights = load("planted")
llm = LLM(config=config, weights=weights, max_num_seqs=4, max_model_len=64, num_pages=8, logits_processors=[slow])
get = llm.engine.programs.get

def refuse(program, *arguments):
    if program.kind == "decode":
        raise ValueError("refused")
    return get(program, *arguments)

llm.engine.programs.get = refuse
try:
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
except ValueError as error:
    print(error, flush=True)
"""


def test_a_process_ends_well_after_a_program_was_refused_while_another_runs():
    """Without `close`, and with a step on the device whose result nobody waits for."""
    assert run(REFUSED_IN_THE_MIDDLE) == "refused\n"


FORK = """
import os, sys, threading
sys.path.append("tests")
from engines import load
from jaxinfer import LLM, SamplingParams

model, config, weights = load("planted")
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
make = lambda: LLM(config=config, weights=weights, max_num_seqs=4, max_model_len=64, num_pages=8)
llm = make()
(before,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
unread = llm.stream([[5, 6]], params)
has_lock, may_release = threading.Event(), threading.Event()

def hold():
    with llm._loop.lock:
        has_lock.set()
        may_release.wait()

thread = threading.Thread(target=hold)
thread.start()
has_lock.wait()
if os.fork() == 0:
    calls = {
        "generate": lambda: llm.generate([[5, 6, 7]], params, use_tqdm=False),
        "stream": lambda: next(llm.stream([[5, 6, 7]], params)),
        "what was begun": lambda: next(unread),
        "loglikelihood": lambda: llm.loglikelihood([[5]], [[6]]),
        "warmup": llm.warmup,
        "update_weights": lambda: llm.update_weights(weights),
        "step": llm.engine.step,
        "a new one": make,
    }
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            print(name, "by multiprocessing's 'spawn' method" in str(error), flush=True)
    llm.stats()
    del unread
    llm.close()
    print("end of the child", flush=True)
    os._exit(0)  # as multiprocessing does; at a plain exit JAX 0.12.0 itself ends with SIGSEGV
may_release.set()
thread.join()
print("the child's status", os.wait()[1], flush=True)
(after,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
assert after.outputs[0].token_ids == before.outputs[0].token_ids
llm.close()
"""


def test_a_forked_process_is_told_so_and_neither_it_nor_its_parent_hangs():
    names = ["generate", "stream", "what was begun", "loglikelihood", "warmup", "update_weights", "step"]
    expected = [f"{name} True" for name in [*names, "a new one"]]
    out = run(FORK, timeout=120)
    assert out.splitlines() == [*expected, "end of the child", "the child's status 0"]
