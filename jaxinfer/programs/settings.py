"""Switches of JAX that a process may have set, and that must not reach an engine."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def own_settings() -> Iterator[None]:
    """JAX's own defaults for this thread: what is traced, compiled, run and moved inside does not know the process's.

    About 20 microseconds to enter and leave.
    """
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.default_prng_impl("threefry2x32"),
        jax.threefry_partitionable(True),
        jax.debug_nans(
            False
        ),  # padding may be NaN; it also switches donation off, and a second cache would not fit
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.check_tracer_leaks(False),
        jax.transfer_guard("allow"),
    ):
        yield
