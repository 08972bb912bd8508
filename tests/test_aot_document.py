"""scripts/aot_document.py: docs/aot.md says what ran, what did not, and why."""

import csv
from pathlib import Path

from scripts.aot import Done, case_names
from scripts.aot_document import document, kernel_result, program_row, write_programs

GIB = 2**30
NAMES = ["prefill[32,1] greedy", "decode[1,1] greedy"]
ROW = {
    "argument_bytes": 3 * GIB,
    "temp_bytes": GIB,
    "memory_share": 0.25,
    "cache_aliased": True,
    "page_copies": [],
}


def whole(target, error=None, **more):
    options = {"num_pages": 9, "page_size": 128}
    kernels = {"value": "tpu", "reason": "a test"}
    return {"kind": "model", "model": "m", "target": target, "commit": "abc", "error": error, "versions": {"jax": "1"},
            "usable_bytes": 16 * GIB, "options": options, "kernels": kernels, "programs": NAMES} | more  # fmt: skip


def program(target, name, result="compiled", **more):
    row = ROW if result == "compiled" else {}
    return {"kind": "program", "model": "m", "target": target, "commit": "abc", "program": name,
            "result": result, "seconds": 7.0} | row | more  # fmt: skip


def case(name, result="compiled", **more):
    return {"kind": "kernel", "target": "v5e", "commit": "abc", "case": name, "result": result} | more


def text(records, cases=None):
    arguments = {"models": ["m", "n"], "chips": ["v5e", "h200"], "cases": cases or {}, "options": {"a": 1}}
    return document(records, "| layout |", **arguments)


def test_what_did_not_run_is_named_by_model_target_and_program():
    found = text([program("v5e", NAMES[0]), whole("v5e")])
    assert "| m | 1 of 2 | not run |" in found
    assert "- of m on v5e: `decode[1,1] greedy`" in found
    assert "- of m on h200: any program" in found and "- of n on v5e, h200: any program" in found
    everything = [program(t, n) | {"model": m} for t in ("v5e", "h200") for n in NAMES for m in "mn"]
    assert "Everything ran." in text(everything + [whole(t, model=m) for t in ("v5e", "h200") for m in "mn"])


def test_of_two_records_the_last_counts_and_a_failure_is_no_success():
    large = program("v5e", NAMES[0], "too large", needed_bytes=3 * GIB, usable_bytes=GIB)
    found = text([program("v5e", NAMES[0]), large, whole("v5e", "it needs 3 GiB", nearest={})])
    assert "| m | 0 of 2, 1 not | not run |" in found
    assert "- m on v5e: it needs 3 GiB." in found
    assert "| m | 1 of 2 | not run |" in text([large, program("v5e", NAMES[0]), whole("v5e")])
    copied = text([program("v5e", NAMES[0], page_copies=["copy.1"]), whole("v5e")])
    assert "0 of 2, 1 not" in copied


def test_a_sweep_that_was_stopped_goes_on_after_what_is_whole():
    done = Done([program("v5e", NAMES[0]), whole("v5e"), *(program("v6e", name) for name in NAMES)])
    assert not done.programs("m", "v5e", "all")  # one of its two is missing
    assert done.programs("m", "v5e", [NAMES[0]]) and not done.programs("m", "v5e", NAMES)
    assert not done.programs("m", "v6e", "all")  # stopped before its last line
    assert Done([program("v5e", name) for name in NAMES] + [whole("v5e")]).programs("m", "v5e", "all")
    cases = case_names("v5e")
    assert not Done(list(map(case, cases[1:]))).kernels("v5e", "")
    assert Done(list(map(case, cases))).kernels("v5e", "") and not Done([]).kernels("v5e", cases[0])


def test_the_list_of_programs_is_whole(tmp_path):
    """A reason with a line of the compiler in it, and all kinds of rows; of two records the last counts."""
    rejected = program("h200", NAMES[1], "rejected", why="no a|b, no layout")
    kernels = [
        {"registers": 89, "spill_bytes": 0, "smem_bytes": 7},
        {"registers": 10, "spill_bytes": 4, "smem_bytes": 9},
    ]
    gpu = program("h200", NAMES[0], gpu_kernels=kernels)
    large = program("v5e", NAMES[0], "too large", needed_bytes=3 * GIB, usable_bytes=GIB)
    write_programs(tmp_path / "list.csv", [large, program("v5e", NAMES[0]), gpu, rejected, whole("v5e")])
    rows = list(csv.DictReader((tmp_path / "list.csv").open()))
    assert [(row["target"], row["program"]) for row in rows] == [
        ("v5e", NAMES[0]), ("h200", NAMES[0]), ("h200", NAMES[1])
    ]  # fmt: skip
    assert [row["result"] for row in rows] == ["compiled", "compiled", "rejected"]
    assert rows[0]["temporaries"] == "1.00 GiB" and rows[0]["cache"] == "in place"
    costs = [row["cycles, or GPU kernels"] for row in rows[1:]]
    assert costs == ["89 registers, 4 B spilled, 9 B shared", "no a|b, no layout"]
    assert program_row(large)[3] == "too large by 2.00 GiB"
    assert program_row(program("v5e", NAMES[0], page_copies=["copy.1"]))[8] == "in place, 1 copies"


def test_the_summary_and_the_list_in_docs_agree():
    """docs/aot.md counts as many programs as docs/aot_programs.csv lists."""
    docs = Path(__file__).parents[1] / "docs"
    rows = list(csv.DictReader((docs / "aot_programs.csv").open()))
    line = next(x for x in (docs / "aot.md").read_text().splitlines() if x.startswith("| llama3-8b |"))
    counts = [int(cell.split()[0]) for cell in line.split("|")[2:-1] if cell.strip()]
    mine = [row for row in rows if row["model"] == "llama3-8b"]
    assert sum(counts) == sum(row["result"] == "compiled" for row in mine) > 0


def test_kernel_cases_are_counted_by_kernel_with_their_reasons():
    names = ["attention_a", "attention_b", "kv_append_a", "quantized_matmul_a"]
    records = [
        case("attention_a", temp_bytes=3),
        case("attention_b", "refused", why="use implementation 'xla'"),
        case("kv_append_a", temp_bytes=90, pool_bytes=100),
    ]
    found = text(records, {"v5e": names})
    assert "| ragged_paged_attention | 1 of 2, 1 refused |" in found
    assert "| kv_append | 0 of 1, 1 bulky |" in found
    assert "- of quantized_matmul: 1 of 1 cases on v5e" in found
    assert "- ragged_paged_attention refused (v5e: 1; attention_b): use implementation 'xla'" in found
    assert "- kv_append bulky (v5e: 1; kv_append_a): 90 B of temporaries beside a pool of 100 B" in found


def test_reasons_that_differ_in_numbers_are_one_line():
    why = "needs compute capability 9.0, not {}"
    records = [case(f"attention_{n}", "refused", why=why.format(n)) for n in (8.0, 8.9)]
    records.append(case("attention_8.0", "refused", why=why.format(8.0)) | {"target": "l4"})
    found = text(records, {"v5e": [], "l4": []})
    assert (
        "refused (v5e: 2, l4: 1; attention_8.0, attention_8.9): needs compute capability 9.0, not 8.0"
        in found
    )


def test_a_donated_pool_that_is_not_aliased_is_a_failure():
    assert kernel_result(case("kv_append a", donated_bytes=8, alias_bytes=8)) == "compiled"
    assert kernel_result(case("kv_append a", donated_bytes=8, alias_bytes=0)) == "failed"
