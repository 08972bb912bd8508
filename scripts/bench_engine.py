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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxinfer.tools.bench.workload import Offer


def workload(name: str, seed: int, llm: Any) -> "list[Offer]":
    from jaxinfer.tools.bench.workload import Lengths, Offer, random_offers

    sizes = {"vocab_size": llm.config.vocab_size, "max_model_len": llm.max_model_len}
    output = Lengths.parse("uniform:16:256")
    if name == "ragged-64":
        return random_offers(64, Lengths.parse("uniform:32:512"), output, seed=seed, **sizes)
    (offer,) = random_offers(1, Lengths.parse("uniform:128:128"), output, seed=3, **sizes)
    return [Offer(offer.prompt, 128)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=("ragged-64", "single"), default="ragged-64")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", choices=("w8a8",))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--page-size", default="auto")
    parser.add_argument("--batch-invariant", action="store_true", help="also run without it: what it costs")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1, help="measured runs; the fastest counts")
    parser.add_argument("--verbose", action="store_true", help="log every program that is compiled")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING)
    logging.getLogger("jax").setLevel(logging.WARNING)

    begin = time.perf_counter()
    import jax

    from jaxinfer import LLM
    from jaxinfer.options.device_facts import facts_of
    from jaxinfer.options.llm_options import LLMOptions
    from jaxinfer.options.model_source import named_facts
    from jaxinfer.options.resolve import resolve
    from jaxinfer.programs.buckets import Buckets
    from jaxinfer.sampling.sample import Variant
    from jaxinfer.tools.bench.run import card, drive, run
    from jaxinfer.tools.planner import hardware

    fields = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    page_size = args.page_size if args.page_size == "auto" else int(args.page_size)
    options: dict[str, Any] = dict(
        dtype=args.dtype,
        quantize=args.quantize,
        max_model_len=1024,
        max_num_seqs=64 if args.workload == "ragged-64" else 1,
        max_num_batched_tokens=args.max_num_batched_tokens,
        page_size=page_size,
        enable_prefix_caching=False,
        background_compile=False,
    )
    # Half of the default programs: those of the variant that is measured.
    variant: Variant = "greedy" if args.temperature == 0 else "sample"
    device, facts = facts_of(jax.devices()[0]), named_facts(args.model)

    def buckets(batch_invariant: bool) -> Buckets:
        whole = resolve(LLMOptions(batch_invariant=batch_invariant, **options), facts, device)
        return replace(whole.buckets, variants=(variant,))

    llm = LLM(
        args.model, batch_invariant=args.batch_invariant, buckets=buckets(args.batch_invariant), **options
    )
    work = workload(args.workload, args.seed, llm)
    drive(llm, [replace(work[0], prompt=work[0].prompt[:32], output_len=1)], fields)
    start_s = time.perf_counter() - begin

    lengths = [(len(offer.prompt), offer.output_len) for offer in work]
    load = card(llm, lengths, hardware.known(jax.devices()[0]))
    print(
        f"{args.workload} on {llm.device_choice}, {llm.config.dtype}, KV cache {llm.engine.spec.describe()}"
    )
    print(
        f"card: {load.num_prompt_tokens} prompt + {load.num_output_tokens} output tokens, at least "
        f"{load.flops / 1e9:.0f} GFLOP, {load.bytes / 1e9:.1f} GB read in decode"
    )
    # Warm: every program the workload needs runs once, on other prompts.
    shadow = [replace(offer, prompt=offer.prompt[::-1]) for offer in work[:8]]
    drive(llm, shadow, fields)
    llm.warmup(use_tqdm=False)

    plain = LLM(args.model, buckets=buckets(False), **options) if args.batch_invariant else None
    if plain is not None:
        drive(plain, shadow, fields)
        plain.warmup(use_tqdm=False)

    runs, plain_seconds = [], []
    for _ in range(args.repeat):
        runs.append(run(llm, work, fields))
        if plain is not None:  # in turn, so that both see the same machine
            plain_seconds.append(run(plain, work, fields).seconds)
    best = min(runs, key=lambda result: result.seconds)
    seconds, outputs = best.seconds, best.outputs
    for offer, output in zip(work, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == offer.output_len, output
    ttft = sorted(o.metrics.ttft_s for o in outputs)
    decode = [1 / o.metrics.tpot_s for o in outputs if o.metrics.tpot_s]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    result = {
        "workload": args.workload,
        "model": args.model,
        "dtype": llm.config.dtype,
        "quantize": args.quantize,
        "seconds": round(seconds, 3),
        "total_tok_per_s": round(best.rates()["total_tok_per_s"], 1),
        "out_tok_per_s": round(best.rates()["output_tok_per_s"], 1),
        "ttft_ms": round(1e3 * ttft[len(ttft) // 2], 1),
        "decode_tok_per_s": round(float(np.median(decode)), 1),
        "start_s": round(start_s, 1),
        "compile_s": round(llm.engine.programs.compile_seconds, 1),
        "programs": len(llm.engine.programs),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "gflop_per_s": round(load.flops / 1e9 / seconds, 1),
        "gbyte_per_s": round(load.bytes / 1e9 / seconds, 2),
        "commit": commit,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "seed": args.seed,
        "temperature": args.temperature,
    }
    if plain is not None:
        result["plain_seconds"] = round(min(plain_seconds), 3)
        result["cost_of_batch_invariance"] = round(seconds / min(plain_seconds) - 1, 3)
    for name, value in result.items():
        print(f"  {name:<18} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
