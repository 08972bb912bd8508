"""Engine benchmark: ragged batches and one sequence, with the bound that no run can beat.

Workloads (random ids, greedy unless --temperature, end tokens ignored):
  ragged-64  64 requests, prompts of U(32, 512) tokens, outputs of U(16, 256)
  single     one request, 128 in, 128 out

    python scripts/bench_engine.py --workload ragged-64 --model smollm2-135m-instruct --dtype float32

A small batch runs first (warm). The static card says what must move and be computed; the last line is JSON.
"""

import argparse
import json
import logging
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def ragged(count=64, seed=0, prompt=(32, 512), output=(16, 256)) -> list[tuple[list[int], int]]:
    """[(prompt token ids, output length)], lengths drawn uniformly with both ends."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(prompt[0], prompt[1] + 1, count)
    outputs = rng.integers(output[0], output[1] + 1, count)
    return [(rng.integers(100, 40000, p).tolist(), int(o)) for p, o in zip(prompts, outputs, strict=True)]


def single() -> list[tuple[list[int], int]]:
    return [(ragged(1, 3, (128, 128))[0][0], 128)]


def card(llm: Any, work: list[tuple[list[int], int]]) -> dict[str, float]:
    """What the workload must compute and move at the least, whatever the engine does.

    FLOPs: two for each weight of a matrix and token, and attention's products. Bytes of decode: the weights
    once per decode step (as many steps as the longest output has), the K and V of every past token for each
    token.
    """
    import jax

    config = llm.config
    matrices = [x for x in jax.tree.leaves(llm.engine.weights) if x.ndim > 1]
    weights_bytes = sum(x.nbytes for x in jax.tree.leaves(llm.engine.weights))
    embed = config.vocab_size * config.embed_dim
    layer_parameters = sum(x.size for x in matrices) - embed * (1 if config.tie_word_embeddings else 2)
    prompt_tokens, output_tokens = sum(len(p) for p, _ in work), sum(o for _, o in work)
    contexts = [range(len(p), len(p) + o) for p, o in work]
    pairs = sum(len(p) ** 2 / 2 for p, _ in work) + sum(sum(c) for c in contexts)
    kv_token = llm.engine.spec.bytes_per_page / llm.engine.spec.page_size
    flops = 2 * layer_parameters * (prompt_tokens + output_tokens) + 2 * embed * output_tokens
    flops += 4 * config.num_layers * config.num_q_heads * config.head_dim * pairs
    moved = weights_bytes * max(o for _, o in work) + kv_token * sum(sum(c) for c in contexts)
    return {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "gflop": flops / 1e9,
        "decode_gbytes": moved / 1e9,
        "weights_mbytes": weights_bytes / 1e6,
    }


def run(llm: Any, work: list[tuple[list[int], int]], fields: dict[str, Any]) -> tuple[float, list[Any]]:
    """(seconds, outputs) of all requests offered at once."""
    from jaxinfer import SamplingParams

    params = [SamplingParams(max_tokens=o, ignore_eos=True, **fields) for _, o in work]
    start = time.perf_counter()
    outputs = llm.generate([p for p, _ in work], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    for (_, expected), output in zip(work, outputs, strict=True):
        assert output.error is None and len(output.outputs[0].token_ids) == expected, output
    return seconds, outputs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=("ragged-64", "single"), default="ragged-64")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--page-size", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1, help="measured runs; the fastest counts")
    parser.add_argument("--verbose", action="store_true", help="log every program that is compiled")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING)
    logging.getLogger("jax").setLevel(logging.WARNING)

    begin = time.perf_counter()
    from jaxinfer import LLM

    work = ragged(seed=args.seed) if args.workload == "ragged-64" else single()
    fields = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    page_size = args.page_size if args.page_size == "auto" else int(args.page_size)
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=64 if args.workload == "ragged-64" else 1,
        max_num_batched_tokens=args.max_num_batched_tokens,
        page_size=page_size,
        enable_prefix_caching=False,
    )
    run(llm, [(work[0][0][:32], 1)], fields)
    start_s = time.perf_counter() - begin

    facts = card(llm, work)
    print(
        f"{args.workload} on {llm.device_choice}, {llm.config.dtype}, KV cache {llm.engine.spec.describe()}"
    )
    print(
        f"card: {facts['prompt_tokens']} prompt + {facts['output_tokens']} output tokens, at least "
        f"{facts['gflop']:.0f} GFLOP, {facts['decode_gbytes']:.1f} GB read in decode"
    )
    # Warm: every program the workload needs runs once, on other prompts.
    shadow = [(p[::-1], o) for p, o in work]
    run(llm, shadow if args.workload == "single" else shadow[:8], fields)
    llm.warmup(use_tqdm=False)

    seconds, outputs = min((run(llm, work, fields) for _ in range(args.repeat)), key=lambda r: r[0])
    ttft = sorted(o.metrics.ttft_s for o in outputs)
    decode = [1 / o.metrics.tpot_s for o in outputs if o.metrics.tpot_s]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    import jax

    result = {
        "workload": args.workload,
        "model": args.model,
        "dtype": llm.config.dtype,
        "seconds": round(seconds, 3),
        "total_tok_per_s": round((facts["prompt_tokens"] + facts["output_tokens"]) / seconds, 1),
        "out_tok_per_s": round(facts["output_tokens"] / seconds, 1),
        "ttft_ms": round(1e3 * ttft[len(ttft) // 2], 1),
        "decode_tok_per_s": round(float(np.median(decode)), 1),
        "start_s": round(start_s, 1),
        "compile_s": round(llm.engine.programs.compile_seconds, 1),
        "programs": len(llm.engine.programs),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "gflop_per_s": round(facts["gflop"] / seconds, 1),
        "gbyte_per_s": round(facts["decode_gbytes"] / seconds, 2),
        "commit": commit,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "seed": args.seed,
        "temperature": args.temperature,
    }
    for name, value in result.items():
        print(f"  {name:<18} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
