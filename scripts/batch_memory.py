"""Memory of `jaxinfer batch` over the length of its input: bytes of RSS per line, on a tiny model.

    python scripts/batch_memory.py [--lines 200000] [--from-line 10000]

Writes lines with ids and prompts of their own, runs the job in this process, and fits a line through the
resident memory, sampled every half second, from `--from-line` on. The last line of the output is JSON.
"""

import argparse
import json
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
PAGE = 4096


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--from-line", type=int, default=10_000)
    arguments = parser.parse_args()

    from batch_jobs import write_model

    from jaxinfer.llm import LLM
    from jaxinfer.request import SamplingParams
    from jaxinfer.tools.batch_runner.progress import Totals
    from jaxinfer.tools.batch_runner.runner import Job, run

    samples: list[tuple[int, int]] = []
    totals, done = Totals(), threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            samples.append((totals.num_done, rss()))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model").path
        with (folder / "in.jsonl").open("w") as file:
            for i in range(arguments.lines):
                # Of one length: a longer prompt may need a program of its own, and compiling takes memory once.
                file.write(json.dumps({"custom_id": f"line number {i}", "prompt": f"{i:07d} is"}) + "\n")
        job = Job(
            input=folder / "in.jsonl",
            output=folder / "out.jsonl",
            model="planted",
            model_hash="",
            defaults=SamplingParams(temperature=0, max_tokens=1),
        )
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        run(job, lambda: LLM(model, max_num_seqs=64, max_model_len=64, background_compile=False), totals)
        done.set()
        watcher.join()
        size = (folder / "out.jsonl").stat().st_size
    lines, memory = np.array([sample for sample in samples if sample[0] >= arguments.from_line]).T
    shown = np.linspace(0, len(lines) - 1, 12).astype(int)
    slope = np.polyfit(lines, memory, 1)[0]
    print(
        json.dumps(
            {
                "lines": totals.num_done,
                "seconds": round(totals.seconds, 1),
                "rss_mib_at": {int(lines[i]): round(memory[i] / 2**20, 2) for i in shown},
                "bytes_per_line": round(float(slope), 2),
                "output_bytes_per_line": size // totals.num_done,
            }
        )
    )


if __name__ == "__main__":
    main()
