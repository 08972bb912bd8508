"""A batch job from its input file to its output file; it can be killed at any moment and run again."""

import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jaxinfer.request import TopK, hash64
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tools.batch_runner import dumps, inputs, manifest
from jaxinfer.tools.batch_runner.index import Index
from jaxinfer.tools.batch_runner.inputs import BadLine, Value
from jaxinfer.tools.batch_runner.journal import (
    JournalError,
    is_ours,
    lock_path,
    locked,
    recover,
    sort_by_line,
)
from jaxinfer.tools.batch_runner.ordered import END, absorb, early_path, last_in_order
from jaxinfer.tools.batch_runner.progress import Progress, Totals
from jaxinfer.tools.batch_runner.results import Results
from jaxinfer.tools.batch_runner.tasks import parse

if TYPE_CHECKING:
    from jaxinfer.llm import LLM


@dataclass(frozen=True)
class Job:
    """What to do. Only `ordered`, `max_failures`, `resume` and `overwrite` may change when a job goes on."""

    input: Path
    output: Path
    model: str  # as the user named it; written into the answers
    model_hash: str
    defaults: SamplingParams  # of sampling fields that a line leaves out
    exact: bool = False  # results of a resumed job have the bits of one that ran through
    engine_options: tuple[
        tuple[str, Any], ...
    ] = ()  # options of the LLM that decide results, as they were given
    seed: int = 0  # of lines that name none: a line draws from hash64(seed, custom_id)
    prompt_column: str | None = None  # of a table
    as_chat: bool = False  # each text of it is a message to answer
    errors: Path | None = None  # failed lines go here instead of into the output
    shard: tuple[int, int] = (1, 1)  # (i, n): the i-th of n parts, 1 to n
    ordered: bool = False  # results in the order of the input
    dump: TopK | None = None  # alternatives of each token of prompts and outputs, as arrays beside the output
    max_failures: int | None = None
    resume: bool = False  # refuse to begin anew
    overwrite: bool = False  # refuse to go on


def run(
    job: Job,
    open_llm: Callable[[], "LLM"],
    totals: Totals,
    *,
    interrupted: Callable[[], Any] = lambda: False,
    stream: TextIO | None = None,
) -> None:
    """Does what is left of a job. Results are appended as they finish; `totals` counts, also when this raises.

    open_llm: called only if there is something to do. The LLM is closed at the end.
    interrupted: asked once a step; when true, returns soon with `totals.num_left` over 0.
    stream: where progress is shown; default standard error.

    Raises:
      ValueError: the input cannot be read, or has an id twice.
      JournalError: the output cannot be written, belongs to another job or process, or has too many failures.
    """
    if job.output.is_symlink():  # files are replaced, which would put a link to another disk out of use
        job = dataclasses.replace(job, output=job.output.resolve())
    _check_paths(job)
    with locked(job.output) as check_lock:
        asked = _asked(job)
        begun = _begin(job, asked) or {"asked": asked, "engine": None, "created": int(time.time())}
        index = Index()
        totals.num_lines = _survey(job, index)
        totals.num_before, totals.num_damaged = _recover(job, index)
        if job.errors is not None:  # whatever failed is done again
            if not is_ours(job.errors):
                raise JournalError(f"{job.errors} is of no batch job; choose another file for --errors")
            job.errors.unlink(missing_ok=True)
        if totals.num_left and not interrupted():
            with open_llm() as llm:
                check_lock()  # loading takes a while
                _check_dump(job, llm)
                facts = manifest.engine_facts(llm)
                if begun["engine"] is not None:
                    manifest.check_same(job.output, begun["engine"], facts)
                begun |= {"engine": facts, "finished": False}
                manifest.save(job.output, begun)
                _work(job, llm, index, totals, begun["created"], interrupted, stream)
        index.close()
        if not totals.num_left:
            job.output.touch()  # of an empty shard
            if job.ordered and last_in_order(job.output) is None:  # it was not ordered when it was done
                sort_by_line([job.output], job.output)
            manifest.save(job.output, begun | {"finished": True})


