"""The outputs of all shards of a job as one file, in the order of the input."""

import contextlib
from pathlib import Path
from typing import Any

from jaxinfer.tools.batch_runner import manifest
from jaxinfer.tools.batch_runner.journal import JournalError, locked, sort_by_line


def merge(parts: list[Path], target: Path) -> int:
    """Writes `target` from the outputs of shards 1/n to n/n; returns the number of records.

    Raises JournalError, with nothing written, if a shard is missing, unfinished, still written, or of another
    job, or if `target` exists.
    """
    if target.exists():
        raise JournalError(f"{target} exists; choose another output, or delete it")
    begun = {part: _manifest_of(part) for part in parts}
    first, num_parts = parts[0], int(begun[parts[0]]["asked"]["shard"].partition("/")[2])
    for part in parts:
        manifest.check_same(part, _shared(begun[part]), _shared(begun[first]))
    shards = sorted(int(begun[part]["asked"]["shard"].partition("/")[0]) for part in parts)
    missing = sorted(set(range(1, num_parts + 1)) - set(shards))
    if missing or len(shards) > num_parts:
        wrong = f"{missing[0]}/{num_parts} is missing" if missing else "a shard is there twice"
        raise JournalError(f"all {num_parts} shards must be given once; {wrong}")
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(locked(part))
            if not _manifest_of(part)["finished"]:
                raise JournalError(f"{part} is not finished; run its job again, then merge")
        return sort_by_line(parts, target)


def _manifest_of(part: Path) -> dict[str, Any]:
    begun = manifest.load(part)
    if begun is None or not part.exists():
        raise JournalError(f"{part} is no output of a batch job: it needs its .manifest.json beside it")
    return begun


def _shared(begun: dict[str, Any]) -> dict[str, Any]:
    """What the shards of one job have in common; devices may differ."""
    return {name: value for name, value in begun["asked"].items() if name not in ("shard", "errors")}
