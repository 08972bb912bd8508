"""docs/aot.md, from the records of scripts/aot.py: what compiled, what was refused and why, and what did not run."""

import csv
import datetime
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.text.wording import size
from jaxinfer.tools.aot.report import excess, failed, most

Record = Mapping[str, Any]
COLUMNS = (
    "model", "target", "program", "result", "seconds", "arguments", "temporaries", "share of memory", "cache",
    "cycles, or GPU kernels",
)  # fmt: skip
KERNELS = ("ragged_paged_attention", "kv_append", "append_then_attend", "quantized_matmul")
INTRODUCTION = """\
Each program of the engine's warm-up (`jaxinfer compile MODEL --target CHIP`) was compiled by the real compiler of the
chip from the shapes of its arguments; `docs/aot_programs.csv` has a line for each.
A line proves that the compiler takes the program and what memory it
needs; no value was computed and nothing was timed but the compiler, on a shared machine that was held at times: its
seconds are upper bounds. XLA for GPUs chooses between kernels by trying them on a GPU; without one it takes its
defaults. Shares are of the memory that programs can have: what the TPU compiler
says, or 75 % of a GPU's, as JAX takes. "In place" says that the whole KV cache is aliased and that no copy or transpose
of an array of pages stands in the compiled text. Cycles are the TPU compiler's own estimates for XLA's part, its
placeholders left out; the Pallas calls stand beside them with what they declare. Registers, spilled and shared bytes of
GPU kernels are ptxas's, the most of any of our kernels in the program; of a program whose attention is XLA's they are
those of the kernels that are ours, or none. All programs are for one device, so none has a collective."""
KERNEL_RESULTS = """\
A case is refused where our own checks name another implementation (its reason stands above), and fails where the
compiler does not take it. It is bulky where temporaries are more than half of the pool or weight, which may be a copy
of it in every call or, beside small pools and weights, the activations. Where a kernel changed after the first run, its
cases that changed or had failed ran again at the later commit, and the last record of a case counts."""
LAYOUT = """\
What a kernel that aliases the pool needs besides its arguments on a v6e, divided by the bytes of the pool
(`scripts/page_layout.py`): 0 is a pool in place, 1 and more is a copy of all of it in every call."""


def document(
    records: Iterable[Record],
    layout: str,
    *,
    models: Sequence[str],
    chips: Sequence[str],
    cases: Mapping[str, Sequence[str]],
    options: Record,
) -> str:
    """The text of docs/aot.md.

    Args:
      records: with "kind" program, model or kernel; of several for the same thing the last counts.
      layout: what scripts/page_layout.py printed.
      models, chips: what should have run; chips of kernels alone are found in `cases`.
      cases: chip -> names of its kernel cases.
      options: of `LLM`, that all programs were compiled with.
    """
    programs: dict[tuple[str, str, str], Record] = {}
    wholes: dict[tuple[str, str], Record] = {}
    kernels: dict[tuple[str, str], Record] = {}
    errors: dict[tuple[str, str], str] = {}
    for record in records:
        if record["kind"] == "program":
            programs[record["model"], record["target"], record["program"]] = record
        elif record["kind"] == "kernel":
            kernels[record["target"], record["case"]] = record
        else:
            key = record["model"], record["target"]
            wholes[key] = record
            if record["error"] and (key not in errors or record.get("nearest")):
                errors[key] = record["error"]
    tables = [_model(model, chips, programs, wholes) for model in models]
    missing = _missing_programs(models, chips, programs, wholes) + _missing_cases(cases, kernels)
    lines = [
        "# Programs compiled for chips that are not attached",
        "",
        f"Written by `scripts/aot.py` on {datetime.date.today()}, of commit {_list(_commits(records))}:",
        f"{_list(f'{name} {number}' for name, number in _versions(wholes.values()).items())}.",
        "",
        INTRODUCTION,
        "",
        f"Options: {_list(f'`{k}={v}`' for k, v in options.items())}, else the defaults of `LLM`.",
        "",
        "## What ran",
        "",
        *_overview(models, chips, programs, wholes, cases, kernels),
        "",
        *(["Not run:", "", *(f"- {line}" for line in missing)] if missing else ["Everything ran."]),
        "",
        "## What does not fit, is refused or rejected",
        "",
        *[f"- {model} on {target}: {error}." for (model, target), error in sorted(errors.items())],
        *_bad_cases(kernels),
        *(line for table in tables for line in table),
        "",
        "## Kernels",
        "",
        KERNEL_RESULTS,
        "",
        *_kernel_table(cases, kernels),
        "",
        "## Layout of pages",
        "",
        LAYOUT,
        "",
        layout.rstrip(),
    ]
    return "\n".join(lines) + "\n"


def kernel_of(case: str) -> str:
    """The kernel that a case of aot_kernels.py or aot_kernels_gpu.py is of."""
    found = [name for name in KERNELS if case.startswith(name)]
    # The others are named "attention_...", "decode ...", "prefill ...", "drafts ...".
    return found[0] if found else "ragged_paged_attention"


