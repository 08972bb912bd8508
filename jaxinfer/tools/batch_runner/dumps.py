"""Logprobs of a job as arrays, in shards of safetensors beside its output: each whole, or not there.

OUT.dump/00000.safetensors holds N results. Its metadata has "custom_ids", a JSON list of N; `lines` i64[N] are
their lines in the input. With T tokens in all, in the order of the results:

    prompt_offsets   i64[N + 1]   the tokens of result i are prompt_offsets[i] to prompt_offsets[i + 1]
    prompt_token_ids i32[T]
    prompt_logprobs  f32[T]       of these tokens
    prompt_ranks     i32[T]       1 + the number of tokens that are more probable
    prompt_top_ids, prompt_top_logprobs   i32[T, k], f32[T, k], the best first

Where a prompt token has no logprob (the first one) they are NaN, 0, -1 and NaN. `output_*` are the same for
samples: `output_offsets` i64[S + 1], and `output_results` i64[S], the result of each.
"""

import dataclasses
import json
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from jaxinfer.outputs import RequestOutput
from jaxinfer.request import TopK
from jaxinfer.sampling.logprob_arrays import LogprobArrays
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tools.batch_runner.journal import load_record, replaced, sync_folder, whole_lines
from jaxinfer.tools.batch_runner.tasks import Task

MARK = ".jaxinfer-dump"  # a file in each folder that a job made
SHARD_BYTES = 32 * 2**20  # of arrays at which a shard is written, or
SHARD_SECONDS = 300.0  # after its first result: so much is done again after a kill

Placed = tuple[Task, RequestOutput, dict[str, Any]]


def folder_of(output: Path) -> Path:
    return output.with_name(output.name + ".dump")


def widths(dump: TopK, params: SamplingParams, vocab_size: int) -> TopK:
    """Alternatives of a line: those of the dump, or its own for its answer where these are more."""
    own = (params.logprobs or 0) if params.wants_logprobs else None
    prompt = _more(dump.prompt, params.prompt_logprobs, vocab_size)
    return TopK(prompt, _more(dump.output, own, vocab_size))


def _more(wanted: int | None, own: int | None, vocab_size: int) -> int | None:
    given = [vocab_size if k == -1 else k for k in (wanted, own) if k is not None]
    return max(given, default=None)


def for_answer(output: RequestOutput, params: SamplingParams) -> RequestOutput:
    """Only the logprobs that the line itself asks for."""

    def narrow(entries: Any, k: int | None) -> Any:
        return None if entries is None or k is None else entries.narrow(k)

    samples = [
        dataclasses.replace(sample, logprobs=narrow(sample.logprobs, params.logprobs))
        for sample in output.outputs
    ]
    prompt = narrow(output.prompt_logprobs, params.prompt_logprobs)
    return dataclasses.replace(output, prompt_logprobs=prompt, outputs=samples)