def _check_paths(job: Job) -> None:
    inputs.check_path(job.input)
    if not job.output.parent.is_dir():
        raise ValueError(f"there is no folder {job.output.parent} for the output")
    for path in (job.output, job.errors):
        if path is not None and path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise ValueError(f"cannot write {path}: it is no file, or may not be changed")
    names = {"the input": job.input, "the output": job.output, "the errors": job.errors}
    places = {what: path for what, path in names.items() if path is not None} | {
        f"a file of the job, {path}": path for path in _own_files(job.output)
    }
    for (what, path), (other_what, other) in itertools.combinations(places.items(), 2):
        if _is_same(path, other):
            raise ValueError(f"{what} and {other_what} must be different files; {path} is used twice")
    folder = dumps.folder_of(job.output).resolve()
    for what, path in names.items():
        if path is not None and folder in path.resolve().parents:
            raise ValueError(f"{what} {path} lies in {folder}, where the job writes its dump; move it")


def _own_files(output: Path) -> list[Path]:
    """Lists what a job writes beside its output, and deletes."""
    return [manifest.path_of(output), early_path(output), lock_path(output), dumps.folder_of(output)]


def _is_same(path: Path, other: Path) -> bool:
    """Says whether two paths are one file, through links of either kind."""
    if path.resolve() == other.resolve():
        return True
    return path.exists() and other.exists() and path.samefile(other)


def _asked(job: Job) -> dict[str, Any]:
    """What decides the results of a job before a model is loaded."""
    facts = {
        "input_sha256": inputs.sha256(job.input),
        "prompt_column": job.prompt_column,
        "as_chat": job.as_chat,
        "shard": f"{job.shard[0]}/{job.shard[1]}",
        "errors": None if job.errors is None else job.errors.name,
        "model": job.model,
        "model_hash": job.model_hash,
        "exact": job.exact,
        "engine_options": dict(job.engine_options),
        "sampling": dataclasses.asdict(job.defaults),
        "seed": job.seed,
        "dump": None if job.dump is None else job.dump._asdict(),
        "versions": manifest.versions(),
    }
    return json.loads(json.dumps(facts))


