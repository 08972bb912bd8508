"""Measures what the engine promises of itself, each beside its bar. The last line of the output is JSON.

    python scripts/bench_bars.py host                      host cost of a step: rows, length of the queue (no device)
    python scripts/bench_bars.py share --model MODEL       host cost of a step of 64 rows, as a share of the device's
    python scripts/bench_bars.py memory --model MODEL      peak memory after warm-up, growth over generate calls
    python scripts/bench_bars.py reopen --model MODEL      memory left behind by LLMs that were opened and closed
    python scripts/bench_bars.py start --model MODEL       process start to first token, cold and from the cache
    python scripts/bench_bars.py latency --model MODEL     ITL of decoding rows while a long prompt comes in
    python scripts/bench_bars.py prefix --model MODEL      prompt tokens computed behind a shared preamble

MODEL "tiny" is a random model of 2 layers.
"""

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

TINY = {  # the Hugging Face config of the model "tiny"
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192,
}  # fmt: skip

NUMBERS = itertools.count()
QUESTIONS, PREAMBLE, QUESTION_TOKENS, ANSWER = 200, 900, (30, 90), 8


def open_llm(model: str, **options: Any) -> Any:
    from jaxinfer import LLM

    options = {"background_compile": False} | options
    if model != "tiny":
        return LLM(model, **options)
    import jax

    from jaxinfer.models import llama

    config = llama.Config.from_hf(TINY)
    del options["dtype"]  # float32
    return LLM(config=config, weights=llama.init(config, jax.random.key(0)), **options)


def greedy(count: int) -> Any:
    from jaxinfer import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


def two_programs(rows: int, budget: int) -> dict[str, Any]:
    """Options of an engine with the programs that these measures need, and no others to be compiled."""
    from jaxinfer.programs.buckets import Buckets

    buckets = Buckets(
        prefill=((budget, rows),), decode=(rows,), decode_steps=1, multi_step=(1,), variants=("greedy",)
    )
    return {"decode_steps": 1, "buckets": buckets}


def prompts_of(llm: Any, lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(100, min(40_000, llm.config.vocab_size), n).tolist() for n in lengths]


def submit(engine: Any, prompt: list[int], output: int) -> Any:
    """The sequence of a request that is given to the engine itself: no text, and no reader."""
    from jaxinfer.request import Request

    name = f"bar {next(NUMBERS)}"
    (sequence,) = engine.add(Request(name, tuple(prompt), greedy(output), arrival_time=engine.clock()))
    return sequence


# Host cost


class NoDevice:
    """Programs that compute nothing: every row draws token 7 at once."""

    compile_seconds, warm, under_way, strict, logits_processors = 0.0, True, False, False, ()

    def __init__(self, shapes: Any) -> None:
        self.shapes = shapes
        self._tokens: dict[tuple[int, int], Any] = {}

    def __len__(self) -> int:
        return 0

    def get(self, program: Any) -> Any:
        import jax.numpy as jnp

        from jaxinfer.sampling.sample import SampleOutput
        from jaxinfer.step import StepOutput

        shape = program.num_steps, program.num_rows
        if shape not in self._tokens:
            self._tokens[shape] = SampleOutput(jnp.full(shape, 7, jnp.int32), jnp.zeros(shape))
        output = StepOutput(self._tokens[shape], None)
        return lambda weights, cache, rows, *rest: (output, cache, rows)

    def helper(self, function: Any) -> Any:
        return lambda first, *rest: first


