"""A recording of an engine as a timeline in the Chrome trace format, for ui.perfetto.dev or chrome://tracing.

Three groups of rows: the device (one bar for each step that it works on), the host (its bars, and so its gaps),
and one row for each sequence (queued, prompt chunks, tokens). Where the device's bar of step n covers the host's
bar "dispatch n + 1", the host is ahead.
"""

import json
from pathlib import Path
from typing import Any

from jaxinfer.metrics import Recording, StepRecord

ENGINE, SEQUENCES = 1, 2  # process ids in the trace
HOST, DEVICE = 1, 2  # thread ids of the engine's


def write(recording: Recording, path: str | Path) -> None:
    """Writes the trace as JSON."""
    Path(path).write_text(json.dumps({"traceEvents": events(recording), "displayTimeUnit": "ms"}))


def events(recording: Recording) -> list[dict[str, Any]]:
    """The events of the trace; times are microseconds from the first of them on."""
    steps, sequences = list(recording.steps), list(recording.sequences)
    starts = [step.begun for step in steps] + [seq.metrics.arrival_time for seq in sequences]
    if not starts:
        return []
    origin, found = min(starts), []

    def name(pid: int, tid: int | None, text: str) -> None:
        kind = {"name": "process_name"} if tid is None else {"name": "thread_name", "tid": tid}
        found.append({"ph": "M", "pid": pid, **kind, "args": {"name": text}})

    def bar(pid: int, tid: int, text: str, begin: float, end: float, **args: Any) -> None:
        event = {"ph": "X", "pid": pid, "tid": tid, "name": text, "args": args}
        found.append(event | {"ts": 1e6 * (begin - origin), "dur": 1e6 * max(0.0, end - begin)})

    name(ENGINE, None, "engine")
    name(ENGINE, HOST, "host")
    name(ENGINE, DEVICE, "device")
    name(SEQUENCES, None, "sequences")
    rows = _rows(recording)
    for row, tid in rows.items():
        name(SEQUENCES, tid, f"request {row}")

    device_free = origin
    for number, step in enumerate(steps):
        facts = {"tokens": step.num_tokens, "places": step.num_slots, "rows": step.num_rows}
        title = f"{step.kind} {step.num_rows} rows, {step.num_tokens} tokens"
        bar(ENGINE, HOST, f"dispatch {number}", step.begun, step.dispatched, compile_s=step.compile_s)
        bar(ENGINE, HOST, f"read {number}", step.read, max(step.read, step.done), late=step.late)
        bar(ENGINE, HOST, f"commit {number}", max(step.read, step.done), step.committed)
        begin = max(step.dispatched, device_free)
        bar(ENGINE, DEVICE, f"{number}: {title}", min(begin, step.done), step.done, **facts)
        device_free = step.done
        for part in step.rows:
            bar(SEQUENCES, rows[part.name], _doing(step, part.num_accepted), min(begin, step.done), step.done)
        found += [
            _counter("rows", step.begun - origin, running=step.num_running, waiting=step.num_waiting),
            _counter("pages", step.begun - origin, used=step.pages_used),
        ]
    for seq in sequences:
        scheduled = seq.metrics.first_scheduled_time or seq.metrics.finished_time or origin
        bar(SEQUENCES, rows[seq.name], "queued", seq.metrics.arrival_time, scheduled, ended=seq.finish_reason)
    return found


def _rows(recording: Recording) -> dict[str, int]:
    """Thread ids of sequences, in the order in which they came into a step."""
    names = [row.name for step in recording.steps for row in step.rows]
    return {
        name: i + 1 for i, name in enumerate(dict.fromkeys([*names, *(s.name for s in recording.sequences)]))
    }


def _doing(step: StepRecord, num_accepted: int) -> str:
    if num_accepted == 0:
        return "prompt" if step.kind == "prefill" else "past the end"
    return "token" if num_accepted == 1 else f"{num_accepted} tokens"


def _counter(name: str, seconds: float, **values: int) -> dict[str, Any]:
    return {"ph": "C", "pid": ENGINE, "name": name, "ts": 1e6 * seconds, "args": values}
