"""Programs and kernels through the real compilers, for chips that are not attached; needs the extras aot-tpu, aot-gpu.

    python scripts/aot.py --smoke                     a few minutes: exit code 1 if anything is not as it should be
    python scripts/aot.py --write docs/aot.md         everything: three models and all kernels on seven targets, hours
    python scripts/aot.py --records R.jsonl --targets v5e,v6e --models smollm2-135m --write docs/aot.md
                                                      a part; what R.jsonl has of this commit is not compiled again

The document names what was not run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxinfer.tools.aot import gpu_targets, targets  # noqa: E402
from jaxinfer.tools.aot.run import compile_model  # noqa: E402
from scripts import aot_kernels, aot_kernels_gpu  # noqa: E402
from scripts.aot_document import document, write_programs  # noqa: E402

# Shapes as published in each model's config.json.
MODELS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "llama3-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
}  # fmt: skip
CHIPS = [name for name, target in targets.TARGETS.items() if target.platform != "cpu"]
OPTIONS = {"max_model_len": 4096}
STARTS = 3  # of each kind
SLOWER_START = 2.0  # seconds that looking for a TPU or GPU may take
SMOKE_TARGETS = ("v5e", "v6e", "h200")
QUANTIZED_TARGETS = ("v6e", "h200")  # of w8a8
QUANTIZED_MATRICES = 7 * 30  # of SmolLM2's layers: each is multiplied by the chip's own kernel
SMOKE_PROGRAMS = ("prefill[32,32] greedy", "decode[64,1] greedy")
TOO_LARGE = ("decode[64,8] greedy",)  # of Llama-3-8B in bfloat16, for one v5e
SMOKE_KERNELS = {  # parts of the names of cases
    "tpu": ("attention_smollm2_decode_page128_bfloat16", "attention_llama3_8b_mixed2048_page128_bfloat16"),
    "gpu": ("decode smollm2 page16", "prefill llama3_8b page16"),
}


def model_folder(name: str, parent: Path) -> str:
    """A folder with nothing but the model's config.json."""
    folder = parent / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    return str(folder)


def programs(
    model: str,
    target: str,
    which: str | Sequence[str],
    search: bool,
    keep: Callable[[dict[str, Any]], Any],
    **options: Any,
) -> dict[str, Any]:
    """Keeps a record of each program of a model on a target, and returns one of the whole, with kind "model".

    options: of `LLM`, beside OPTIONS.
    """
    where = {"model": model, "target": target}
    with tempfile.TemporaryDirectory() as folder:
        result = compile_model(
            model_folder(model, Path(folder)),
            target,
            options=OPTIONS | options,
            which=which,
            search=search,
            say=lambda line: print(f"{model} {target} {line}", flush=True),
            each=lambda record: keep(where | {"kind": "program"} | record),
        )
    described = result["device"]
    whole = where | {
        "kind": "model",
        "ok": result["ok"],
        "error": result["error"],
        "nearest": result["nearest"],
        "versions": described["versions"],
        "usable_bytes": described["usable_bytes"],
        "options": described["options"],
        "kernels": described["choices"]["attention"],
        "programs": [program["name"] for program in described["programs"]],
    }
    keep(whole)
    return whole


def kernels(target: str, only: str) -> Iterator[dict[str, Any]]:
    """A record per kernel case on a target, from aot_kernels.py or aot_kernels_gpu.py."""
    script = "aot_kernels_gpu.py" if target in gpu_targets.TARGETS else "aot_kernels.py"
    command = [sys.executable, f"scripts/{script}", "--target", target, "--only", only]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        for line in child.stdout or ():
            if line.startswith("{"):
                yield {"kind": "kernel"} | json.loads(line) | {"target": target}
        if child.wait():
            errors.seek(0)
            yield {
                "kind": "kernel", "target": target, "case": "all", "result": "failed",
                "why": (errors.read().strip().splitlines() or ["no message"])[-1][:300],
            }  # fmt: skip


def case_names(target: str) -> list[str]:
    """Of all kernel cases on a target, each once."""
    if target in gpu_targets.TARGETS:
        return list(aot_kernels_gpu.cases(gpu_targets.TARGETS[target].compute_capability))
    return list(dict.fromkeys(c.name for c in (*aot_kernels.attention_cases(), *aot_kernels.matmul_cases())))


class Done:
    """What stands in records, so that a run that was stopped goes on with the next model or target."""

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self._wholes = {(r["model"], r["target"]): r["programs"] for r in records if r["kind"] == "model"}
        self._programs = {(r["model"], r["target"], r["program"]) for r in records if r["kind"] == "program"}
        self._kernels = {(r["target"], r["case"]) for r in records if r["kind"] == "kernel"}

    def programs(self, model: str, target: str, which: str | Sequence[str]) -> bool:
        """Whether all programs of `which` are there, and the record of the whole after them."""
        names = self._wholes.get((model, target))
        wanted = names if isinstance(which, str) else which
        return names is not None and all((model, target, name) in self._programs for name in wanted or ())

    def kernels(self, target: str, only: str) -> bool:
        """Whether all kernel cases with `only` in their name are there."""
        return all((target, name) in self._kernels for name in case_names(target) if only in name)


