"""How far a job is: for a terminal, for a log file, for a machine."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from tqdm import tqdm

from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduler import SchedulerStats

LINE_SECONDS = 60.0  # between two lines of a log
BAR_SECONDS = 0.5


@dataclass
class Totals:
    """Counts of one run of a job. Tokens are those of finished requests."""

    num_lines: int = 0  # of the input (of its shard)
    num_before: int = 0  # done by earlier runs
    num_damaged: int = 0  # lines of the output that were damaged, and are answered again
    num_done: int = 0  # by this run
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # code -> lines
    examples: dict[str, str] = field(default_factory=dict)  # code -> what its first line says
    inert: Counter[str] = field(default_factory=Counter)  # field without effect -> lines
    seconds: float = 0.0  # from the first request to the last result, compilation included
    compile_seconds: float = 0.0
    engine: dict[str, Any] | None = None  # its statistics at the end, as plain data

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def num_left(self) -> int:
        return self.num_lines - self.num_before - self.num_done - self.num_failed

    def take(self, output: RequestOutput) -> None:
        self.num_done += 1
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_cached_tokens += output.num_cached_tokens
        self.num_output_tokens += sum(len(sample.token_ids) for sample in output.outputs)

    def fail(self, line: int, code: str, message: str) -> None:
        self.failures[code] += 1
        self.examples.setdefault(code, f"line {line}: {message}")

    def metrics(self, price_per_hour: float | None) -> dict[str, Any]:
        """Everything as plain data; rates per second of this run, costs in the currency of the price."""
        tokens = self.num_prompt_tokens + self.num_output_tokens
        cost = None if price_per_hour is None else price_per_hour * self.seconds / 3600
        return {
            "lines": self.num_lines,
            "done_before": self.num_before,
            "damaged_before": self.num_damaged,
            "done": self.num_done,
            "failed": self.num_failed,
            "left": self.num_left,
            "failures": dict(self.failures),
            "inert_fields": dict(self.inert),
            "prompt_tokens": self.num_prompt_tokens,
            "cached_prompt_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "prompt_tokens_per_s": self.num_prompt_tokens / self.seconds if self.seconds else None,
            "output_tokens_per_s": self.num_output_tokens / self.seconds if self.seconds else None,
            "engine": self.engine,
            "cost": cost,
            "cost_per_million_tokens": cost / tokens * 1e6 if cost is not None and tokens else None,
            "cost_per_million_output_tokens": cost / self.num_output_tokens * 1e6
            if cost is not None and self.num_output_tokens
            else None,
        }


class Progress:
    """Shows totals as they grow: a bar on a terminal, else a line every LINE_SECONDS."""

    def __init__(
        self,
        totals: Totals,
        stats: Callable[[], SchedulerStats],
        under_way: Callable[[], int],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`under_way` gives the tokens that unfinished requests have so far."""
        self._totals, self._stats, self._under_way, self._clock = totals, stats, under_way, clock
        self._stream = stream or sys.stderr
        self._start = self._last = clock()
        self._tokens_before = 0
        self._bar = None
        if self._stream.isatty():
            finished = totals.num_lines - totals.num_left
            layout = "{l_bar}{bar}| {n_fmt}/{total_fmt} {postfix}"
            self._bar = tqdm(
                total=totals.num_lines, initial=finished, bar_format=layout, desc="batch", file=self._stream
            )

    def tick(self) -> None:
        """Called once a step; seldom does anything."""
        now = self._clock()
        self._totals.seconds = now - self._start
        if now - self._last < (LINE_SECONDS if self._bar is None else BAR_SECONDS):
            return
        text = self.describe(now)
        self._last = now
        if self._bar is None:
            finished = self._totals.num_lines - self._totals.num_left
            print(f"{finished:,}/{self._totals.num_lines:,} lines, {text}", file=self._stream, flush=True)
        else:
            self._bar.n = self._totals.num_lines - self._totals.num_left
            self._bar.set_postfix_str(text)

    def describe(self, now: float) -> str:
        """Speeds, failures, what runs, and when it will be done if the lines to come are like those so far."""
        totals, stats = self._totals, self._stats()
        elapsed = max(now - self._start, 1e-9)
        written = totals.num_output_tokens + self._under_way()
        parts = [
            f"{totals.num_prompt_tokens / elapsed:,.0f} tok/s in",
            f"{(written - self._tokens_before) / max(now - self._last, 1e-9):,.0f} tok/s out",
            f"{totals.num_failed:,} failed",
            f"{stats.num_running} rows",
            f"{stats.pages_used:,}/{stats.pages_total:,} pages",
        ]
        self._tokens_before = written
        if totals.num_done:
            per_line = (totals.num_prompt_tokens + totals.num_output_tokens) / totals.num_done
            tokens_left = max(0.0, per_line * totals.num_left - self._under_way())
            parts.append(
                f"ETA {_duration(tokens_left * elapsed / max(1, totals.num_prompt_tokens + written))}"
            )
        return ", ".join(parts)

    def close(self) -> None:
        self._totals.seconds = self._clock() - self._start
        if self._bar is not None:
            self._bar.n = self._totals.num_lines - self._totals.num_left
            self._bar.close()


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds) // 60, round(seconds) // 3600
    if hours:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min {round(seconds) % 60:02d} s" if minutes else f"{round(seconds)} s"
