"""The largest setting that fits, found by compiling: more pages, rows or tokens never need less memory."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxinfer.options.llm_options import POOL_SIZES

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
    fits, fails, step = low - 1, high, 0
    while fails - fits > 1:
        n = guess if guess is not None and fits < guess < fails else (fits + fails) // 2
        over = excess(n)
        # Compilers round what is missing (to 10 MiB) and keep some of what is left: so each further step the same
        # way is at least twice the one before, and a guess outside of what is known is given up for the middle.
        if over > 0:
            fails, step = n, min(-math.ceil(over / unit), 2 * step)
        else:
            fits, step = n, max(1, -over // unit, 2 * step)
        guess = n + step
    return fits


def kinds(programs: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """(kind, variant) of programs."""
    return {(program["kind"], program["variant"]) for program in programs}


def probes(
    programs: Sequence[Mapping[str, Any]], among: Collection[tuple[str, str]] | None = None
) -> list[str]:
    """The programs that need the most memory: of most tokens, rows and steps for each kind and variant.

    among: the kinds and variants that are looked at; None for all.
    """
    best: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for program in programs:
        key = program["kind"], program["variant"]
        if among is not None and key not in among:
            continue
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
    like: Collection[str] | None = None,
) -> dict[str, Any] | None:
    """Options near to `options` with which every probe fits, or None.

    First fewer pages with all else equal; if not even two fit, one step at a time; then steps of half the tokens and
    rows, again and again. Never more pages than were asked for, or than all rows can fill.

    Args:
      describe, compile_: of `Compiler`.
      options: that do not fit.
      worst: bytes that they are over the memory.
      like: names of programs; those of their kinds and variants matter. None for all.
    """
    resolved, options = describe(options), dict(options)
    settings = dict(resolved["options"])
    unit = resolved["bytes_per_page"]
    among = kinds(p for p in resolved["programs"] if like is None or p["name"] in like)

    failing = ""  # the program that did not fit in the last try

    def excess(num_pages: int) -> int:
        nonlocal failing
        tried = options | pool(num_pages)
        # The first that does not fit decides, and the others need not be compiled: so the likeliest goes first.
        most = -math.inf
        for name in sorted(probes(describe(tried)["programs"], among), key=lambda name: name != failing):
            most = max(most, over(compile_(tried, name)))
            if most > 0:
                failing = name
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

    present = settings["num_pages"]
    most_pages = present
    if all(
        options.get(name) is None for name in POOL_SIZES
    ):  # nobody asked for so few: a plan had no room for more
        full = settings["max_num_seqs"] * math.ceil(settings["max_model_len"] / settings["page_size"])
        most_pages = max(present, min(1 + full, resolved["usable_bytes"] // unit))
    guess, high = present - math.ceil(worst / unit), present
    while True:
        found = largest_fit(excess, SMALLEST_POOL, high, unit, guess)
        if found >= SMALLEST_POOL:
            changed = options | pool(found)
            return {key: value for key, value in changed.items() if value is not None}
        less = _less(settings)
        if less is None:
            return None
        settings |= less
        options |= less
        guess, high = present, most_pages + 1  # with less beside them all of them may fit


def _less(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """What to give up next: several steps at once, then half of the tokens and rows of a step."""
    if settings["decode_steps"] > 1:
        return {"decode_steps": 1}
    tokens = settings["max_num_batched_tokens"] // 2
    if tokens < SMALLEST_STEP:
        return None
    return {
        "max_num_batched_tokens": tokens,
        "max_num_seqs": max(1, min(settings["max_num_seqs"] // 2, tokens)),
    }