def commit() -> str:
    """Of the checkout, with "+" where it has changes."""
    command = ["git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


def page_layout() -> str:
    """The table that scripts/page_layout.py prints."""
    done = subprocess.run(
        [sys.executable, "scripts/page_layout.py"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


PLAIN_START = """
import time
start = time.perf_counter()
import jax
print(jax.devices()[0].platform, jax.jit(lambda x: x + 1)(1), time.perf_counter() - start)
"""


def plain_start() -> list[str]:
    """What the installed compilers change about a start on the CPU: its backend, its result, or its time."""
    kinds: dict[str, dict[str, str]] = {"plain": {}, "told": {"JAX_PLATFORMS": "cpu"}}
    found: dict[str, list[str]] = {}
    for _ in range(
        STARTS
    ):  # in turn, and the fastest of each: the first one reads the libraries from the disk
        for name, environment in kinds.items():
            command = [sys.executable, "-c", PLAIN_START]
            done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
            print(f"{name} start: {done.stdout.strip()} {done.stderr.strip()[-200:]}", flush=True)
            now = done.stdout.split()
            if name not in found or float(now[2]) < float(found[name][2]):
                found[name] = now
    slower = float(found["plain"][2]) - float(found["told"][2])
    same = found["plain"][:2] == ["cpu", "2"]
    return [] if same and slower < SLOWER_START else [f"a plain start is not what it was: {found}"]


def quantized_kernels(target: str) -> list[str]:
    """What is wrong with SmolLM2 in w8a8 on a target, whose programs call the kernel of quantized matrices."""
    records: list[dict[str, Any]] = []
    whole = programs("smollm2-135m", target, SMOKE_PROGRAMS, False, records.append, quantize="w8a8")
    if not whole["ok"]:
        return [f"smollm2-135m in w8a8 on {target}: {whole['error']}"]
    wrong = []
    for record in (record for record in records if record["kind"] == "program"):
        where = f"{record['program']} of smollm2-135m in w8a8 on {target}"
        calls = record["kernel_calls"].get("quantized_matmul", 0)
        if calls != QUANTIZED_MATRICES:
            wrong.append(f"{where} calls quantized_matmul {calls} times, not {QUANTIZED_MATRICES}")
        if record["code_copies"]:
            wrong.append(f"{where} copies codes of {len(record['code_copies'])} matrices")
    return wrong


def smoke() -> list[str]:
    """What is wrong; nothing if all is well."""
    wrong = plain_start()
    for target in SMOKE_TARGETS:
        whole = programs("smollm2-135m", target, SMOKE_PROGRAMS, search=False, keep=lambda record: None)
        if not whole["ok"]:
            wrong.append(f"smollm2-135m on {target}: {whole['error']}")
        for only in SMOKE_KERNELS[targets.find(target).platform]:
            found = list(kernels(target, only))
            if not found:
                wrong.append(f"no kernel case on {target} is named {only}")
            for record in found:
                print(json.dumps(record), flush=True)
                if record["result"] != "compiled":
                    wrong.append(f"{record['case']} on {target}: {record['result']} {record.get('why', '')}")
    for target in QUANTIZED_TARGETS:
        wrong += quantized_kernels(target)
    large = programs("llama3-8b", "v5e", TOO_LARGE, search=False, keep=lambda record: None)
    if large["ok"] or "more than" not in large["error"]:
        wrong.append(f"llama3-8b in bfloat16 is not refused on one v5e for its size: {large['error']}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--write", type=Path, help="the document")
    parser.add_argument("--records", type=Path, help="JSON lines: kept, and what is run now is added")
    parser.add_argument("--targets", default=",".join(CHIPS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--kernels", default="", help="only cases whose name contains this; none for none")
    parser.add_argument(
        "--programs", help='names with ; between, such as "decode[64,1] greedy"; default: all'
    )
    parser.add_argument("--layout", type=Path, help="what page_layout.py printed; default: it is run")
    options = parser.parse_args()
    if options.smoke:
        start = time.perf_counter()
        wrong = smoke()
        print(f"{time.perf_counter() - start:.0f} s")
        sys.exit("\n".join(wrong) or None)
    records: list[dict[str, Any]] = []
    if options.records and options.records.exists():
        records = [json.loads(line) for line in options.records.read_text().splitlines()]
    here = commit()
    done = Done([record for record in records if record["commit"] == here])

    def keep(record: dict[str, Any]) -> None:
        records.append(record | {"commit": here})
        if options.records:
            with options.records.open("a") as file:
                print(json.dumps(records[-1]), file=file)

    for target in filter(None, options.targets.split(",")):
        for model in filter(None, options.models.split(",")):
            which = "all" if options.programs is None else options.programs.split(";")
            if not done.programs(model, target, which):
                programs(model, target, which, search=True, keep=keep)
        if options.kernels != "none" and not done.kernels(target, options.kernels):
            for record in kernels(target, options.kernels):
                keep(record)
    if options.write:
        layout = options.layout.read_text() if options.layout else page_layout()
        chips = dict.fromkeys([*CHIPS, *(r["target"] for r in records if r["kind"] == "kernel")])
        cases = {chip: case_names(chip) for chip in chips}
        text = document(records, layout, models=list(MODELS), chips=CHIPS, cases=cases, options=OPTIONS)
        options.write.write_text(text)
        write_programs(options.write.with_name(f"{options.write.stem}_programs.csv"), records)


if __name__ == "__main__":
    main()