class Dump:
    """Collects finished lines until they are a shard. They count as done only once it is written."""

    def __init__(self, output: Path, topk: TopK) -> None:
        self._folder, self._topk = folder_of(output), topk
        self._folder.mkdir(exist_ok=True)
        (self._folder / MARK).touch()
        sync_folder(self._folder)
        numbers = [int(path.stem) for path in _shards(output)]
        self._next = max(numbers, default=-1) + 1
        self._lines: list[tuple[Task, RequestOutput]] = []
        self._bytes, self._since = 0, 0.0

    def add(self, task: Task, output: RequestOutput) -> None:
        if not self._lines:
            self._since = time.monotonic()
        self._lines.append((task, output))
        for entries in (output.prompt_logprobs, *(sample.logprobs for sample in output.outputs)):
            if isinstance(entries, LogprobArrays):
                self._bytes += len(entries) * (12 + 8 * entries.num_top)

    def take(self, *, rest: bool) -> list[Placed]:
        """Lines whose shard is on the disk now, with their places in it: all of them with `rest`.

        Raises JournalError if the shard cannot be written.
        """
        is_due = self._bytes >= SHARD_BYTES or time.monotonic() - self._since >= SHARD_SECONDS
        if not self._lines or not (rest or is_due):
            return []
        path = self._folder / f"{self._next:05d}.safetensors"
        content = safetensors.numpy.save(self._arrays(), {"custom_ids": json.dumps(self._ids())})
        with replaced(path) as file:
            file.write(content)
        name = f"{self._folder.name}/{path.name}"
        placed = [(*line, {"file": name, "result": i}) for i, line in enumerate(self._lines)]
        self._next, self._lines, self._bytes = self._next + 1, [], 0
        return placed

    def _ids(self) -> list[str]:
        return [task.custom_id for task, _ in self._lines]

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {"lines": np.array([task.line for task, _ in self._lines], np.int64)}
        outputs = [output for _, output in self._lines]
        if self._topk.prompt is not None:
            pieces = [(output.prompt_token_ids, output.prompt_logprobs) for output in outputs]
            arrays |= _flat("prompt", pieces, self._topk.prompt)
        if self._topk.output is not None:
            samples = [(sample.token_ids, sample.logprobs) for output in outputs for sample in output.outputs]
            arrays |= _flat("output", samples, self._topk.output)
            counts = [len(output.outputs) for output in outputs]
            arrays["output_results"] = np.repeat(np.arange(len(outputs)), counts)
        return arrays


def _flat(name: str, pieces: Sequence[tuple[list[int], Any]], num_top: int) -> dict[str, np.ndarray]:
    offsets = np.cumsum([0, *(len(ids) for ids, _ in pieces)])
    total = int(offsets[-1])
    arrays = {
        "token_ids": np.zeros(total, np.int32),
        "logprobs": np.full(total, np.nan, np.float32),
        "ranks": np.zeros(total, np.int32),
        "top_ids": np.full((total, num_top), -1, np.int32),
        "top_logprobs": np.full((total, num_top), np.nan, np.float32),
    }
    for begin, (ids, entries) in zip(offsets.tolist(), pieces, strict=False):
        arrays["token_ids"][begin : begin + len(ids)] = ids
        for field, values in entries.narrow(num_top).arrays()._asdict().items():
            arrays[field][begin + entries.start : begin + len(ids)] = values
    named = {f"{name}_{field}": values for field, values in arrays.items()}
    return named | {f"{name}_offsets": offsets}


def whole_shards(output: Path, results: Iterable[Path]) -> set[str]:
    """Names of the shards each of whose results has a record in one of the files `results`."""
    seen: dict[str, bytearray] = {}
    for path in _shards(output):
        seen[f"{path.parent.name}/{path.name}"] = bytearray(_num_results(path))
    for file in results:
        if file.exists():
            with file.open("rb") as opened:
                for _, line in whole_lines(opened):
                    place = (load_record(line) or {}).get("dump", {"file": None, "result": 0})
                    found = seen.get(place["file"], bytearray())
                    if place["result"] < len(found):
                        found[place["result"]] = 1
    return {name for name, found in seen.items() if found and all(found)}


def is_ours(output: Path) -> bool:
    """Says whether a job wrote the folder, so that its shards may be deleted; True where there is none."""
    folder = folder_of(output)
    return not folder.exists() or (folder / MARK).is_file() or (folder.is_dir() and not any(folder.iterdir()))


def delete_other_shards(output: Path, whole: set[str]) -> None:
    for path in _shards(output):
        if f"{path.parent.name}/{path.name}" not in whole:
            path.unlink()


def _shards(output: Path) -> list[Path]:
    """Lists the shards of a folder that a job has marked; what others put there has other names."""
    folder = folder_of(output)
    if not (folder / MARK).is_file():
        return []
    return sorted(path for path in folder.glob("*.safetensors") if re.fullmatch(r"\d{5,}", path.stem))


def _num_results(path: Path) -> int:
    """Results in a shard, 0 if it is damaged."""
    try:
        with safetensors.safe_open(path, "numpy") as shard:
            return shard.get_slice("lines").get_shape()[0]
    except (safetensors.SafetensorError, OSError):
        return 0
