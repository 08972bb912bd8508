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