def host_engine(rows: int, context: int) -> Any:
    import jax

    from jaxinfer.engine import Engine, EngineConfig
    from jaxinfer.kv_cache import KVCacheSpec
    from jaxinfer.models import llama
    from jaxinfer.programs.arguments import ArgumentShapes
    from jaxinfer.programs.buckets import Buckets
    from jaxinfer.scheduler import SchedulerConfig

    config = llama.Config.from_hf(TINY | {"num_hidden_layers": 1})
    budget = max(512, rows)
    spec = KVCacheSpec(1, 1, 8, page_size=16, num_pages=1 + rows * (2 + context // 16))
    weights = llama.init(config, jax.random.key(0))
    return Engine(
        NoDevice(ArgumentShapes(config, weights, spec, rows, context)),  # type: ignore[arg-type]
        weights,
        EngineConfig(
            scheduler=SchedulerConfig(rows, budget, context, decode_steps=1),
            buckets=Buckets.default(rows, budget, 1, "cpu"),
        ),
    )


def add_requests(engine: Any, count: int, prompt: int, output: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(count):
        submit(engine, rng.integers(100, 500, prompt).tolist(), output)


def step_times(engine: Any, steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times


def host(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    context = 512
    for rows in (64, 1024):  # all of them decode, in the middle of long outputs
        engine = host_engine(rows, context)
        add_requests(engine, rows, 200, 300)
        while (
            any(seq.num_output_tokens == 0 for seq in engine.scheduler.running)
            or engine.scheduler.num_waiting
        ):
            engine.step()
        times = step_times(engine, args.steps)
        result[f"host_ms_{rows}_rows"] = 1e3 * statistics.median(times)
    result["rows_ratio"] = result["host_ms_1024_rows"] / result["host_ms_64_rows"]
    for waiting in (100, 100_000):  # 64 rows, of which one or two end and are replaced in a step
        engine = host_engine(64, context)
        add_requests(engine, 64 + waiting, 20, 40)
        for _ in range(30):
            engine.step()
        times = step_times(engine, 30)
        result[f"host_ms_{waiting}_waiting"] = 1e3 * statistics.median(times)
        result[f"host_ms_max_{waiting}_waiting"] = 1e3 * max(times)
    result["queue_ratio"] = result["host_ms_100000_waiting"] / result["host_ms_100_waiting"]
    result["bars"] = {"rows_ratio": 18, "queue_ratio": "flat"}
    return result


def share(args: argparse.Namespace) -> dict[str, Any]:
    """Of 64 rows that decode. Host time is all of a step's time in which it does not wait for the device."""
    from jaxinfer.metrics import Recording

    rows, steps = args.rows, args.steps
    with open_llm(
        args.model,
        dtype=args.dtype,
        max_model_len=64 + 2 * steps + 64,
        max_num_seqs=rows,
        enable_prefix_caching=False,
    ) as llm:
        prompts = prompts_of(llm, [64] * rows)
        llm.generate(prompts, greedy(4), use_tqdm=False)
        sequences = [submit(llm.engine, ids, 2 * steps) for ids in prompts]
        while any(seq.num_output_tokens < 2 for seq in sequences):
            llm.engine.step()
        llm.engine.recording = recording = Recording(llm.engine.clock)
        before, start = llm.stats().steps["decode"], time.perf_counter()
        for _ in range(steps):
            llm.engine.step()
        wall, spent = time.perf_counter() - start, llm.stats().steps["decode"] - before
        recording.close()
    host_s = wall - spent.wait_s
    records = list(recording.steps)
    return {
        "rows": rows,
        "dispatch_ms": 1e3 * statistics.median(step.dispatched - step.begun for step in records),
        "take_in_ms": 1e3 * statistics.median(step.committed - max(step.done, step.read) for step in records),
        "token_steps": spent.num_tokens / rows,
        "host_ms": 1e3 * host_s / steps,
        "device_ms": 1e3 * spent.device_s / steps,
        "late_steps": spent.num_late,
        "host_share": host_s / spent.device_s,
        "bars": {"host_share": 0.15},
    }


# Memory


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak after warm-up and one call, with the pages that it wrote and with all of them; growth over small calls."""
    import jax
    import jax.numpy as jnp

    with open_llm(
        args.model,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=args.rows,
        kv_cache_memory_bytes=args.kv_mib << 20 if args.kv_mib else None,
    ) as llm:
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.weights))
        pool = llm.engine.spec.total_bytes
        llm.warmup(use_tqdm=False)
        warm = _status("VmRSS")
        llm.generate(prompts_of(llm, [64] * args.rows), greedy(16), use_tqdm=False)
        peak = _status("VmHWM")
        # On a CPU pages become resident as they are written, so write them all.
        zero = jax.jit(lambda cache: jax.tree.map(jnp.zeros_like, cache), donate_argnums=0, keep_unused=True)
        llm.engine._cache = jax.block_until_ready(zero(llm.engine._cache))
        prompts, after = prompts_of(llm, [2] * args.rows), []
        for _ in range(args.calls):
            llm.generate(prompts, greedy(2), use_tqdm=False)
            gc.collect()
            after.append(_status("VmRSS"))
        full = _status("VmHWM")
    settled, limit = after[len(after) // 5 :], 1.25 * (weights + pool)
    return {
        "weights_mb": weights / 1e6,
        "pool_mb": pool / 1e6,
        "limit_mb": limit / 1e6,
        "rss_after_warmup_mb": warm / 1e6,
        "peak_rss_mb": peak / 1e6,
        "peak_rss_full_mb": full / 1e6,
        "peak_over_limit": peak / limit,
        "peak_full_over_limit": full / limit,
        "growth_kb_per_call": float(np.polyfit(range(len(settled)), settled, 1)[0]) / 1e3,
        "growth_mb": (settled[-1] - settled[0]) / 1e6,
        "calls": args.calls,
        "bars": {"peak_over_limit": 1.0, "peak_full_over_limit": 1.0, "growth_mb": 0.0},
    }


def reopen(args: argparse.Namespace) -> dict[str, Any]:
    """Resident memory and memory maps after each of some LLMs in a row, with their default options."""
    resident, maps = [], []
    for _ in range(args.llms):
        with open_llm(args.model, dtype=args.dtype, background_compile=True) as llm:
            llm.generate(prompts_of(llm, [8]), greedy(16), use_tqdm=False)
        del llm
        gc.collect()
        resident.append(_status("VmRSS") / 1e6)
        maps.append(len(Path("/proc/self/maps").read_text().splitlines()))
    return {
        "resident_mb": resident,
        "maps": maps,
        "growth_mb": max(resident[1:]) - resident[1],
        "growth_maps": max(maps[1:]) - maps[1],
        "bars": {"growth_mb": 50.0},
    }


def _status(key: str) -> int:
    """Bytes of VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {key}")


# Start

START = """
import json, sys, time
times = {"interpreter": time.monotonic()}
import jax
times["import jax"] = time.monotonic()
from jaxinfer import LLM, SamplingParams
times["import jaxinfer"] = time.monotonic()
model, dtype, folder, rows = sys.argv[1:]
llm = LLM(model, dtype=dtype, max_model_len=1024, max_num_seqs=int(rows), compilation_cache_dir=folder)
times["weights and pages"] = time.monotonic()
params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
(output,) = llm.generate("The capital of France is", params, use_tqdm=False)
times["first token"], times["16 tokens"] = output.metrics.first_token_time, time.monotonic()
print(json.dumps(times))
"""


def start(args: argparse.Namespace) -> dict[str, Any]:
    """A short prompt in a new process: with nothing compiled, and then from the persistent cache."""
    bars = {"cold": 25.0, "warm": 4.0}
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", *["warm"] * args.starts):
            command = [sys.executable, "-c", START, args.model, args.dtype, folder, str(args.rows)]
            begun = time.monotonic()
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
            times = json.loads(done.stdout.splitlines()[-1])
            phases = {phase: at - begun for phase, at in times.items()}
            print(f"  {name}: " + ", ".join(f"{phase} {at:.2f}" for phase, at in phases.items()))
            result.setdefault(f"{name}_s", []).append(phases["first token"])
    return result | {"bars": {f"{name}_s": bar for name, bar in bars.items()}}


# Latency


def latency(args: argparse.Namespace) -> dict[str, Any]:
    """ITL p99 of decoding rows, alone and while one long prompt is computed beside them."""
    rows, long = args.rows, args.prompt
    found: dict[str, Any] = {"rows": rows, "prompt": long}
    for budget in args.budgets:
        with open_llm(
            args.model,
            dtype=args.dtype,
            max_model_len=long + 64,
            max_num_seqs=rows + 1,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
            **two_programs(rows + 1, budget),
        ) as llm:
            llm.warmup(use_tqdm=False)
            chunks = -(-long // (budget - rows))
            prompts = prompts_of(llm, [32] * rows + [long])
            # While the long prompt is under way, each row draws a token per step.
            engine, output = llm.engine, min(long, 2 * chunks + 64)
            sequences = [submit(engine, ids, output) for ids in prompts[:rows]]
            while min(seq.num_output_tokens for seq in sequences) < chunks // 2 + 32:
                engine.step()
            came = engine.clock()
            arriving = submit(engine, prompts[rows], 2)
            while arriving.num_output_tokens == 0:
                engine.step()
            there = engine.clock()
            gaps: dict[str, list[float]] = {"alone": [], "beside": []}
            # alone: from where all rows decode, so without the steps of their own prompts
            all_decode = max(seq.metrics.token_times[0] for seq in sequences)
            for seq in sequences:
                times = np.array(seq.metrics.token_times)
                ends, spans = times[1:], np.diff(times)
                gaps["alone"] += spans[(times[:-1] > all_decode) & (ends < came)].tolist()
                gaps["beside"] += spans[(ends >= came) & (ends <= there)].tolist()
        alone, beside = (float(np.percentile(gaps[name], 99)) for name in ("alone", "beside"))
        found[f"budget_{budget}"] = {
            "itl_p99_ms_alone": 1e3 * alone,
            "itl_p99_ms_beside": 1e3 * beside,
            "raised": beside / alone,
            "ttft_s_of_the_prompt": arriving.metrics.ttft_s,
        }
    found["bars"] = {f"budget_{args.budgets[-1]}.raised": 2.0}
    return found


# Prefix cache


def prefix(args: argparse.Namespace) -> dict[str, Any]:
    """Questions behind a shared preamble, one after the other and all at once, and without a prefix cache."""
    outputs: dict[str, list[list[int]]] = {}
    result: dict[str, Any] = {"questions": args.questions}
    for name, caching in (("at_once", True), ("in_turn", True), ("without", False)):
        with open_llm(
            args.model,
            dtype=args.dtype,
            max_model_len=PREAMBLE + QUESTION_TOKENS[1] + ANSWER + 16,
            max_num_seqs=args.rows,
            enable_prefix_caching=caching,
            **two_programs(args.rows, 512),
        ) as llm:
            llm.warmup(use_tqdm=False)
            lengths = np.random.default_rng(1).integers(*QUESTION_TOKENS, args.questions).tolist()
            (preamble,) = prompts_of(llm, [PREAMBLE])
            prompts = [preamble + question for question in prompts_of(llm, lengths, seed=2)]
            start = time.perf_counter()
            if name == "in_turn":
                found = [llm.generate(prompt, greedy(ANSWER), use_tqdm=False)[0] for prompt in prompts]
            else:
                found = llm.generate(prompts, greedy(ANSWER), use_tqdm=False)
            seconds, stats = time.perf_counter() - start, llm.stats()
        outputs[name] = [output.outputs[0].token_ids for output in found]
        result[name] = {
            "computed_share": 1 - stats.num_cached_tokens / stats.num_prompt_tokens,
            "prompt_tokens": stats.num_prompt_tokens,
            "seconds": seconds,
        }
    for name in ("at_once", "in_turn"):
        result[name]["equal_outputs"] = sum(
            a == b for a, b in zip(outputs[name], outputs["without"], strict=True)
        )
    result["bars"] = {"computed_share": 0.15, "equal_outputs": args.questions}
    return result


MEASURES = {
    "host": host,
    "share": share,
    "memory": memory,
    "reopen": reopen,
    "start": start,
    "latency": latency,
    "prefix": prefix,
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, help="rows at the same time; 32 for latency, else 64")
    parser.add_argument("--steps", type=int, default=200, help="host, share: steps that are measured")
    parser.add_argument("--calls", type=int, default=100, help="memory: generate calls")
    parser.add_argument(
        "--kv-mib", type=int, help="memory: size of the pool; the engine's default if left out"
    )
    parser.add_argument("--llms", type=int, default=6, help="reopen: how many, at least 2")
    parser.add_argument("--starts", type=int, default=3, help="start: how many from the cache")
    parser.add_argument("--prompt", type=int, default=4096, help="latency: tokens of the long prompt")
    parser.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=[512, 64, 48],
        help="latency: max_num_batched_tokens, compared",
    )
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="prefix: how many")
    args = parser.parse_args(arguments)
    args.rows = args.rows or (32 if args.measure == "latency" else 64)
    result = MEASURES[args.measure](args)
    for name, value in result.items():
        print(f"  {name:<26} {_shown(value)}")
    print(json.dumps(result))
    return result


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
