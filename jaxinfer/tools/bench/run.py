"""Offers requests to an LLM and takes down what it took.

Like the batch runner's window this reaches into the LLM: requests come while others run.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from jaxinfer.llm import LLM
from jaxinfer.metrics import StepTotals, Work
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text.prompts import Prompt
from jaxinfer.text.records import Record
from jaxinfer.tools.bench.workload import Offer, least_work
from jaxinfer.tools.planner import hardware
from jaxinfer.tools.planner.hardware import Hardware
from jaxinfer.tools.planner.simulate import percentile
from jaxinfer.tools.planner.utilization import Utilization

WARM_REQUESTS = 8


@dataclass(frozen=True)
class Card:
    """What a load needs at the least, and so the limit of the device at hand."""

    num_prompt_tokens: int
    num_output_tokens: int
    flops: int
    bytes: int  # weights once per decode step of the longest output, and K and V
    weights_bytes: int
    least_s: float | None  # None: no peaks are known for the device and the dtype
    limit_tok_per_s: float | None  # prompt and output tokens


@dataclass(frozen=True)
class Result:
    """One run. Times are seconds; `utilization` is over all of `seconds`."""

    seconds: float
    outputs: list[RequestOutput]
    steps: dict[str, StepTotals]  # of this run, by kind of program
    work: Work
    utilization: Utilization
    card: Card

    @property
    def device_busy_share(self) -> float:
        return min(1.0, sum(totals.device_s for totals in self.steps.values()) / self.seconds)

    def rates(self) -> dict[str, float]:
        card = self.card
        return {
            "requests_per_s": len(self.outputs) / self.seconds,
            "prompt_tok_per_s": card.num_prompt_tokens / self.seconds,
            "output_tok_per_s": card.num_output_tokens / self.seconds,
            "total_tok_per_s": (card.num_prompt_tokens + card.num_output_tokens) / self.seconds,
        }

    def latency(self) -> dict[str, dict[str, float | None]]:
        """mean, p50, p90 and p99 (nearest rank) of each latency; None where there is none."""
        metrics = [output.metrics for output in self.outputs if output.metrics is not None]
        values: dict[str, list[float]] = {
            name: [value for m in metrics if (value := getattr(m, name)) is not None]
            for name in ("queue_s", "ttft_s", "tpot_s", "e2e_s")
        }
        values["itl_s"] = [gap for m in metrics for gap in m.itl_s]
        return {
            name: {"mean": sum(found) / len(found) if found else None}
            | {f"p{p}": percentile(found, p) for p in (50, 90, 99)}
            for name, found in values.items()
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": len(self.outputs),
            "seconds": self.seconds,
            **self.rates(),
            "latency": self.latency(),
            "steps": {kind: totals.to_json() for kind, totals in self.steps.items()},
            "work": asdict(self.work),
            "device_busy_share": self.device_busy_share,
            "utilization": asdict(self.utilization),
            "card": asdict(self.card),
        }


def measured_hardware(llm: LLM) -> Hardware | None:
    """Facts of the device at hand; a CPU is measured, if it has not been. None: an accelerator without facts."""
    device = jax.devices()[0]
    return hardware.cpu() if device.platform == "cpu" else hardware.known(device)


def card(llm: LLM, lengths: Sequence[tuple[int, int]], facts: Hardware | None) -> Card:
    """The static card of requests of (prompt, output) lengths."""
    cost, work = llm.step_cost, least_work(lengths)
    prompt, output = (sum(each) for each in zip(*lengths, strict=True))
    flops, moved = cost.flops(work), cost.bytes(work)
    peak = None if facts is None else facts.peaks.get(llm.config.dtype)
    least = None
    if facts is not None and peak is not None:
        least = max(flops / peak, moved / facts.memory_bandwidth)
    return Card(
        prompt,
        output,
        flops,
        moved,
        cost.bytes_per_forward,
        least,
        (prompt + output) / least if least else None,
    )


def _turned(prompt: Prompt) -> Prompt:
    """The prompt from its end to its start: the same length, and nothing that a cache would know."""
    if not isinstance(prompt, Mapping):
        return prompt[::-1]
    return {name: value[::-1] for name, value in prompt.items()}


def warm(llm: LLM, offers: Sequence[Offer], fields: Mapping[str, Any]) -> None:
    """Compiles what the load needs: a few of its requests turned round, then all programs of the buckets."""
    turned = [Offer(_turned(offer.prompt), offer.output_len) for offer in offers[:WARM_REQUESTS]]
    drive(llm, turned, fields)
    llm.warmup(use_tqdm=False)
    llm.engine.drain()
    llm.engine.scheduler.reset_prefix_cache()


def run(
    llm: LLM, offers: Sequence[Offer], fields: Mapping[str, Any], *, max_under_way: int | None = None
) -> Result:
    """Runs a load on an engine that is warm.

    Args:
      fields: of SamplingParams, for all requests; end tokens are ignored unless they say otherwise.
      max_under_way: offer no more at the same time; 1 measures latency. Times of arrival then do not count.

    Raises:
      ValueError: a request was refused.
    """
    before = llm.engine.stats()
    seconds, outputs = drive(llm, offers, fields, max_under_way)
    stats = llm.engine.stats()
    zero = StepTotals()
    lengths = [(len(o.prompt_token_ids), len(o.outputs[0].token_ids)) for o in outputs]
    work = stats.work - before.work
    return Result(
        seconds=seconds,
        outputs=outputs,
        steps={kind: totals - before.steps.get(kind, zero) for kind, totals in stats.steps.items()},
        work=work,
        utilization=llm.utilization(work, seconds),
        card=card(llm, lengths, hardware.known(jax.devices()[0])),
    )


def drive(
    llm: LLM, offers: Sequence[Offer], fields: Mapping[str, Any], max_under_way: int | None = None
) -> tuple[float, list[RequestOutput]]:
    """(seconds from the first arrival to the last token, outputs in the order offered)."""
    clock, loop = llm.engine.clock, llm._loop
    coming, records = deque(offers), []
    start = clock()

    def submit(due: Sequence[Offer]) -> list[Record]:
        params = [SamplingParams(**{"ignore_eos": True, **fields, "max_tokens": o.output_len}) for o in due]
        added = llm._submit([offer.prompt for offer in due], params, None)
        for record, offer in zip(added, due, strict=True):
            if record.error is not None:
                raise ValueError(record.error)
            if max_under_way is None:
                for seq in record.sequences:  # a request that comes in the middle of a step waits for its end
                    assert seq.metrics is not None
                    seq.metrics.arrival_time = start + offer.time_s
        return added

    try:
        while coming or loop.records:
            due: list[Offer] = []
            while coming and (
                start + coming[0].time_s <= clock()
                if max_under_way is None
                else len(loop.records) + len(due) < max_under_way
            ):
                due.append(coming.popleft())
            if due:
                records += submit(due)
            if loop.records:
                loop.step()
            else:
                time.sleep(max(0.0, start + coming[0].time_s - clock()))
        return clock() - start, [record.output() for record in records]
    finally:
        loop.leave(records)
