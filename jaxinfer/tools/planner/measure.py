"""Bounds against the machine at hand: runs the engine, and says how far from the roofline it is."""

import random
import time
from dataclasses import dataclass

import jax

from jaxinfer import models
from jaxinfer.engine import Engine
from jaxinfer.kv_cache import pages_needed
from jaxinfer.llm import LLM
from jaxinfer.options import defaults
from jaxinfer.request import Request
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tools.planner import hardware as facts
from jaxinfer.tools.planner.hardware import Hardware
from jaxinfer.tools.planner.roofline import Setting, decode_bound, prefill_time
from jaxinfer.tools.planner.shape import ModelShape

PREFILL_RUNS = 3  # after the first; the fastest counts


@dataclass(frozen=True)
class Comparison:
    """Seconds at least, and as measured."""

    name: str
    bound_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """measured / bound: 1 is the limit. Below 1 the peaks themselves were measured too low."""
        return self.measured_s / self.bound_s


@dataclass(frozen=True)
class Measurement:
    hardware: Hardware
    comparisons: list[Comparison]
    planned_bytes: dict[str, int]  # weights, pool
    allocated_bytes: dict[str, int]


def measure(
    model: str, *, batch: int = 4, prompt: int = 256, output: int = 64, dtype: str = "auto"
) -> Measurement:
    """Runs a model on the device at hand; a first run, not timed, compiles what is needed.

    Prefill: one prompt of random tokens, from its arrival to its first token, alone. Decode: the mean step
    between the time when all `batch` rows have their first token and the end of the first of them.

    Raises:
      ValueError: the device is an accelerator of which no facts are known.
    """
    device, length = jax.devices()[0], prompt + output
    hardware = facts.attached(device)
    # Admission keeps a page free for each running row, so that room for full rows alone would hold the last one back.
    page_size = defaults.page_size("auto", device.platform, length).value
    with LLM(
        model,
        dtype=dtype,
        max_num_seqs=batch,
        max_model_len=length,
        num_pages=1 + batch * (pages_needed(length, page_size) + 1),
        enable_prefix_caching=False,
        background_compile=False,
    ) as llm:
        return measure_engine(llm, hardware, name=model, batch=batch, prompt=prompt, output=output)


def measure_engine(
    llm: LLM, hardware: Hardware, *, name: str, batch: int, prompt: int, output: int
) -> Measurement:
    """Likewise, on an engine that has room for it."""
    engine = llm.engine
    shape = ModelShape.from_config(models.module_of(llm.config), llm.config, name)
    setting = Setting(shape, hardware, kv_dtype=engine.spec.dtype)
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(shape.vocab_size) for _ in range(prompt)) for _ in range(batch)]
    prefill = min(_prefill_seconds(engine, prompts[0]) for _ in range(1 + PREFILL_RUNS))
    decode = min(_decode_seconds(engine, prompts, output) for _ in range(2))
    chunk = engine.config.scheduler.max_num_batched_tokens
    at_least = decode_bound(setting, batch, prompt + output // 2).time_s
    token_bytes = shape.kv_bytes_per_token(engine.spec.dtype)
    return Measurement(
        hardware=hardware,
        comparisons=[
            Comparison(f"prefill of {prompt} tokens", prefill_time(setting, prompt, chunk), prefill),
            Comparison(f"decode step of {batch} rows", at_least, decode),
        ],
        planned_bytes={
            "weights": shape.weights_bytes(),
            "pool": engine.spec.num_pages * engine.spec.page_size * token_bytes,
        },
        allocated_bytes={
            "weights": sum(leaf.nbytes for leaf in jax.tree.leaves(engine.weights)),
            "pool": sum(leaf.nbytes for leaf in jax.tree.leaves(engine._cache)),
        },
    )


def _prefill_seconds(engine: Engine, prompt: tuple[int, ...]) -> float:
    start = time.perf_counter()
    engine.add(_request("prefill", prompt, 1))
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter() - start


def _decode_seconds(engine: Engine, prompts: list[tuple[int, ...]], output: int) -> float:
    """Per step, that is per token of each row, while all rows decode."""
    seqs = [engine.add(_request(f"decode {i}", ids, output))[0] for i, ids in enumerate(prompts)]
    began = ended = None  # (time, tokens of all rows)
    while engine.has_unfinished:
        engine.step()
        now = time.perf_counter(), sum(seq.num_output_tokens for seq in seqs)
        if began is None and all(seq.num_output_tokens for seq in seqs):
            began = now
        if not any(seq.finished for seq in seqs):
            ended = now
    if began is None or ended is None or ended[1] <= began[1]:
        raise ValueError(
            f"output={output} is too short for all {len(prompts)} rows to run together; give more"
        )
    return (ended[0] - began[0]) * len(prompts) / (ended[1] - began[1])


def _request(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
