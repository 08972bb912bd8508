"""What a dump of top-k logprobs costs: `jaxinfer batch` over windows of tokens, with and without it.

    python scripts/bench_dump.py [-k 50] [--windows 16] [--length 1024] [--rounds 3]

Plain jobs prefill each window and draw one token; dump jobs score every token of it. They take turns in one
process, on one engine without a prefix cache, after a job of each kind that compiles. The last line is JSON;
`ratio` is the speed of dumps over that of plain prefill.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np

from jaxinfer.llm import LLM
from jaxinfer.request import SamplingParams, TopK
from jaxinfer.tools.batch_runner.dumps import folder_of
from jaxinfer.tools.batch_runner.progress import Totals
from jaxinfer.tools.batch_runner.runner import Job, run


def rss_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("-k", type=int, default=50)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    llm = LLM(
        arguments.model,
        max_model_len=arguments.length + 1,
        max_num_seqs=8,
        enable_prefix_caching=False,
        background_compile=False,
    )
    rng = np.random.default_rng(0)
    plain = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    kinds = {
        "plain": (plain, None),
        "dump": (dataclasses.replace(plain, max_tokens=0), TopK(arguments.k, None)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in kinds}
    memory, dumped = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def job(kind: str, number: int, windows: int) -> float:
            """Prompt tokens per second."""
            nonlocal dumped
            source, output = folder / f"{kind}{number}.in.jsonl", folder / f"{kind}{number}.jsonl"
            ids = rng.integers(100, min(40_000, llm.config.vocab_size), (windows, arguments.length))
            source.write_text("\n".join(json.dumps({"prompt": window}) for window in ids.tolist()))
            params, topk = kinds[kind]
            totals = Totals()
            described = Job(source, output, arguments.model, "", params, dump=topk)
            run(described, lambda: contextlib.nullcontext(llm), totals)  # type: ignore[arg-type, return-value]
            if topk is not None:
                dumped = sum(path.stat().st_size for path in folder_of(output).iterdir())
            return totals.num_prompt_tokens / totals.seconds

        for kind in kinds:
            job(kind, 0, 2)
        for number in range(1, arguments.rounds + 1):
            for kind in kinds:
                speeds[kind].append(job(kind, number, arguments.windows))
                print(f"{kind}: {speeds[kind][-1]:.1f} tok/s", flush=True)
            memory.append(rss_mib())
    medians = {kind: statistics.median(found) for kind, found in speeds.items()}
    result = {
        "k": arguments.k,
        "plain_tok_s": round(medians["plain"], 1),
        "dump_tok_s": round(medians["dump"], 1),
        "ratio": round(medians["dump"] / medians["plain"], 3),
        "bytes_per_token": round(dumped / arguments.windows / arguments.length, 1),
        "rss_mib_after_rounds": memory,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
