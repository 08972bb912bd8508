"""Programs compiled behind the steps: once each, in time for whoever needs them, and never in the way of an exit."""

import ctypes
import gc
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from engines import BUCKETS, drain, generate, greedy_params, make_engine

from jaxinfer.engine import Engine
from jaxinfer.programs.background import BackgroundCompiler, give_back_memory
from jaxinfer.programs.buckets import Program
from jaxinfer.programs.compile import Programs
from jaxinfer.sampling.params import SamplingParams

NAME = "planted"
A, B = (Program("decode", rows, rows) for rows in (1, 2))


class Made(Programs):
    """Programs that are made by waiting: `begun` says which, and each waits until it is let go.

    `traced` says which were traced, and on which thread.
    """

    def __init__(self) -> None:
        engine = make_engine(NAME)
        super().__init__(engine.programs.model, engine.programs.shapes)
        self.begun: list[str] = []
        self.traced: list[tuple[str, str]] = []
        self.started, self.go, self.error = threading.Event(), threading.Event(), None

    def _lower(self, program):
        if self._lowered.pop(program, None) is None:
            self.traced.append((str(program), threading.current_thread().name))
        return True

    def _compile(self, name, lowered):
        self.begun.append(name)
        self.started.set()
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        return lambda: name


def compiler(programs, *wanted):
    background = BackgroundCompiler(programs)
    background.add(wanted)
    return background


def test_a_step_waits_for_the_program_under_way_and_nothing_is_compiled_twice():
    programs = Made()
    background = compiler(programs, A, B)
    assert programs.started.wait(30)
    assert programs.under_way
    threading.Timer(0.05, programs.go.set).start()
    assert programs.get(A)() == str(A)
    assert programs.get(B)() == str(B)
    assert background.wait(30)
    assert sorted(programs.begun) == sorted(map(str, (A, B))) and len(programs) == 2
    assert not programs.under_way


def test_what_is_traced_before_is_only_compiled_behind():
    programs, caller = Made(), threading.current_thread().name
    programs.trace(A)
    assert programs.traced == [(str(A), caller)] and not programs.compiled()
    programs.go.set()
    background = compiler(programs, A)
    assert background.wait(30)
    background.add([B])  # the thread had ended
    assert background.wait(30)
    assert programs.traced == [(str(A), caller), (str(B), "jaxinfer-compile")]
    assert set(programs.compiled()) == {A, B}


def test_a_program_that_cannot_be_traced_is_said_and_left_to_the_step_that_needs_it(caplog):
    programs = Made()
    programs.go.set()
    programs._lower = lambda program: 1 / 0  # type: ignore[method-assign]
    compiler(programs, A).wait(30)
    assert "division by zero" in caplog.text
    with pytest.raises(ZeroDivisionError):
        programs.get(A)
    del programs._lower
    assert programs.get(A)() == str(A)


def test_a_failure_is_raised_to_the_step_that_waits_and_the_next_one_tries_again(caplog):
    programs = Made()
    programs.error = RuntimeError("no room")
    background = compiler(programs, A)
    assert programs.started.wait(30)
    threading.Timer(0.05, programs.go.set).start()
    with pytest.raises(RuntimeError, match="no room"):
        programs.get(A)
    background.close()
    programs.error = None
    assert programs.get(A)() == str(A)
    assert "no room" in caplog.text and programs.begun == [str(A)] * len(programs.begun)


def test_close_begins_no_further_program_and_waits_for_the_one_under_way():
    programs = Made()
    background = compiler(programs, A, B)
    assert programs.started.wait(30)
    threading.Timer(0.05, programs.go.set).start()
    background.close()
    assert programs.begun == [str(A)] and set(programs.compiled()) == {A}
    background.add([B])
    assert background.wait(30) and programs.begun == [str(A)]


def test_programs_that_nobody_has_any_more_are_not_compiled():
    programs = Made()
    programs.go.set()
    begun = programs.begun
    background = BackgroundCompiler(programs)
    del programs
    gc.collect()
    background.add([A])
    assert background.wait(30) and not begun


def test_the_rest_is_compiled_behind_the_first_token_with_the_variant_in_use_first():
    buckets = replace(BUCKETS, prefill=((32, 4),), decode=(4,), multi_step=(4,))
    engine = make_engine("planted", buckets=buckets, steps=1, background_compile=True)
    generate(engine, ([5, 6, 7], greedy_params(6, ignore_eos=True)))
    assert engine._background is not None
    assert engine._background.wait(240)
    assert [program.variant for program in engine.programs.compiled()] == ["greedy"] * 2 + ["sample"] * 2
    assert len(engine.programs) == len(engine.config.buckets.programs()) == 4
    seconds = engine.programs.compile_seconds
    generate(engine, ([8, 9], SamplingParams(max_tokens=6, ignore_eos=True)))  # runs on what was compiled
    assert len(engine.programs) == 4 and engine.programs.compile_seconds == seconds
    drain(engine)


def test_what_a_first_prompt_needs_is_compiled_from_shapes_of_weights():
    """While weights are read; the tokens are those of programs that had them at once."""
    plain = make_engine(NAME)
    shapes = plain.programs.shapes
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes.weights))
    programs = Programs(plain.programs.model, shapes, matmul_precision="highest")
    first = BUCKETS.first_programs()
    assert compiler(programs, *first).wait(240)
    engine = Engine(programs, plain.weights, plain.config)
    request = [5, 6, 7], greedy_params(9, ignore_eos=True)
    assert generate(engine, request) == generate(plain, request)
    assert set(engine.programs.compiled()) == set(first)


SHORT = """
import sys
sys.path.append("tests")
from engines import load
from jaxinfer import LLM, SamplingParams

model, config, weights = load("planted")
llm = LLM(config=config, weights=weights, max_num_seqs=4, max_model_len=64, num_pages=8, compilation_cache_dir=None)
out = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
print(len(out[0].outputs[0].token_ids), llm.engine._background._thread.is_alive(), flush=True)
"""


def test_a_short_script_ends_cleanly_while_a_program_is_compiled_behind_it():
    result = subprocess.run(
        [sys.executable, "-c", SHORT],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (result.returncode, result.stdout) == (0, "2 True\n"), result.stderr


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_freed_memory_goes_back_to_the_system():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [libc.malloc(64 << 10) for _ in range(1024)]
    for block in blocks:
        ctypes.memset(block, 1, 64 << 10)
    for block in blocks[:-1]:  # the last one keeps the heap from shrinking by itself
        libc.free(block)
    before = resident()
    give_back_memory()
    assert before - resident() > 50 << 20
    libc.free(blocks[-1])
