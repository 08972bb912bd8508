"""Programs compiled behind the steps: once each, in time for whoever needs them, and never in the way of an exit."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from engines import BUCKETS, drain, generate, greedy_params, load, make_engine

from jaxinfer.engine import Engine
from jaxinfer.programs.background import BackgroundCompiler, give_back_memory
from jaxinfer.programs.buckets import Program
from jaxinfer.programs.compile import Programs
from jaxinfer.request import SamplingParams

NAME = "planted"
A, B = (Program("decode", rows, rows) for rows in (1, 2))


class Made(Programs):
    """Programs that are made by waiting: `begun` says which, and each waits until it is let go.

    `lowered` says which were lowered, and on which thread.
    """

    def __init__(self) -> None:
        model, config, _ = load(NAME)
        super().__init__(model, config)
        self.begun: list[str] = []
        self.lowered: list[tuple[str, str]] = []
        self.started, self.go, self.error = threading.Event(), threading.Event(), None

    def identity(self, program, arguments):
        return ""

    def _jit(self, program, arguments):
        return None

    def _lower(self, name, jitted, arguments, identity):
        self.lowered.append((name, threading.current_thread().name))

        def compile_():
            self.begun.append(name)
            self.started.set()
            assert self.go.wait(30)
            if self.error is not None:
                raise self.error
            return lambda: name

        return compile_


def test_a_step_waits_for_the_program_under_way_and_nothing_is_compiled_twice():
    programs = Made()
    background = BackgroundCompiler(programs, [(A, ()), (B, ())])
    assert programs.started.wait(30)
    threading.Timer(0.05, programs.go.set).start()
    assert programs.get(A, ())() == str(A)
    assert programs.get(B, ())() == str(B)
    background.close()
    assert sorted(programs.begun) == sorted(map(str, (A, B))) and len(programs) == 2


def test_what_is_held_back_begins_when_it_is_released_and_ends_with_a_stop():
    programs = Made()
    programs.go.set()
    background = BackgroundCompiler(programs, [(A, ()), (B, ())], hold=True)
    programs.get(A, ())
    background._thread.join(0.2)
    assert programs.begun == [str(A)] and background.under_way
    background.release()
    assert programs.get(B, ())() == str(B)
    background.close()
    held = BackgroundCompiler(Made(), [], hold=True)
    held.close()
    waiting = Made()
    waiting.go.set()
    held = BackgroundCompiler(waiting, [(A, ()), (B, ())], hold=True)
    held.close()
    assert waiting.begun in ([], [str(A)])


def test_of_what_is_held_back_the_first_is_lowered_by_the_caller_and_compiled_behind_it():
    programs, caller = Made(), threading.current_thread().name
    background = BackgroundCompiler(programs, [(A, ()), (B, ())], hold=True)
    assert programs.lowered == [(str(A), caller)] and not programs.compiled()
    programs.go.set()
    assert programs.get(A, ())() == str(A)
    background.release()
    background._thread.join(30)
    assert programs.lowered == [(str(A), caller), (str(B), "jaxinfer-compile")]
    background.close()


def test_a_program_that_cannot_be_lowered_is_said_and_left_to_the_step_that_needs_it(caplog):
    programs = Made()
    programs.go.set()
    programs._lower = lambda *arguments: 1 / 0  # type: ignore[method-assign]
    background = BackgroundCompiler(programs, [(A, ())], hold=True)
    background.close()
    assert "division by zero" in caplog.text
    with pytest.raises(ZeroDivisionError):
        programs.get(A, ())
    del programs._lower
    assert programs.get(A, ())() == str(A)


def test_a_failure_is_raised_to_the_step_that_waits_and_the_next_one_tries_again(caplog):
    programs = Made()
    programs.error = RuntimeError("no room")
    background = BackgroundCompiler(programs, [(A, ())])
    assert programs.started.wait(30)
    threading.Timer(0.05, programs.go.set).start()
    with pytest.raises(RuntimeError, match="no room"):
        programs.get(A, ())
    background.close()
    programs.error = None
    assert programs.get(A, ())() == str(A)
    assert "no room" in caplog.text and programs.begun == [str(A)] * len(programs.begun)


def test_stop_begins_no_further_program():
    programs = Made()
    background = BackgroundCompiler(programs, [(A, ()), (B, ())])
    assert programs.started.wait(30)
    background.stop()
    programs.go.set()
    background.close()
    assert programs.begun == [str(A)]


def test_the_rest_is_compiled_behind_the_first_token_with_the_variant_in_use_first():
    buckets = replace(BUCKETS, prefill=((32, 4),), decode=(4,), multi_step=(4,))
    engine = make_engine("planted", buckets=buckets, steps=1, background_compile=True)
    generate(engine, ([5, 6, 7], greedy_params(6, ignore_eos=True)))
    background = engine._background
    assert background is not None
    background._thread.join(240)
    assert [program.variant for program, _ in background._jobs] == ["greedy"] * 2 + ["sample"] * 2
    assert len(engine.programs) == len(engine.config.buckets.programs()) == 4
    seconds = engine.programs.compile_seconds
    generate(engine, ([8, 9], SamplingParams(max_tokens=6, ignore_eos=True)))  # runs on what was compiled
    assert len(engine.programs) == 4 and engine.programs.compile_seconds == seconds
    drain(engine)


def test_what_a_first_prompt_needs_is_compiled_while_its_weights_are_read():
    """The engine has shapes in place of weights then; its tokens are those of an engine that had them at once."""
    model, config, weights = load(NAME)
    plain = make_engine(NAME)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    engine = Engine(model, config, shapes, plain.spec, plain.config, compile_first=True)
    assert engine._first is not None
    prefill, decode = BUCKETS.first_programs()
    deadline = time.monotonic() + 240
    while not engine.programs.compiled() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert set(engine.programs.compiled()) == {prefill}
    engine.take_weights(weights)
    engine._first._thread.join(240)
    first = set(engine.programs.compiled())
    assert first == {prefill, decode}
    request = [5, 6, 7], greedy_params(9, ignore_eos=True)
    assert generate(engine, request) == generate(plain, request)
    assert set(engine.programs.compiled()) == first


def test_what_a_first_run_frees_is_given_back_once_for_each_program(monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr("jaxinfer.engine.give_back_memory", lambda: calls.append(1))
    engine = make_engine(NAME)
    generate(engine, ([5, 6, 7], greedy_params(9, ignore_eos=True)))
    drain(engine)
    assert len(calls) == 2  # a prefill and a decode
    generate(engine, ([8, 9, 4], greedy_params(9, ignore_eos=True)))
    assert len(calls) == 2


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
