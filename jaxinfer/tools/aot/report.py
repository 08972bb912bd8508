"""What the compilers said, for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.text.wording import size


def excess(record: Mapping[str, Any]) -> str:
    """What a program that is too large needs above the memory; compilers round it to 10 MiB."""
    num_bytes = record["needed_bytes"] - record["usable_bytes"]
    return size(num_bytes) if num_bytes >= 10 * 2**20 else "under 10 MiB"


def headline(described: Mapping[str, Any]) -> list[str]:
    """What is compiled, for which device, by which compiler."""
    options, versions = described["options"], described["versions"]
    return [
        f"{described['device_kind']}: {size(described['usable_bytes'])} usable ({described['usable_from']})",
        f"{size(described['weights_bytes'])} of weights, {size(described['pool_bytes'])} of pages "
        f"({options['num_pages']} x {options['page_size']} tokens of {options['dtype']})",
        *(
            f"{name}: {choice['value']}, since {choice['reason']}"
            for name, choice in described["choices"].items()
        ),
        ", ".join(f"{name} {number}" for name, number in versions.items()),
    ]


def program_lines(record: Mapping[str, Any]) -> list[str]:
    """One program: what came of it, and what it needs."""
    result = record["result"]
    seconds = f" in {record['seconds']:.1f} s" if "seconds" in record else ""
    lines = [f"{record['program']}: {result}{seconds}"]
    if result == "too large":
        lines.append(
            f"  needs {size(record['needed_bytes'])} of {size(record['usable_bytes'])}: {excess(record)} too much"
        )
    elif "why" in record:
        lines.append(f"  {record['why']}")
    if "argument_bytes" in record:
        lines += [f"  {memory_line(record)}", f"  {', '.join(findings(record))}"]
    if "saved_bytes" in record:
        lines.append(f"  {saved_line(record)}")
    if "not_saved" in record:
        lines.append(f"  {record['not_saved']}")
    return lines


def saved_line(record: Mapping[str, Any]) -> str:
    """How a program was saved, and its bytes."""
    kept = size(record["saved_bytes"])
    if "cached_since" not in record:
        return f"saved, {kept}"
    return (
        f"no executable is saved ({record['cached_since']}); the persistent cache in the folder is warmed, {kept}: an "
        "engine compiles through it"
    )


def memory_line(record: Mapping[str, Any]) -> str:
    parts = (f"{name} {size(record[f'{name}_bytes'])}" for name in ("argument", "temp", "alias", "output"))
    return f"{', '.join(parts)}; {record['memory_share']:.1%} of the memory"


def findings(record: Mapping[str, Any]) -> list[str]:
    """What was read in the compiled text."""
    copies = len(record["page_copies"])
    found = [
        "cache aliased" if record["cache_aliased"] else "cache NOT ALIASED",
        f"{copies} COPIES OF PAGES" if copies else "no copy of pages",
        "collectives " + (", ".join(f"{n} x{c}" for n, c in record["collectives"].items()) or "none"),
    ]
    if copied := record.get("code_copies"):
        found.append(f"{len(copied)} COPIES OF CODES of quantized matrices")
    if calls := record.get("kernel_calls"):
        found.append("calls of kernels: " + ", ".join(f"{name} x{count}" for name, count in calls.items()))
    if moves := record.get("page_moves"):
        found.append(f"arrays of pages moved to another memory and back: {len(moves)}")
    if cycles := record.get("cycles"):
        found.append(f"{cycles['estimated']:,} cycles estimated")
        if cycles["without"]:
            found.append(f"{cycles['without']} instructions without an estimate")
        if cycles["kernel_flops"] or cycles["kernel_bytes"]:
            found.append(
                f"kernels beside them {cycles['kernel_flops'] / 1e9:.2f} GFLOP, {size(cycles['kernel_bytes'])}"
            )
        if cycles["loops_without"]:
            found.append(f"{cycles['loops_without']} loops of unknown length counted once")
        if cycles["kernels_without"]:
            found.append(f"{cycles['kernels_without']} kernels without a CostEstimate")
    if kernels := record.get("gpu_kernels"):
        found.append(
            f"{len(kernels)} kernels: {most(kernels, 'registers')} registers, {most(kernels, 'spill_bytes')} "
            f"bytes spilled, {most(kernels, 'smem_bytes')} bytes shared at most"
        )
    return found


def most(kernels: Sequence[Mapping[str, Any]], key: str) -> str:
    """The largest `key` of GPU kernels, as text; "unknown" where no dump had it."""
    known = [kernel[key] for kernel in kernels if kernel[key] is not None]
    return str(max(known)) if known else "unknown"


def failed(record: Mapping[str, Any]) -> bool:
    """Whether a program is not as it should be: not compiled, cache not in place, pages copied, or not saved."""
    if record["result"] != "compiled" or "not_saved" in record:
        return True
    return not record["cache_aliased"] or bool(record["page_copies"])


def nearest_line(options: Mapping[str, Any] | None) -> str:
    """The largest setting that fits, as options of a command line."""
    if options is None:
        return (
            "nothing fits, not even steps of 32 tokens over one page: take a chip with more memory, or a smaller "
            "model (sharding is not built yet)"
        )
    given = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in options.items())
    return f"the largest that fits: {given}"
