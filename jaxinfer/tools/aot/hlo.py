"""What stands in the text of a compiled program: copies of pages, collectives, estimated cycles."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

PLACEHOLDER = 2**62  # XLA:TPU writes 2^63 - 1 where it has no estimate
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
)
COPIES = ("copy", "copy-start", "transpose")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|[\])}] )([a-z][\w\-]*)\(")
_LAYOUT = re.compile(r"\]\{([^}]*)\}")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)"?')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?\}')
_CALLED = re.compile(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"constant\((\d+)\)")
_KERNEL_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
# A Pallas call by the name of its kernel, as a TPU and a GPU have it.
_PALLAS = re.compile(
    r'custom_call_target="(?:tpu_custom_call|mosaic_gpu\w*)".*op_name="(?:[^"]*/)?(\w+)/(?:pallas_call|mpmd_map)"'
)
_COST = re.compile(r'"cost_estimate":(\{[^}]*\})')


@dataclass
class Instruction:
    name: str
    opcode: str
    shapes: list[str]  # of its result, such as "bf16[513,8,128,256]"
    text: str


@dataclass
class Program:
    """A parsed module: instructions by computation. Layouts and operands stay in the text."""

    entry: str = ""
    computations: dict[str, list[Instruction]] = field(default_factory=dict)

    def instructions(self) -> Iterator[Instruction]:
        for instructions in self.computations.values():
            yield from instructions


@dataclass(frozen=True)
class Cycles:
    """Estimates of the TPU compiler for one run of a program; loops count as often as they run.

    Of branches all are counted. A loop whose end depends on data counts once, and in `loops_without`.
    """

    estimated: int  # sum of what it estimates
    without: int  # instructions for which it has a placeholder only
    kernel_flops: int  # of Pallas calls, by their own CostEstimate
    kernel_bytes: int
    kernels_without: int  # Pallas calls that give no CostEstimate
    loops_without: int  # loops of which nobody knows how often they run


def parse(text: str) -> Program:
    """Instructions of every computation of an HLO module in text form."""
    program, current = Program(), ""
    for line in text.splitlines():
        if line.endswith("{") and (match := _COMPUTATION.match(line)):
            current = match[2]
            program.computations[current] = []
            if match[1]:
                program.entry = current
        elif current and (match := _INSTRUCTION.match(line)):
            opcode = _OPCODE.search(match[2])
            if opcode is None:
                continue
            shapes = [f"{dtype}[{dims}]" for dtype, dims in _SHAPE.findall(match[2][: opcode.start(1)])]
            program.computations[current].append(Instruction(match[1], opcode[1], shapes, match[2]))
    return program


def copies(program: Program, shape: str) -> list[str]:
    """Names of instructions that copy or transpose a whole array of `shape`, such as "bf16[513,8,128,256]"."""
    return [i.name for i in _copies(program, shape) if not _changes_memory(i)]


def moves(program: Program, shape: str) -> list[str]:
    """Likewise of those that take it from one memory to another: what fits is prefetched into VMEM."""
    return [i.name for i in _copies(program, shape) if _changes_memory(i)]


def _copies(program: Program, shape: str) -> list[Instruction]:
    return [i for i in program.instructions() if i.opcode in COPIES and shape in i.shapes]


def _changes_memory(instruction: Instruction) -> bool:
    result = instruction.text.split(" copy-start(")[0]
    spaces = _LAYOUT.findall(
        result
    )  # of source and destination; the context beside them has no layout of its own
    return instruction.opcode == "copy-start" and ("S(" in spaces[0]) != ("S(" in spaces[1])


def collectives(program: Program) -> dict[str, int]:
    """Opcode -> number of instructions, in any computation; an asynchronous pair counts once."""
    found: Counter[str] = Counter()
    for instruction in program.instructions():
        name = instruction.opcode.removesuffix("-start")
        if name in COLLECTIVES:
            found[name] += 1
    return dict(found)


def kernel_calls(program: Program) -> dict[str, int]:
    """Name of each Pallas kernel -> number of calls of it, in any computation."""
    calls = (_PALLAS.search(i.text) for i in program.instructions() if i.opcode == "custom-call")
    return dict(sorted(Counter(call[1] for call in calls if call).items()))


def gpu_kernels(program: Program) -> dict[str, str]:
    """Hash of each Mosaic GPU kernel (its whole call where that has none) -> the text of its first call."""
    found: dict[str, str] = {}
    for instruction in program.instructions():
        if instruction.opcode == "custom-call" and 'custom_call_target="mosaic_gpu' in instruction.text:
            hashed = _KERNEL_HASH.search(instruction.text)
            found.setdefault(hashed[1] if hashed else instruction.text, instruction.text)
    return found


def cycles(program: Program) -> Cycles:
    """Sums over the entry computation and what it runs."""
    totals: Counter[str] = Counter()
    _add(program, program.entry, 1, totals)
    return Cycles(**{name: totals[name] for name in Cycles.__dataclass_fields__})


def _add(program: Program, computation: str, times: int, totals: Counter[str]) -> None:
    for instruction in program.computations.get(computation, []):
        text = instruction.text
        if instruction.opcode == "custom-call" and "tpu_custom_call" in text:
            cost = _COST.search(text)
            if cost is None:
                totals["kernels_without"] += times
                continue
            estimate = json.loads(cost[1])
            totals["kernel_flops"] += times * int(estimate.get("flops", 0))
            totals["kernel_bytes"] += times * int(estimate.get("bytes_accessed", 0))
            continue
        if instruction.opcode in ("while", "call", "conditional"):
            trips = _trips(program, text) if instruction.opcode == "while" else 1
            totals["loops_without"] += trips is None
            branches = [name.strip(" %") for names in _BRANCHES.findall(text) for name in names.split(",")]
            for called in _CALLED.findall(text) + branches:
                _add(program, called, times * (trips or 1), totals)
            continue
        found = _CYCLES.search(text)
        if found and int(found[1]) < PLACEHOLDER:
            totals["estimated"] += times * int(found[1])
        elif found:
            totals["without"] += times


def _trips(program: Program, text: str) -> int | None:
    """How often a loop runs: as the compiler says, or as its condition says, `counter < constant`."""
    if known := _TRIPS.search(text):
        return int(known[1])
    condition = _CONDITION.search(text)
    instructions = program.computations.get(condition[1], []) if condition else []
    constants = [
        found[1] for i in instructions if i.opcode == "constant" and (found := _CONSTANT.search(i.text))
    ]
    compares = [i for i in instructions if i.opcode == "compare" and "direction=LT" in i.text]
    if len(constants) == 1 and len(compares) == 1 and instructions[-1] is compares[0]:
        return int(constants[0])
    return None
