"""What holds for all tests."""

import gc
import sys

import pytest


@pytest.fixture(autouse=True, scope="module")
def _programs_end_with_their_module():
    """Frees compiled programs: each takes many memory maps, and Linux aborts a process at 65,530 of them."""
    yield
    gc.collect()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
