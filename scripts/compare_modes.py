"""Numeric modes of one model beside each other, on real text: perplexity, and how far tokens and logits move.

    python scripts/compare_modes.py --model smollm2-135m-instruct bfloat16 float32 float32+w8a8 --tokens 100000

A mode is a dtype, with "+w8a8" for int8 matrices and activations. The first is what the others are held against. Text:
--text FILE, or the topics of Python's own manual (`pydoc_data.topics`, English prose, in every CPython), in windows of
512 tokens. The last line is JSON.
"""

import argparse
import json
import math
import pydoc_data.topics
import time
from pathlib import Path
from typing import Any

import numpy as np

WINDOW = 512


def windows_of(text: str, tokenizer: Any, skip: int, num_tokens: int) -> list[list[int]]:
    ids = tokenizer.encode_plain(text)[skip:]
    if len(ids) < num_tokens:
        raise SystemExit(f"the text has {len(ids)} tokens, and {num_tokens} are asked for: give a longer one")
    return [ids[i : i + WINDOW] for i in range(0, num_tokens - 1, WINDOW)]


def measure(model: str, mode: str, text: str, skip: int, num_tokens: int) -> dict[str, np.ndarray]:
    """Per token but the first of each window: its log-probability, the best token's id and log-probability."""
    from jaxinfer import LLM, SamplingParams

    dtype, _, quantize = mode.partition("+")
    begin = time.perf_counter()
    with LLM(
        model, dtype=dtype, quantize=quantize or None, max_model_len=WINDOW + 1, max_num_seqs=8,
        enable_prefix_caching=False, background_compile=False,
    ) as llm:  # fmt: skip
        assert llm.tokenizer is not None
        windows = windows_of(text, llm.tokenizer, skip, num_tokens)
        params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1, detokenize=False)
        found: list[tuple[float, int, float]] = []
        for output in llm.generate(windows, params, use_tqdm=True):
            assert output.error is None, output.error
            for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
                best = min(entry, key=lambda token_id: entry[token_id].rank)
                found.append((entry[token].logprob, best, entry[best].logprob))
    print(f"{mode}: {len(found)} tokens in {time.perf_counter() - begin:.0f} s", flush=True)
    logprob, best, best_logprob = zip(*found, strict=True)
    return {"logprob": np.array(logprob), "best": np.array(best), "best_logprob": np.array(best_logprob)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", nargs="+", metavar="MODE")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--skip", type=int, default=0, help="tokens left out, to measure a text in pieces")
    parser.add_argument("--text", type=Path)
    args = parser.parse_args()
    text = args.text.read_text() if args.text else "\n\n".join(pydoc_data.topics.topics.values())

    results: dict[str, dict[str, float]] = {}
    first: dict[str, np.ndarray] | None = None
    for mode in args.modes:
        found = measure(args.model, mode, text, args.skip, args.tokens)
        first = first or found
        moved = np.abs(found["logprob"] - first["logprob"])
        results[mode] = {
            "perplexity": round(math.exp(-found["logprob"].mean()), 4),
            "of_first": round(math.exp(first["logprob"].mean() - found["logprob"].mean()), 5),
            "same_best": round(float((found["best"] == first["best"]).mean()), 5),
            "logprob_moved_mean": round(float(moved.mean()), 5),
            "logprob_moved_p99": round(float(np.quantile(moved, 0.99)), 4),
        }
        print(f"  {results[mode]}", flush=True)
    print(json.dumps({"model": args.model, "tokens": args.tokens, "modes": results}))


if __name__ == "__main__":
    main()