def _begin(job: Job, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of the job that goes on, None if it begins now."""
    outputs = [path for path in (job.output, job.errors) if path is not None]
    if job.overwrite:
        _delete(job, outputs)
        return None
    begun = manifest.load(job.output)
    if begun is not None:
        manifest.check_same(job.output, begun["asked"], asked)
        return begun
    if job.resume:
        raise JournalError(f"there is nothing to resume: {manifest.path_of(job.output)} does not exist")
    for path in outputs:
        if path.exists() and path.stat().st_size:
            raise JournalError(f"{path} exists and is of no batch job; choose another output, or delete it")
    for path in (early_path(job.output), dumps.folder_of(job.output)):
        if path.exists():
            raise JournalError(f"{path} is left of another job; choose another output, or --overwrite")
    return None


def _delete(job: Job, outputs: list[Path]) -> None:
    """Deletes what an earlier job left, once all of it is known to be that. Raises JournalError if it is not."""
    is_begun = manifest.path_of(job.output).exists() and manifest.is_ours(job.output)
    for path in (*outputs, early_path(job.output)):
        if not (is_ours(path) or (is_begun and path == job.output and path.is_file())):
            raise JournalError(
                f"{path} is of no batch job: --overwrite leaves it alone; choose another output"
            )
    for path, ours in (
        (manifest.path_of(job.output), manifest.is_ours(job.output)),
        (dumps.folder_of(job.output), dumps.is_ours(job.output)),
    ):
        if not ours:
            raise JournalError(
                f"{path} is of no batch job: --overwrite leaves it alone; choose another output"
            )
    for path in (*outputs, manifest.path_of(job.output), early_path(job.output)):
        path.unlink(missing_ok=True)
    dumps.delete_other_shards(job.output, set())


def _recover(job: Job, index: Index) -> tuple[int, int]:
    """Makes the files of an interrupted job ready to go on.

    Returns:
      (results that they hold, lines that were damaged and are answered again).
    """
    if job.dump is None:
        num_done, num_damaged = recover(job.output, index)
        return num_done + absorb(job.output, index), num_damaged
    whole = dumps.whole_shards(job.output, (job.output, early_path(job.output)))

    def is_whole(record: dict[str, Any]) -> bool:
        return record.get("dump", {}).get("file") in whole

    num_done, num_damaged = recover(job.output, index, is_whole)
    num_done += absorb(job.output, index, is_whole)
    dumps.delete_other_shards(job.output, whole)
    return num_done, num_damaged


def _survey(job: Job, index: Index) -> int:
    """Reads all ids of the input into `index`; returns how many lines are of this shard.

    Raises ValueError if an id is there twice.
    """
    count, num_twice, first = 0, 0, ""
    for number, value in inputs.read(job.input, job.prompt_column, job.as_chat):
        key = inputs.key_of(value, number)
        other = index.add(key, number)
        if other is not None:
            num_twice += 1
            first = first or f"{key!r} is on lines {other} and {number}"
        count += _is_mine(job, key)
    if num_twice:
        more = f", and {num_twice - 1} more" if num_twice > 1 else ""
        raise ValueError(f"each custom_id of {job.input} must be there once: {first}{more}")
    return count


def _check_dump(job: Job, llm: "LLM") -> None:
    most, vocab = max((k or 0 for k in job.dump or ()), default=0), llm.config.vocab_size
    if most > vocab:
        raise ValueError(f"a dump of {most} tokens at each place is over the vocabulary of {vocab}")


def _is_mine(job: Job, key: str) -> bool:
    part, num_parts = job.shard
    return hash64(0, key) % num_parts == part - 1


def _left(job: Job, index: Index) -> Iterator[tuple[int, str, Value]]:
    """(line number, key, value) of each line of the shard that has no result yet.

    Raises JournalError if the input is not what it was when its ids were read.
    """
    for number, value in inputs.read(job.input, job.prompt_column, job.as_chat):
        key = inputs.key_of(value, number)
        if index.line(key) != number:
            raise JournalError(f"{job.input} was changed at line {number} while the job ran; begin anew")
        if _is_mine(job, key) and index.offset(key) is None:
            yield number, key, value


def _work(
    job: Job,
    llm: "LLM",
    index: Index,
    totals: Totals,
    created: int,
    interrupted: Callable[[], Any],
    stream: TextIO | None,
) -> None:
    from jaxinfer import metrics
    from jaxinfer.tools.batch_runner.window import Window  # only now is jax needed

    lines = _left(job, index)
    line = next(lines, None)
    window = Window(llm, job.dump)
    progress = Progress(totals, llm.stats, lambda: window.num_output_tokens, stream)
    compiled_before = llm.stats().compile_seconds
    with contextlib.ExitStack() as stack:
        results = stack.enter_context(Results(job, llm, totals, created, END if line is None else line[0]))
        try:
            while (line is not None or len(window)) and not interrupted():
                # While results are held back, what is under way comes to its end first.
                if line is not None and window.has_room and not (results.full and len(window)):
                    number, key, value = line
                    results.expect(number)
                    try:
                        task = parse(value, number, job.defaults, job.seed)
                        refusal = window.add(task)
                        if refusal is not None:
                            raise BadLine("refused", refusal)
                        totals.inert.update(task.inert)
                    except BadLine as error:
                        results.fail(number, key, error.code, str(error))
                    line = next(lines, None)
                else:
                    for task, answer in window.step():
                        results.add(task, answer)
                results.write(rest=results.full and not len(window))
                progress.tick()
            results.write(rest=True)
            if line is None and not len(window):
                results.end()
        finally:
            window.abort()
            progress.close()
            stats = llm.stats()
            totals.compile_seconds = stats.compile_seconds - compiled_before
            totals.engine = metrics.to_json(stats)
