"""Switches of JAX that the user's process has set do not reach an engine: it draws the ids that it draws anyway."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

# Each before anything of jaxinfer is imported.
SETTINGS = {
    "x64": {"jax_enable_x64": True},
    "rank promotion": {"jax_numpy_rank_promotion": "raise"},
    "dtype promotion": {"jax_numpy_dtype_promotion": "strict"},
    "debug nans": {"jax_debug_nans": True, "jax_debug_infs": True},
    "another PRNG": {"jax_default_prng_impl": "rbg", "jax_threefry_partitionable": False},
    "transfer guard": {"jax_transfer_guard": "disallow"},
    "eight devices": {"jax_num_cpu_devices": 8},
}
SCRIPT = """
import json, sys
import jax
for name, value in json.loads(sys.argv[1]).items():
    jax.config.update(name, value)
from jaxinfer import LLM, SamplingParams

options = dict(max_num_seqs=4, max_model_len=64, num_pages=8, page_size=16, background_compile=False)
params = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=2, logprobs=2),
    SamplingParams(temperature=1, top_p=0.9, seed=7, max_tokens=6, ignore_eos=True, n=2),
    SamplingParams(temperature=0.7, top_k=9, min_p=0.01, seed=8, repetition_penalty=1.2, max_tokens=6, ignore_eos=True),
]
with LLM(sys.argv[2], **options) as llm:
    outputs = llm.generate([[5, 6, 7], [8, 9], [4, 3, 2, 5]], params, use_tqdm=False)
print(json.dumps([list(sample.token_ids) for output in outputs for sample in output.outputs]))
"""


@functools.cache
def ids(folder: str, settings: str) -> list[list[int]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, settings, folder], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    import text_fixtures
    from tiny_models import make_tiny, write_hf

    folder: Path = write_hf(tmp_path_factory.mktemp("tiny"), *make_tiny("llama_gqa"))
    text_fixtures.save(folder, text_fixtures.byte_level(), text_fixtures.BYTE_LEVEL_CONFIG)
    return str(folder)


@pytest.mark.parametrize("name", SETTINGS)
def test_switches_of_the_process_do_not_reach_an_engine(tiny, name):
    assert ids(tiny, json.dumps(SETTINGS[name])) == ids(tiny, "{}")