def kernel_result(record: Record) -> str:
    """What came of a kernel case.

    "compiled"; "refused" by our own check; "failed": the compiler does not take it, or a donated pool is not in place;
    "bulky": compiled with temporaries over half of the pool or weight, which a copy of it would be.
    """
    if record["result"] != "compiled":
        return "refused" if record["result"] == "refused" else "failed"
    if record.get("alias_bytes", 0) < record.get("donated_bytes", 0):
        return "failed"
    return (
        "bulky" if record.get("temp_bytes", 0) > record.get("pool_bytes", float("inf")) // 2 else "compiled"
    )


def write_programs(path: Path, records: Iterable[Record]) -> None:
    """Writes a CSV line per program; of several records of one program the last counts."""
    last = {(r["model"], r["target"], r["program"]): r for r in records if r["kind"] == "program"}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(program_row(record) for record in last.values())


def program_row(record: Record) -> list[str]:
    """The cells of COLUMNS for one program; what its compiler did not say is empty."""
    arguments = temporaries = cache = share = ""
    if "argument_bytes" in record:
        arguments, temporaries = size(record["argument_bytes"]), size(record["temp_bytes"])
        copies = f", {len(record['page_copies'])} copies" if record["page_copies"] else ""
        cache = f"{'in place' if record['cache_aliased'] else 'NOT ALIASED'}{copies}"
        share = f"{record['memory_share']:.0%}"
    result = record["result"]
    if result == "too large":
        result = f"too large by {excess(record)}"
    names = [str(record[name]) for name in ("model", "target", "program")]
    return [
        *names, result, f"{record.get('seconds', 0):.0f}", arguments, temporaries, share, cache, _cost(record),
    ]  # fmt: skip


def _cost(row: Record) -> str:
    if cycles := row.get("cycles"):
        kernels = f" + {cycles['kernel_flops'] / 1e9:.2f} GFLOP, {size(cycles['kernel_bytes'])}"
        return f"{cycles['estimated']:,}{kernels if cycles['kernel_bytes'] else ''}"
    if "gpu_kernels" in row:
        found = row["gpu_kernels"]
        return _resources(found) if found else "none of ours"
    return row.get("why", "")[:120]


def _resources(kernels: Sequence[Record]) -> str:
    registers, spilled, shared = (most(kernels, key) for key in ("registers", "spill_bytes", "smem_bytes"))
    return f"{registers} registers, {spilled} B spilled, {shared} B shared"


def _model(
    model: str, chips: Sequence[str], programs: Mapping[tuple, Record], wholes: Mapping[tuple, Record]
) -> list[str]:
    """The section of a model."""
    present = [chip for chip in chips if (model, chip) in wholes]
    if not present:
        return []
    lines = [
        "",
        f"## {model}",
        "",
        "| target | usable | attention | pages x tokens | temporaries at most | share of memory at most |",
        "|---|---|---|---|---|---|",
    ]
    for chip in present:
        whole = wholes[model, chip]
        options, kernels = whole["options"], whole["kernels"]
        ran = [record for (of, where, _), record in programs.items() if (of, where) == (model, chip)]
        sized = [record for record in ran if "temp_bytes" in record]
        temporaries = size(max(record["temp_bytes"] for record in sized)) if sized else ""
        share = f"{max(record['memory_share'] for record in sized):.0%}" if sized else ""
        lines.append(
            f"| {chip} | {size(whole['usable_bytes'])} | {kernels['value']}: {kernels['reason']} | "
            f"{options['num_pages']} x {options['page_size']} | {temporaries} | {share} |"
        )
    return lines


