"""Times a kernel as the device runs it: many calls in one program, each of which needs the one before."""

import time
from collections.abc import Callable
from typing import Any

import jax

TARGET_SECONDS = 0.05  # of one timed program: far above what starting it costs
MAX_CALLS = 500
MAX_SECONDS = 2.0  # spent on repetitions


def num_calls(bound_s: float) -> int:
    """Calls of one program, for a kernel that needs at least `bound_s`: fewer the longer it takes."""
    return max(2, min(MAX_CALLS, int(TARGET_SECONDS / max(2 * bound_s, 1e-9))))


def seconds_per_call(
    step: Callable[[Any, Any], Any], carry: Any, arrays: Any, calls: int, repeats: int = 5
) -> float:
    """The least seconds, over at most `repeats` runs, of one `carry = step(carry, arrays)`.

    The host starts one program of `calls` calls, so that its own time (some 0.1 ms per start) is not in the
    figure. No call can be left out or moved, since each reads the carry of the one before.

    Args:
      step: a pure function; its result has the structure, shapes and dtypes of `carry`.
      carry: arrays that a call changes. They are donated.
      arrays: arrays that every call reads.
    """

    def run(carry: Any, arrays: Any) -> Any:
        return jax.lax.fori_loop(0, calls, lambda _, carry: step(carry, arrays), carry)

    compiled = jax.jit(run, donate_argnums=0).lower(carry, arrays).compile()
    carry = jax.block_until_ready(compiled(carry, arrays))
    times: list[float] = []
    while len(times) < repeats and sum(times) < MAX_SECONDS:
        start = time.perf_counter()
        carry = jax.block_until_ready(compiled(carry, arrays))
        times.append(time.perf_counter() - start)
    return min(times) / calls
