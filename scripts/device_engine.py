"""The stage `engine` of device_check.py: nano-vllm's bench."""

import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxinfer.engine import Engine
from jaxinfer.kv_cache import pages_needed
from jaxinfer.metrics import Recording, Work
from jaxinfer.models import qwen3
from jaxinfer.options import defaults
from jaxinfer.options.device_facts import facts_of
from jaxinfer.options.llm_options import LLMOptions
from jaxinfer.options.resolve import resolve
from jaxinfer.programs.buckets import Buckets
from jaxinfer.request import Request
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tools.planner.hardware import Hardware
from jaxinfer.tools.planner.roofline import step_cost
from jaxinfer.tools.planner.shape import ModelShape
from jaxinfer.tools.planner.utilization import utilization
from jaxinfer.weights.weight_forms import ModelFacts

Record = dict[str, Any]
Emit = Callable[[Record], None]

QWEN3_0_6B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
TINY_QWEN3 = QWEN3_0_6B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
}


@dataclasses.dataclass(frozen=True)
class NanoBench:
    """nano-vllm's bench: requests of random lengths, all offered at once, ends ignored."""

    config: Mapping[str, Any]
    num_requests: int
    lengths: tuple[int, int]  # of prompts and of outputs, both ends included
    max_num_batched_tokens: int
    temperature: float

    def requests(self, vocab: int) -> list[tuple[list[int], int]]:
        """[(prompt token ids, output tokens)], drawn as nano-vllm's bench.py draws them."""
        rng = random.Random(0)
        prompts = [
            [rng.randint(0, min(10000, vocab - 1)) for _ in range(rng.randint(*self.lengths))]
            for _ in range(self.num_requests)
        ]
        return [(prompt, rng.randint(*self.lengths)) for prompt in prompts]


NANO = NanoBench(QWEN3_0_6B, 256, (100, 1024), 8192, 0.6)
TINY_NANO = NanoBench(TINY_QWEN3, 6, (4, 12), 32, 0.0)  # a greedy program compiles in half the time


def run_nano(
    bench: NanoBench, hardware: Hardware | None, implementation: str, end: float, emit: Emit
) -> None:
    """Runs the bench, at most until `time.monotonic()` is `end`, and emits what it took."""
    dtype = defaults.dtype("auto", jax.devices()[0].platform).value
    config = qwen3.Config.from_hf(dict(bench.config), dtype=dtype)
    requests = bench.requests(config.vocab_size)
    start = time.monotonic()
    engine = make_engine(bench, config, requests, implementation)
    begun = time.monotonic()
    engine.warmup(
        lambda program: emit({"compiled": str(program), "seconds": round(time.monotonic() - begun, 1)})
    )
    emit(
        {
            "start_s": round(begun - start, 1),
            "compile_s": round(time.monotonic() - begun, 1),
            "programs": len(engine.programs),
            "kv_cache": engine.spec.describe(),
            "implementation": engine.spec.implementation,
        }
    )

    def offer(name: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=bench.temperature, max_tokens=max_tokens, ignore_eos=True)
        engine.add(Request(name, tuple(prompt), params, frozenset(), seed=0))

    offer("warm", requests[0][0], min(2 * engine.config.scheduler.decode_steps, bench.lengths[1]))
    while engine.has_unfinished:
        engine.step()
    engine.recording = Recording(engine.clock)
    begun = time.monotonic()
    for i, (prompt, max_tokens) in enumerate(requests):
        offer(str(i), prompt, max_tokens)
    num_tokens = 0
    while engine.has_unfinished and time.monotonic() < end:
        num_tokens += sum(advance.num_new_tokens for advance in engine.step())
    seconds = time.monotonic() - begun
    expected = sum(max_tokens for _, max_tokens in requests)
    whole = not engine.has_unfinished
    if whole and num_tokens != expected:
        raise AssertionError(f"{num_tokens} tokens came out, {expected} were asked for")
    emit(
        {
            "result": "ok" if whole else "cut short",
            "output_tokens": num_tokens,
            "of": expected,
            "seconds": round(seconds, 3),
            "output_tok_per_s": round(num_tokens / seconds, 1),
            **utilizations(engine, hardware),
        }
    )


def make_engine(
    bench: NanoBench, config: qwen3.Config, requests: list[tuple[list[int], int]], implementation: str
) -> Engine:
    """An engine of three programs: a prefill, and decodes of all rows with 1 and with 8 steps."""
    weights, rows = qwen3.init(config, jax.random.key(0)), bench.num_requests
    decode_steps = LLMOptions.decode_steps
    options = LLMOptions(
        max_model_len=2 * bench.lengths[1],
        max_num_seqs=rows,
        max_num_batched_tokens=bench.max_num_batched_tokens,
        decode_steps=decode_steps,
        implementation=implementation,  # type: ignore[arg-type]
        enable_prefix_caching=False,
        strict_compile=True,
        background_compile=False,
        buckets=Buckets(
            prefill=((bench.max_num_batched_tokens, rows),),
            decode=(rows,),
            decode_steps=decode_steps,
            multi_step=(rows,),
            variants=("sample" if bench.temperature else "greedy",),
        ),
    )
    resolved = resolve(options, ModelFacts(qwen3, config, weights_given=True), facts_of(jax.devices()[0]))
    spec = resolved.spec
    num_pages = 1 + sum(pages_needed(len(prompt) + n, spec.page_size) for prompt, n in requests)
    spec = dataclasses.replace(spec, num_pages=min(num_pages, spec.num_pages))
    programs = dataclasses.replace(resolved, spec=spec).compiler(weights=weights)
    return Engine(programs, weights, resolved.engine_config())


def utilizations(engine: Engine, hardware: Hardware | None) -> Record:
    """MBU and MFU of prefill steps (decode rows may ride along) and of decode steps, by how many rows were alive."""
    cost = step_cost(ModelShape.from_config(qwen3, engine.model_config), engine.spec.dtype)
    groups: dict[str, list[Any]] = {}
    quarter = max(1, engine.config.scheduler.max_num_seqs // 4)
    for step in engine.recording.steps:
        groups.setdefault(step.kind, []).append(step)
        if step.kind == "decode":
            alive = sum(row.num_accepted > 0 for row in step.rows)
            top = -(-max(1, alive) // quarter) * quarter
            groups.setdefault(f"decode_up_to_{top}_rows", []).append(step)
    found = {}
    for name, steps in sorted(groups.items()):
        work = Work()
        for step in steps:
            work.add_step(
                (row.start, row.num_tokens, row.num_accepted)
                for row in step.rows
                if row.num_accepted or step.kind == "prefill"  # else it had ended: what it drew is surplus
            )
        used = utilization(cost, work, sum(s.device_s for s in steps), hardware, engine.model_config.dtype)
        found[name] = {
            "steps": len(steps),
            "device_s": round(used.seconds, 3),
            "tokens": work.num_tokens,
            "mbu": used.mbu and float(f"{used.mbu:.4g}"),
            "mfu": used.mfu and float(f"{used.mfu:.4g}"),
        }
    return found
