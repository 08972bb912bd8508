"""What steps and requests took, on the engine's one monotonic clock.

`Metrics` are totals, always kept, in memory that does not grow. A `Recording` keeps single steps for a
timeline: the last so many, and only if somebody asked for them (`engine.recording = Recording(engine.clock)`).
"""

import atexit
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.outputs import RequestMetrics

RATIO = 1.02  # of the edges of a bin: percentiles are right within 1 %
LOG_RATIO = math.log(RATIO)
LATENCIES = ("queue_s", "ttft_s", "tpot_s", "itl_s", "e2e_s")


class Distribution:
    """How positive values are spread: counts in bins that grow by 2 %, so in memory that does not grow."""

    def __init__(self) -> None:
        self._counts: Counter[int | None] = Counter()  # None: the values that are 0
        self.count, self.total, self.largest = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        """Takes in a number of at least 0."""
        self._counts[math.floor(math.log(value) / LOG_RATIO) if value > 0 else None] += 1
        self.count, self.total, self.largest = self.count + 1, self.total + value, max(self.largest, value)

    def add_all(self, values: Any) -> None:
        """Likewise a list or array of one axis; much faster for many."""
        values = np.asarray(values, np.float64)
        if not len(values):
            return
        positive = values[values > 0]
        bins, counts = np.unique(np.floor(np.log(positive) / LOG_RATIO), return_counts=True)
        self._counts.update(dict(zip(bins.astype(int).tolist(), counts.tolist(), strict=True)))
        self._counts[None] += len(values) - len(positive)
        self.count += len(values)
        self.total += float(values.sum())
        self.largest = max(self.largest, float(values.max()))

    def percentile(self, p: float) -> float | None:
        """Nearest rank, within 1 %; None of no values."""
        rank = max(1, -(-self.count * p // 100))
        for edge in sorted(self._counts, key=lambda edge: -np.inf if edge is None else edge):
            rank -= self._counts[edge]
            if rank <= 0:
                return 0.0 if edge is None else min(RATIO ** (edge + 0.5), self.largest)
        return None

    def summary(self) -> dict[str, float | None]:
        """{count, mean, p50, p90, p99, max}; None where there are no values."""
        found: dict[str, float | None] = {"count": self.count}
        found["mean"] = self.total / self.count if self.count else None
        found |= {f"p{p}": self.percentile(p) for p in (50, 90, 99)}
        return found | {"max": self.largest if self.count else None}


@dataclass
class Work:
    """What had to be computed for running sequences. Padding, and tokens drawn past an end, are not in it."""

    num_forwards: int = 0  # each reads the weights once
    num_tokens: int = 0  # query tokens
    num_samples: int = 0  # tokens drawn and kept
    num_pairs: int = 0  # (query, key) pairs that attend
    num_resident: int = 0  # tokens whose K and V are read, summed over rows and forwards

    def add_step(self, rows: Iterable[tuple[int, int, int]]) -> None:
        """One program's part: of each row the position of its first query token, its query tokens, tokens kept.

        The first forward of a row has `query tokens`, each further one a single token.
        """
        forwards = tokens = samples = pairs = resident = 0
        for start, num_tokens, num_kept in rows:
            further = num_kept - 1 if num_kept > 1 else 0
            new, end = num_tokens + further, start + num_tokens
            tokens += new
            samples += num_kept
            pairs += new * start + new * (new + 1) // 2
            resident += (1 + further) * end + further * (further + 1) // 2
            forwards = max(forwards, 1 + further)
        self.num_forwards += forwards
        self.num_tokens += tokens
        self.num_samples += samples
        self.num_pairs += pairs
        self.num_resident += resident

    def __sub__(self, before: "Work") -> "Work":
        return Work(**{name: value - getattr(before, name) for name, value in vars(self).items()})


class RowRecord(NamedTuple):
    """One sequence in a step."""

    name: str  # request id, and the sample's index if there are several
    start: int  # position of its first query token
    num_tokens: int  # query tokens
    num_accepted: int  # tokens that it brought; 0: a part of the prompt, or past the end


@dataclass(slots=True)
class StepRecord:
    """One step. Times are seconds on the engine's clock.

    The host schedules and packs (`begun` to `dispatched`), comes back later to read (`read`), waits until the
    device is done (`done`), and takes in what it brought (until `committed`).
    """

    kind: str  # prefill | decode
    num_slots: int  # token places of the program: T, or B times k
    num_steps: int  # k
    num_rows: int  # sequences
    pages_used: int
    num_running: int
    num_waiting: int
    begun: float
    dispatched: float
    compile_s: float  # of it, spent waiting for the program
    read: float = 0.0
    done: float = 0.0  # as the host saw it; with a recording, as a thread saw it that waits for nothing else
    late: bool = False  # the device was done before the host came to read: `done` is then at most that
    committed: float = 0.0
    num_tokens: int = 0  # query tokens of running sequences
    device_s: float = 0.0  # from the later of its dispatch and the end of the step before it, to its end
    rows: tuple[RowRecord, ...] = ()  # with a recording


@dataclass
class StepTotals:
    """Sums over the steps of one kind of program."""

    num_steps: int = 0
    num_rows: int = 0
    num_tokens: int = 0  # query tokens of running sequences
    num_slots: int = 0  # token places of the programs
    num_late: int = 0  # steps that were done before the host came to read: their device_s is an upper bound
    host_s: float = 0.0  # scheduling, packing, dispatching, taking in; neither compiling nor waiting
    wait_s: float = 0.0  # the host had nothing to do but to wait for the device
    device_s: float = 0.0

    @property
    def padding_share(self) -> float:
        """Share of the token places that held no token of a running sequence."""
        return 1 - self.num_tokens / self.num_slots if self.num_slots else 0.0

    def __sub__(self, before: "StepTotals") -> "StepTotals":
        return StepTotals(**{name: value - getattr(before, name) for name, value in vars(self).items()})

    def to_json(self) -> dict[str, float]:
        return vars(self) | {"padding_share": self.padding_share}


class Metrics:
    """Totals of an engine since it was made."""

    def __init__(self) -> None:
        self.steps: dict[str, StepTotals] = {}
        self.work = Work()
        self.latency = {name: Distribution() for name in LATENCIES}
        self.num_finished: Counter[str] = Counter()  # sequences, by finish reason
        self._done = 0.0  # of the step before

    def add_step(self, record: StepRecord) -> None:
        """A step is committed: its times are final."""
        record.device_s = max(0.0, record.done - max(record.dispatched, self._done))
        self._done = record.done
        totals = self.steps.setdefault(record.kind, StepTotals())
        totals.num_steps += 1
        totals.num_rows += record.num_rows
        totals.num_tokens += record.num_tokens
        totals.num_slots += record.num_slots
        totals.num_late += record.late
        totals.device_s += record.device_s
        totals.wait_s += max(0.0, record.done - record.read)
        totals.host_s += record.dispatched - record.begun - record.compile_s
        totals.host_s += record.committed - max(record.done, record.read)

    def add_request(self, metrics: RequestMetrics, finish_reason: str | None) -> None:
        """A sequence has ended. Latencies are of those that came to their end."""
        self.num_finished[finish_reason or "abort"] += 1
        if finish_reason in ("abort", "error"):
            return
        for name in ("queue_s", "ttft_s", "tpot_s", "e2e_s"):
            value = getattr(metrics, name)
            if value is not None:
                self.latency[name].add(value)
        self.latency["itl_s"].add_all(metrics.itl_s)


@dataclass
class SequenceRecord:
    """A sequence that has ended, or has not yet."""

    name: str
    metrics: RequestMetrics
    finish_reason: str | None


@dataclass
class Recording:
    """The last `limit` steps and sequences of an engine, for timelines and plots.

    A thread of its own waits for each step on the device, so that `done` is not put off by a busy host.
    """

    clock: Callable[[], float]
    limit: int = 100_000
    steps: deque[StepRecord] = field(init=False)
    sequences: deque[SequenceRecord] = field(init=False)

    def __post_init__(self) -> None:
        self.steps, self.sequences = deque(maxlen=self.limit), deque(maxlen=self.limit)
        self._dispatched: SimpleQueue[tuple[Any, SimpleQueue[float]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="recording", daemon=True)
        atexit.register(self.close)  # a thread that waits for a device must not outlive the interpreter
        self._thread.start()

    def watch(self, result: Any) -> "SimpleQueue[float]":
        """Where the time will be put at which `result`, an array of a dispatched step, is there."""
        answer: SimpleQueue[float] = SimpleQueue()
        self._dispatched.put((result, answer))
        return answer

    def close(self) -> None:
        """Ends the thread, after the steps that it waits for; what was recorded stays."""
        self._dispatched.put(None)
        self._thread.join()
        atexit.unregister(self.close)

    def _watch(self) -> None:
        while (item := self._dispatched.get()) is not None:
            result, answer = item
            with suppress(Exception):  # the engine sees it too, and says so
                result.block_until_ready()
            answer.put(self.clock())
            del item, result, answer  # else the last result would be held until the next step


def to_json(stats: Any) -> dict[str, Any]:
    """Statistics of an engine or an LLM as plain data."""
    return asdict(stats) | {"steps": {kind: totals.to_json() for kind, totals in stats.steps.items()}}


def request_json(metrics: RequestMetrics) -> dict[str, Any]:
    """Times of one request as plain data, in seconds; `itl_s` has every gap."""
    found = {name: getattr(metrics, name) for name in LATENCIES}
    return found | {
        "num_output_tokens": metrics.num_output_tokens,
        "num_preemptions": metrics.num_preemptions,
    }
