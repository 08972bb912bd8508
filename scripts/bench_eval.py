"""Multiple choice by log-likelihood behind shared preambles, against transformers: speed, equality, memory.

    python scripts/bench_eval.py [--score letters|options] [--items 344] [--batch-sizes 8,32,128]

Each batch size (rows that run at the same time) runs in a process of its own, with the same pool of pages, so that
its peak of resident memory is its own. The choices are compared with tests/golden/eval.npz. The last line is JSON.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from eval_items import make_items

ROOT = Path(__file__).parents[1]
POOL_BYTES = 512 << 20
WARM_ITEMS = 2  # of another subject; they run first and compile the programs


def measure(model: str, score: str, num_items: int, batch_size: int, prefix_caching: bool) -> dict[str, Any]:
    from jaxinfer.llm import LLM

    golden = np.load(ROOT / "tests" / "golden" / "eval.npz")
    all_items = make_items()
    known = np.flatnonzero(~np.isnan(golden[score][:, 0]))
    # Spread over all subjects, each with its preamble.
    chosen = known[np.unique(np.linspace(0, len(known) - 1, min(num_items, len(known))).astype(int))]
    items = [all_items[i] for i in chosen]
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=batch_size,
        page_size=16,
        kv_cache_memory_bytes=POOL_BYTES,
        enable_prefix_caching=prefix_caching,
        background_compile=False,
    )
    prompts = [item.prompt for item in items for _ in item.choices]
    continuations = [text for item in items for text in item.continuations(score)]
    warm = [f"Warm up. {prompt[:600]}" for prompt in prompts[: WARM_ITEMS * len(items[0].choices)]]
    llm.loglikelihood(warm, continuations[: len(warm)], use_tqdm=False)
    before = llm.stats()
    start = time.perf_counter()
    results = llm.loglikelihood(prompts, continuations, use_tqdm=True)
    seconds = time.perf_counter() - start
    after = llm.stats()

    ours = np.array([result.logprob for result in results]).reshape(len(items), -1)
    theirs = golden[score][chosen]
    compiled = after.compile_seconds - before.compile_seconds
    offered = after.num_prompt_tokens - before.num_prompt_tokens
    cached = after.num_cached_tokens - before.num_cached_tokens
    return {
        "batch_size": batch_size,
        "items": len(items),
        "items_per_s": round(len(items) / (seconds - compiled), 2),
        "compile_s": round(compiled, 1),
        "cached_share": round(cached / offered, 3),
        "same_choice": float((ours.argmax(1) == theirs.argmax(1)).mean()),
        "same_tokens": bool((checksums(llm, items) == golden["checksums"][chosen]).all()),
        "max_difference": float(np.abs(ours - theirs).max()),
        "accuracy": round(float((ours.argmax(1) == [item.answer for item in items]).mean()), 4),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def checksums(llm: Any, items: list) -> np.ndarray:
    """u32 per item, of the token ids of all its letters and options."""
    sums = []
    for item in items:
        seen: list[int] = []
        for kind in ("letters", "options"):
            for text in item.continuations(kind):
                seen += llm.tokenizer.encode(item.prompt + text)
        sums.append(zlib.crc32(np.array(seen, "<i4").tobytes()))
    return np.array(sums, np.uint32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--score", choices=["letters", "options"], default="letters")
    parser.add_argument("--items", type=int, default=len(make_items()))
    parser.add_argument("--batch-sizes", default="8,32,128")
    parser.add_argument("--no-prefix-caching", action="store_true")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    if len(sizes) == 1:
        found = measure(
            arguments.model, arguments.score, arguments.items, sizes[0], not arguments.no_prefix_caching
        )
        print(json.dumps(found))
        return
    runs = []
    for size in sizes:
        command = [sys.executable, __file__, *sys.argv[1:], "--batch-sizes", str(size)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        print(runs[-1], file=sys.stderr, flush=True)
    peaks = [run["peak_rss_mib"] for run in runs]
    print(json.dumps({"runs": runs, "peak_spread": round(max(peaks) / min(peaks) - 1, 3)}))


if __name__ == "__main__":
    main()
