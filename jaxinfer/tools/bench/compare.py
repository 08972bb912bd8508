"""What the KV cache brings, and what pages bring: the same requests without them, on the same kernels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from jaxinfer.llm import LLM
from jaxinfer.metrics import Recording, StepRecord
from jaxinfer.outputs import RequestOutput
from jaxinfer.tools.bench.run import drive, run, warm
from jaxinfer.tools.bench.workload import Offer
from jaxinfer.tools.planner.hardware import Hardware
from jaxinfer.tools.planner.roofline import Row, Setting, bound
from jaxinfer.tools.planner.shape import ModelShape

NUM_POINTS = 8  # of the curves over position


@dataclass(frozen=True)
class Point:
    """Milliseconds in which every row advances by a token, around one output position."""

    position: int  # output tokens before it
    cached_ms: float
    recomputed_ms: float
    cached_least_ms: float | None  # what FLOPs and bandwidth allow
    recomputed_least_ms: float | None


@dataclass(frozen=True)
class NoCache:
    """`points`: means over equal parts of the output."""

    rows: int
    prompt_tokens: int
    output_tokens: int
    points: list[Point]
    num_equal: int  # output tokens that are the same both ways, before the first difference of each row

    @property
    def growth(self) -> tuple[float, float]:
        """Last point over the first: with the cache, and without."""
        first, last = self.points[0], self.points[-1]
        return last.cached_ms / first.cached_ms, last.recomputed_ms / first.recomputed_ms

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"growth": self.growth}


def no_cache(llm: LLM, offers: Sequence[Offer], facts: Hardware | None) -> NoCache:
    """Every token from a cached step, and then every token from a forward over all that came before it.

    Rows advance together. The engine must have decode_steps=1, so that each token has a time of its own, no prefix
    cache, and room for all rows.
    """
    greedy = {"temperature": 0.0}
    length = min(offer.output_len for offer in offers)
    offers = [Offer(offer.prompt, length) for offer in offers]
    warm(llm, offers, greedy)
    _, outputs = drive(llm, offers, greedy)
    prompts = [output.prompt_token_ids for output in outputs]
    cached_ids = [output.outputs[0].token_ids for output in outputs]
    # Until the last prompt is done steps hold prompt chunks too: gaps count from then on.
    begin = max(_times(output)[0] for output in outputs)
    gaps: dict[int, list[float]] = {}  # output position -> of the rows
    for output in outputs:
        for i, (before, after) in enumerate(pairwise(_times(output)), 1):
            if before >= begin:
                gaps.setdefault(i, []).append(after - before)
    if not gaps:
        raise ValueError(
            f"outputs of {length} tokens end before all {len(offers)} prompts are done; give longer outputs or fewer "
            "requests"
        )

    recomputed, ids = [], [list(prompt) for prompt in prompts]
    for _ in range(length):
        seconds, step = drive(llm, [Offer(list(row), 1) for row in ids], greedy)
        recomputed.append(seconds)
        for row, output in zip(ids, step, strict=True):
            row.append(output.outputs[0].token_ids[0])
    equal = 0
    for prompt, row, other in zip(prompts, ids, cached_ids, strict=True):
        for ours, theirs in zip(row[len(prompt) :], other, strict=True):
            if ours != theirs:
                break
            equal += 1

    def least(position: int, row: Callable[[int], Row]) -> float | None:
        if facts is None or llm.config.dtype not in facts.peaks:
            return None
        shape = ModelShape.from_config(llm.module, llm.config)
        setting = Setting(shape, facts, kv_dtype=llm.engine.spec.dtype)
        return 1e3 * bound(setting, [row(len(prompt) + position) for prompt in prompts]).time_s

    positions = sorted(gaps)
    edges = [i * len(positions) // NUM_POINTS for i in range(NUM_POINTS + 1)]
    points = []
    for part in (positions[a:b] for a, b in pairwise(edges) if b > a):
        middle = part[len(part) // 2]
        points.append(
            Point(
                middle,
                1e3 * fmean(gap for i in part for gap in gaps[i]),
                1e3 * fmean(recomputed[i] for i in part),
                least(middle, lambda kv_len: Row(1, kv_len)),
                least(middle, lambda kv_len: Row(kv_len, kv_len)),
            )
        )
    return NoCache(len(offers), sum(map(len, prompts)), length * len(offers), points, equal)


@dataclass(frozen=True)
class Reservation:
    """One way to hand out the slots of a pool; slots are means over time."""

    name: str
    rows_allowed: int
    mean_rows: float
    reserved: float
    used: float
    seconds: float
    total_tok_per_s: float

    @property
    def wasted_share(self) -> float:
        return 1 - self.used / self.reserved if self.reserved else 0.0


@dataclass(frozen=True)
class Contiguous:
    pool_slots: int
    max_model_len: int
    ways: list[Reservation]
    num_equal: int  # requests whose outputs are the same
    num_requests: int

    def to_json(self) -> dict[str, Any]:
        ways = [asdict(way) | {"wasted_share": way.wasted_share} for way in self.ways]
        return asdict(self) | {"ways": ways}


def contiguous(
    open_llm: Callable[..., LLM], offers: Sequence[Offer], fields: Mapping[str, Any], max_num_seqs: int
) -> Contiguous:
    """The same load on a pool of the same bytes, by pages and with max_model_len slots reserved for each sequence.

    Reserved contiguously, only pool / max_model_len sequences can run: the second engine has so many rows and
    the same pages and kernels, so what differs is what reservation costs, not another kernel's speed.

    Args:
      open_llm: makes the engine; called with max_num_seqs and num_pages (None: as the user said).

    Raises:
      ValueError: the pool holds not one sequence of max_model_len.
    """
    with open_llm(max_num_seqs=max_num_seqs, num_pages=None) as llm:
        pages, pool, length = llm.engine.spec.num_pages, llm.engine.spec.num_usable_tokens, llm.max_model_len
        rows = min(max_num_seqs, pool // length)
        if rows == 0:
            raise ValueError(
                f"the pool of {pool} tokens holds not one sequence of max_model_len={length}; give --num-pages or a "
                "lower --max-model-len"
            )
        by_page, outputs = _measure(llm, offers, fields)
    with open_llm(max_num_seqs=rows, num_pages=pages) as llm:
        by_sequence, same_outputs = _measure(llm, offers, fields, reserved_per_row=length)
    equal = sum(a == b for a, b in zip(outputs, same_outputs, strict=True))
    return Contiguous(pool, length, [by_page, by_sequence], equal, len(offers))


def _measure(
    llm: LLM, offers: Sequence[Offer], fields: Mapping[str, Any], reserved_per_row: int | None = None
) -> tuple[Reservation, list[list[int]]]:
    """One way, and the token ids of each output; None reserves by page."""
    warm(llm, offers, fields)
    llm.engine.recording = recording = Recording(llm.engine.clock)
    result = run(llm, offers, fields)
    recording.close()
    steps, page_size = list(recording.steps), llm.engine.spec.page_size

    def reserved(step: StepRecord) -> int:
        if reserved_per_row is None:
            return step.pages_used * page_size
        return step.num_running * reserved_per_row

    reservation = Reservation(
        "pages" if reserved_per_row is None else "contiguous",
        llm.engine.config.scheduler.max_num_seqs,
        _mean(steps, lambda step: step.num_running),
        _mean(steps, reserved),
        _mean(steps, lambda step: sum(row.start + row.num_tokens for row in step.rows)),
        result.seconds,
        result.rates()["total_tok_per_s"],
    )
    return reservation, [output.outputs[0].token_ids for output in result.outputs]


def _times(output: RequestOutput) -> Sequence[float]:
    assert output.metrics is not None
    return output.metrics.token_times


def _mean(steps: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> float:
    """Over time: each step counts as long as it takes."""
    ends = [step.done for step in steps[1:]] + [steps[-1].committed]
    spans = [max(0.0, end - step.done) for step, end in zip(steps, ends, strict=True)]
    return sum(value(step) * span for step, span in zip(steps, spans, strict=True)) / sum(spans)