def _overview(
    models: Sequence[str],
    chips: Sequence[str],
    programs: Mapping[tuple, Record],
    wholes: Mapping[tuple, Record],
    cases: Mapping[str, Sequence[str]],
    kernels: Mapping[tuple, Record],
) -> list[str]:
    """Programs that compile, of those of the warm-up; kernel cases that compile or are refused, of all cases."""
    columns = list(dict.fromkeys([*chips, *cases]))
    lines = [f"| compiled and as it should be | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for model in models:
        cells = []
        for chip in columns:
            names = wholes[model, chip]["programs"] if (model, chip) in wholes else []
            ran = [programs[model, chip, name] for name in names if (model, chip, name) in programs]
            good = sum(not failed(record) for record in ran)
            bad = f", {len(ran) - good} not" if len(ran) > good else ""
            cells.append(f"{good} of {len(names)}{bad}" if names else "" if chip not in chips else "not run")
        lines.append(f"| {model} | {' | '.join(cells)} |")
    for kernel in KERNELS:
        cells = []
        for chip in columns:
            mine = [case for case in cases.get(chip, ()) if kernel_of(case) == kernel]
            ran = [kernel_result(kernels[chip, case]) for case in mine if (chip, case) in kernels]
            text = f"{ran.count('compiled')} of {len(mine)}" if mine else ""
            for result in ("refused", "failed", "bulky"):
                text += f", {ran.count(result)} {result}" if result in ran else ""
            cells.append(text)
        lines.append(f"| {kernel} | {' | '.join(cells)} |")
    return lines


def _missing_programs(
    models: Sequence[str],
    chips: Sequence[str],
    programs: Mapping[tuple, Record],
    wholes: Mapping[tuple, Record],
) -> list[str]:
    """A line for each model and set of programs that some chips lack."""
    found: dict[tuple[str, str], list[str]] = {}
    for model in models:
        for chip in chips:
            names = wholes[model, chip]["programs"] if (model, chip) in wholes else None
            lacking = [name for name in names or () if (model, chip, name) not in programs]
            if names is None or lacking:
                what = "any program" if names is None else _list(f"`{name}`" for name in lacking)
                found.setdefault((model, what), []).append(chip)
    return [f"of {model} on {_list(where)}: {what}" for (model, what), where in found.items()]


def _missing_cases(cases: Mapping[str, Sequence[str]], kernels: Mapping[tuple, Record]) -> list[str]:
    """A line for each kernel with cases that did not run."""
    lines = []
    for kernel in KERNELS:
        counts = []
        for chip, names in cases.items():
            mine = [name for name in names if kernel_of(name) == kernel]
            lacking = sum((chip, name) not in kernels for name in mine)
            if lacking:
                counts.append(f"{lacking} of {len(mine)} cases on {chip}")
        if counts:
            lines.append(f"of {kernel}: {_list(counts)}")
    return lines


def _bad_cases(kernels: Mapping[tuple, Record]) -> list[str]:
    """A line for each kernel and reason why cases are not compiled; reasons that differ in numbers are one."""
    found: dict[tuple[str, str, str], tuple[str, list[str], Counter[str]]] = {}
    for (chip, case), record in kernels.items():
        result = kernel_result(record)
        if result != "compiled":
            text = record.get("why") or record.get("reason") or record.get("error")
            reason = _reason(text) if text else _copy(record)
            key = kernel_of(case), result, re.sub(r"[\d.]+", "", reason)
            _, names, counts = found.setdefault(key, (reason, [], Counter()))
            names += [case] if case not in names else []
            counts[chip] += 1
    return [
        f"- {kernel} {result} ({_list(f'{chip}: {n}' for chip, n in counts.items())}; {_list(names[:3])}"
        f"{', ...' if len(names) > 3 else ''}): {reason}"
        for (kernel, result, _), (reason, names, counts) in found.items()
    ]


def _copy(record: Record) -> str:
    """What is wrong with a case that compiled: a pool (of quantized_matmul: a weight) not in place."""
    if record.get("alias_bytes", 0) < record.get("donated_bytes", 0):
        return f"{size(record['alias_bytes'])} of {size(record['donated_bytes'])} donated are in place"
    of = "weight" if kernel_of(record["case"]) == "quantized_matmul" else "pool"
    return f"{size(record['temp_bytes'])} of temporaries beside a {of} of {size(record['pool_bytes'])}"


def _reason(text: str) -> str:
    """The line of a traceback, or of a message, that names the error."""
    lines = text.strip().splitlines()
    return next((line for line in reversed(lines) if "Error: " in line), lines[-1])[:300]


def _kernel_table(cases: Mapping[str, Sequence[str]], kernels: Mapping[tuple, Record]) -> list[str]:
    """Per chip and kernel: compiled, refused, failed, and the most that a case needs."""
    lines = [
        "| target | kernel | compiled | refused | failed | bulky | at most: temporaries, or a GPU's resources |",
        "|---|---|---|---|---|---|---|",
    ]
    for chip, names in cases.items():
        for kernel in KERNELS:
            mine = [
                kernels[chip, name] for name in names if kernel_of(name) == kernel and (chip, name) in kernels
            ]
            if not mine:
                continue
            results = [kernel_result(record) for record in mine]
            counts = " | ".join(
                str(results.count(name)) for name in ("compiled", "refused", "failed", "bulky")
            )
            most_of = [inner for record in mine for inner in record.get("kernels", ())]
            if most_of:  # of a GPU
                spilling = sum(
                    any(inner["spill_bytes"] for inner in record.get("kernels", ())) for record in mine
                )
                need = _resources(most_of) + (f"; cases that spill: {spilling}" if spilling else "")
            elif not {"compiled", "bulky"} & set(results):
                need = ""
            else:
                need = size(max(record.get("temp_bytes", 0) for record in mine))
            lines.append(f"| {chip} | {kernel} | {counts} | {need} |")
    return lines


def _commits(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record["commit"] for record in records))


def _versions(wholes: Iterable[Record]) -> dict[str, str]:
    return {name: number for whole in wholes for name, number in whole["versions"].items()}


def _list(texts: Iterable[str]) -> str:
    return ", ".join(texts)
