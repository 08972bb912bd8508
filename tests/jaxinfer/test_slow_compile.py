"""The line that says why a start takes long: once in a process, and not where a program comes at once."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from engines import make_engine

from jaxinfer.programs import slow_compile
from jaxinfer.programs.compile import Programs

SECONDS = 0.2


class Computation:
    """A lowered program that takes `seconds` to compile."""

    def __init__(self, seconds):
        self.seconds = seconds

    def compile(self, compiler_options):
        time.sleep(self.seconds)
        return self


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.setattr(slow_compile, "SECONDS", SECONDS)
    monkeypatch.setattr(slow_compile, "_is_said", False)
    engine = make_engine("planted")
    return Programs(engine.programs.model, engine.programs.shapes)


def said(caplog):
    return [(r.levelno, r.getMessage()) for r in caplog.records if r.name == slow_compile.__name__]


def test_a_program_that_is_compiled_for_long_is_said_once(programs, caplog):
    programs._compile("prefill[16,4]", (Computation(0), 0.0))
    assert said(caplog) == []
    for name in ("prefill[128,1]", "decode[4,1]"):
        programs._compile(name, (Computation(4 * SECONDS), 0.0))
    folder = jax.config.jax_compilation_cache_dir
    assert folder, "the tests have a cache"
    why = f"a first start compiles its programs, later ones read them from {folder}"
    assert said(caplog) == [(logging.WARNING, f"compiling prefill[128,1]: {why}")]


def test_without_a_cache_it_says_so(programs, caplog):
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        programs._compile("decode[4,1]", (Computation(4 * SECONDS), 0.0))
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
    ((_, line),) = said(caplog)
    assert line.startswith(
        "compiling decode[4,1]: every start compiles its programs, since no compilation_cache"
    )


def test_a_compiler_that_fails_leaves_no_line_behind(programs, caplog):
    class Failing:
        def compile(self, compiler_options):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        programs._compile("decode[4,1]", (Failing(), 0.0))
    time.sleep(2 * SECONDS)
    assert said(caplog) == []


def test_a_script_that_sets_up_no_logging_shows_it():
    code = """
import time
from jaxinfer.programs import slow_compile
slow_compile.SECONDS = 0.05
with slow_compile.said("decode[4,1]"):
    time.sleep(1)
"""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stderr.startswith("compiling decode[4,1]: ") and result.stderr.count("\n") == 1, (
        result.stderr
    )
