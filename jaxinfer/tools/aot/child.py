"""The compiler's process: requests as JSON lines on standard input, one JSON line of answer to each.

    {"do": "describe", "model": ..., "options": {...}}                  what would be compiled, for which device
    {"do": "compile",  ..., "program": "decode[8,8] greedy"}            the record of one program
    {"do": "compile",  ..., "program": ..., "save": FOLDER}             and its executable into a folder

    python -m jaxinfer.tools.aot.child TARGET TOPOLOGY

Runs with the environment of `targets.ENVIRONMENTS`; `compiler.Compiler` is the other end. Whatever a compiler
writes to standard output goes to standard error.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxinfer.options.device_facts import DeviceFacts, facts_of
from jaxinfer.options.resolve import Resolved
from jaxinfer.programs import compile_cache, saved_programs
from jaxinfer.text.wording import first_line
from jaxinfer.tools.aot import gpu_targets, hlo, targets
from jaxinfer.tools.aot.build import build
from jaxinfer.tools.aot.gpu_resources import kernel_resources
from jaxinfer.tools.planner import hardware
from jaxinfer.weights import weight_forms

TEBIBYTE = 1 << 40
# The share of a GPU that JAX takes at start unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
GPU_SHARE = 0.75
_HBM = re.compile(  # the two sentences of the TPU compiler: bytes needed, bytes there are
    r"(?:Used |\()([\d.]+)([KMGT]?)(?: of |\) exceeds available HBM \()([\d.]+)([KMGT]?)(?: hbm|\))"
)
UNREADABLE = {"kernel": None, "target": None, "registers": None, "spill_bytes": None, "smem_bytes": None}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


# A program that is to be saved: its identity, the compiled form, and a function that compiles it anew.
Job = tuple[str, Any, Callable[[], Any]]


@dataclass(frozen=True)
class Gpu(jax.sharding.AbstractDevice):
    """Mosaic GPU takes a device that names no compute capability for a 9.0."""

    compute_capability: str


class Child:
    """One target; keeps the builds it has made."""

    def __init__(self, target_name: str, topology: str) -> None:
        self.target = targets.find(target_name)
        self._builds: dict[str, Resolved] = {}
        self._with_helpers: list[Resolved] = []
        self._kernels: dict[str, dict[str, Any]] = {}  # GPU kernels by hash
        self._sharding: Sharding | None = None
        self._mesh: Mesh | None = None
        if self.target.platform == "cpu":
            self.device = facts_of(jax.devices()[0])
            self.usable_from = "memory that is free here"
        else:
            devices = self._topology(topology).devices
            self._mesh = Mesh(np.array(devices[:1]), ("device",))
            self._sharding = NamedSharding(self._mesh, PartitionSpec())
            usable, self.usable_from = self._usable()
            gpu = gpu_targets.TARGETS.get(target_name)
            capability = (0, 0) if gpu is None else gpu.compute_capability
            self.device = DeviceFacts(self.target.platform, devices[0].device_kind, usable, 0, capability)
        self.usable = self.device.memory_bytes
        self._program_facts = saved_programs.facts(self.target.platform, self.device.device_kind)

    def _topology(self, topology: str) -> Any:
        name = self.target.name
        if self.target.platform == "tpu":
            try:
                return topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{topology}")
            except (ValueError, RuntimeError) as error:
                raise ValueError(
                    f"topology={topology!r} is none that {name} has, the TPU compiler says: {first_line(error, 600)}"
                ) from None
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name=topology,
            topology=topology,
            target_config=gpu_targets.config_text(gpu_targets.TARGETS[name]),
        )

    def _usable(self) -> tuple[int, str]:
        """Bytes of the device that programs can have, and who says so."""
        facts = hardware.load(self.target.name)
        if self.target.platform == "gpu":
            return round(GPU_SHARE * facts.memory_bytes), (
                f"{GPU_SHARE:.0%} of {facts.title}'s memory, what JAX takes unless "
                "XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
            )
        # The TPU compiler knows what it may use, and says it when a program asks for more.
        shape = jax.ShapeDtypeStruct((TEBIBYTE,), np.uint8, sharding=self._sharding)
        try:
            jax.jit(lambda x: x + np.uint8(1)).lower(shape).compile()
        except Exception as error:
            if found := _HBM.search(str(error)):
                return round(float(found[3]) * _UNITS[found[4]]), "what the TPU compiler may use"
            raise
        raise RuntimeError(f"the TPU compiler took a program of 1 TiB for {self.target.name}")

    def _build(self, request: dict[str, Any]) -> Resolved:
        key = json.dumps([request["model"], request["options"]], sort_keys=True)
        if key not in self._builds:
            self._builds[key] = build(request["model"], request["options"], self.device)
        return self._builds[key]

    def describe(self, request: dict[str, Any]) -> dict[str, Any]:
        found = self._build(request)
        return {
            "target": self.target.name,
            "device_kind": self.device.device_kind,
            "usable_bytes": self.usable,
            "usable_from": self.usable_from,
            "versions": targets.versions(self.target.platform),
            "weights_bytes": weight_forms.num_bytes(found.weights()),
            "pool_bytes": found.spec.total_bytes,
            "bytes_per_page": found.spec.bytes_per_page,
            "choices": {name: asdict(choice) for name, choice in found.choices.items()},
            "options": found.llm_options(),
            "plan_problem": found.plan_problem,
            "programs": [
                {
                    "name": name,
                    "kind": program.kind,
                    "variant": program.variant,
                    "num_tokens": program.num_tokens,
                    "num_rows": program.num_rows,
                    "num_steps": program.num_steps,
                }
                for name, program in found.programs().items()
            ],
        }

    def compile(self, request: dict[str, Any]) -> dict[str, Any]:
        """ "compiled", "too large" for the device, "refused" by our own check, or "rejected" by the compiler."""
        found = self._build(request)
        program = found.programs()[request["program"]]
        record: dict[str, Any] = {"program": request["program"], "usable_bytes": self.usable}
        start = time.perf_counter()
        compiler = found.compiler(sharding=self._sharding)
        try:
            with self._for_target():
                compiled: Any = compiler.get(program)
        except NotImplementedError as error:
            result = "refused" if "implementation" in str(error) else "rejected"
            return record | {"result": result, "why": first_line(error, 600)}
        except Exception as error:  # whatever the compiler says is this program's result
            return record | {"seconds": time.perf_counter() - start} | _failure(error)
        record |= {"result": "compiled", "seconds": time.perf_counter() - start}
        record |= self._facts(found, compiled)
        if record["total_bytes"] > self.usable:  # only the TPU compiler looks at the memory itself
            record |= {"result": "too large", "needed_bytes": record["total_bytes"]}
        if request.get("save"):
            identity = compiler.identity(program)
            again = partial(found.compiler(sharding=self._sharding).get, program)
            jobs: dict[str, Job] = {str(program): (identity, compiled, again)}
            with self._for_target():
                jobs |= self._helpers(found)
                record |= self._save(Path(request["save"]), request["model"], found, jobs)
        return record

    def _save(self, path: Path, model: str, found: Resolved, jobs: dict[str, Job]) -> dict[str, Any]:
        """Part of a record: bytes kept, and by which way; or why nothing is."""
        folder = saved_programs.Folder(path, self._program_facts, model, found.llm_options())
        folder.check()
        said: dict[str, Any] = {"saved_bytes": 0}
        for name, (identity, compiled, again) in jobs.items():
            try:
                try:
                    data = saved_programs.serialize(compiled.runtime_executable())
                except saved_programs.Unserializable as error:
                    said["cached_since"] = str(error)
                    said["saved_bytes"] += folder.add_cached(name, identity, again, str(error))
                else:
                    arguments = saved_programs.used_arguments(compiled)
                    said["saved_bytes"] += folder.add(name, identity, data, arguments)
            except saved_programs.Unserializable as error:
                return {"not_saved": f"{name} cannot be saved: {error}"}
        return said

    def _helpers(self, found: Resolved) -> dict[str, Job]:
        """Of the functions that run between steps; once for each build."""
        if found in self._with_helpers:
            return {}
        self._with_helpers.append(found)
        compiler, anew = (found.compiler(sharding=self._sharding) for _ in range(2))
        jobs: dict[str, Job] = {}
        for function in compiler.shapes.of_helpers():
            identity, again = compiler.helper_identity(function), partial(anew.helper, function)
            jobs[function.__name__] = identity, compiler.helper(function), again
        return jobs

    def _for_target(self) -> contextlib.AbstractContextManager[Any]:
        if self._mesh is None:
            return contextlib.nullcontext()
        mesh = self._mesh.abstract_mesh
        if self.device.platform == "gpu":
            named = mesh.abstract_device
            capability = "{}.{}".format(*self.device.compute_capability)
            device = Gpu(named.device_kind, named.num_cores, named.platform, capability)
            mesh = mesh.update(abstract_device=device)
        return jax.sharding.use_abstract_mesh(mesh)

    def _facts(self, found: Resolved, compiled: Any) -> dict[str, Any]:
        memory = compiled.memory_analysis()
        text = hlo.parse(compiled.as_text())
        total = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
        facts = {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "alias_bytes": memory.alias_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "total_bytes": total,
            "memory_share": total / self.usable,
            "cache_aliased": memory.alias_size_in_bytes >= found.spec.total_bytes,
            "page_copies": hlo.copies(text, _page_shape(found)),
            "page_moves": hlo.moves(text, _page_shape(found)),
            "collectives": hlo.collectives(text),
            "kernel_calls": hlo.kernel_calls(text),
            "code_copies": [name for shape in _code_shapes(found) for name in hlo.copies(text, shape)],
        }
        if self.target.platform == "tpu":
            facts["cycles"] = asdict(hlo.cycles(text))
        if self.target.platform == "gpu" and (dump := os.environ.get("MOSAIC_GPU_DUMP_TO")):
            facts["gpu_kernels"] = self._gpu_kernels(hlo.gpu_kernels(text), Path(dump))
        return facts

    def _gpu_kernels(self, calls: dict[str, str], dump: Path) -> list[dict[str, Any]]:
        """What each kernel of a program needs. A process compiles and dumps a kernel once, so answers are kept."""
        dumped = kernel_resources(dump)
        for file in dump.iterdir():
            file.unlink()
        for identity, text in calls.items():
            if identity not in self._kernels:
                # A dump has the kernel's name and a number; the call has the name too.
                mine = [found for found in dumped if found["kernel"].rpartition("_")[0] in text]
                if mine:
                    self._kernels[identity] = max(mine, key=lambda found: len(found["kernel"]))
                    dumped.remove(self._kernels[identity])
        return [self._kernels.get(identity, UNREADABLE) for identity in calls]


HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def _page_shape(found: Resolved) -> str:
    spec = found.spec
    return f"{HLO_DTYPES[spec.dtype]}[{','.join(map(str, spec.page_shape))}]"


def _code_shapes(found: Resolved) -> list[str]:
    """Of the codes of quantized matrices, each shape once."""
    leaves = [x for x in jax.tree.leaves(found.weights()) if x.dtype == np.int8]
    return sorted({f"s8[{','.join(map(str, leaf.shape))}]" for leaf in leaves})


def _failure(error: Exception) -> dict[str, Any]:
    text = str(error)
    if found := _HBM.search(text):
        needed, limit = (round(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
        return {
            "result": "too large",
            "needed_bytes": needed,
            "usable_bytes": limit,
            "why": first_line(error, 600),
        }
    return {"result": "rejected", "why": first_line(error, 600)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    child: Child | None = None
    compile_cache.enable(None)  # one in the user's environment would hide seconds and registers
    for line in sys.stdin:
        try:
            request = json.loads(line)
            child = child or Child(*sys.argv[1:3])
            answer = getattr(child, request.pop("do"))(request)
        except (ValueError, TypeError, OSError, RuntimeError, NotImplementedError) as error:
            answer = {"error": first_line(error, 600)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
