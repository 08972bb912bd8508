"""What holds for all tests."""

import gc
import signal
import sys

import pytest

# Whoever starts the tests may ignore SIGINT (`nohup`, a shell's `&`), which children would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def _programs_end_with_their_module():
    """Frees compiled programs: each takes many memory maps, and Linux aborts a process at 65,530 of them."""
    yield
    gc.collect()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
