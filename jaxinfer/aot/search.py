"""The largest setting that fits, found by compiling: more pages, rows or tokens never need less memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SMALLEST_POOL = 2  # pages: the null page and one more
SMALLEST_STEP = 32  # tokens


def largest_fit(
    excess: Callable[[int], int], low: int, high: int, unit: int, guess: int | None = None
) -> int:
    """The largest n in low..high - 1 that fits; low - 1 if none does.

    Args:
      excess: bytes that n is over the memory (over 0: does not fit; at most 0: so many are left).
      high: known not to fit.
      unit: bytes that n grows by, about: where the next try is. The answer does not rest on it.
      guess: the first try.
    """
    fits, fails = low - 1, high
    while fails - fits > 1:
        n = (fits + fails) // 2 if guess is None else min(max(guess, fits + 1), fails - 1)
        over = excess(n)
        if over > 0:
            fails, guess = n, n - math.ceil(over / unit)
        else:
            fits, guess = n, n + max(1, -over // unit)
    return fits


def probes(programs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The programs that need the most memory: of most tokens, rows and steps for each kind and variant."""
    best: dict[tuple, Mapping[str, Any]] = {}
    for program in programs:
        key = program["kind"], program["variant"]
        size = program["num_tokens"], program["num_rows"], program["num_steps"]
        if key not in best or size > tuple(best[key][k] for k in ("num_tokens", "num_rows", "num_steps")):
            best[key] = program
    return [program["name"] for program in best.values()]


def over(record: Mapping[str, Any]) -> int:
    """Bytes that a program is over the device's memory; what is left is negative.

    Raises:
      ValueError: it failed for another reason than memory, which no smaller setting cures.
    """
    if record["result"] == "too large":
        return max(1, record["needed_bytes"] - record["usable_bytes"])
    if record["result"] != "compiled":
        raise ValueError(f"{record['program']} is {record['result']}: {record['why']}")
    return record["total_bytes"] - record["usable_bytes"]


def largest_setting(
    describe: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    compile_: Callable[[Mapping[str, Any], str], Mapping[str, Any]],
    options: Mapping[str, Any],
    worst: int,
) -> dict[str, Any] | None:
    """Options near to `options` with which every probe fits, or None.

    First fewer pages with all else equal; if not even two fit, steps of half the tokens and rows, again and again.

    Args:
      describe, compile_: of `Compiler`.
      options: that do not fit.
      worst: bytes that they are over the memory.
    """
    resolved, options = describe(options), dict(options)
    settings = dict(resolved["options"])
    unit = resolved["bytes_per_page"]

    def excess(num_pages: int) -> int:
        tried = options | pool(num_pages)
        # The first that does not fit decides; the others need not be compiled.
        most = -math.inf
        for name in probes(describe(tried)["programs"]):
            most = max(most, over(compile_(tried, name)))
            if most > 0:
                break
        return int(most)

    def pool(num_pages: int) -> dict[str, Any]:
        """So many pages; no sequence is longer than they are."""
        tokens = (num_pages - 1) * settings["page_size"]
        return {
            "num_pages": num_pages,
            "page_size": settings["page_size"],
            "max_model_len": min(settings["max_model_len"], tokens),
            "kv_cache_memory_bytes": None,
            "gpu_memory_utilization": None,
        }

    present, high = settings["num_pages"], settings["num_pages"]
    while True:
        guess = present - math.ceil(worst / unit) if worst > 0 else None
        found = largest_fit(excess, SMALLEST_POOL, high, unit, guess)
        if found >= SMALLEST_POOL:
            changed = options | pool(found)
            return {key: value for key, value in changed.items() if value is not None}
        tokens = settings["max_num_batched_tokens"] // 2
        if tokens < SMALLEST_STEP:
            return None
        rows = max(1, min(settings["max_num_seqs"] // 2, tokens))
        settings |= {"max_num_batched_tokens": tokens, "max_num_seqs": rows}
        options = options | {"max_num_batched_tokens": tokens, "max_num_seqs": rows}
        worst, high = 0, present + 1  # with smaller steps all of them may fit
