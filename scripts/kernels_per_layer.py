"""Counts the kernels that one layer is compiled to, for a chip that is not attached: what fuses, and what does not.

    .venv-aot/bin/python scripts/kernels_per_layer.py --target v6e [--model llama3-8b] [--rows 64]

Needs the extra aot-tpu or aot-gpu. Compiles the greedy decode program of one step and the prefill program of the
model with two layers and with three (minutes on two cores); the difference is one layer. Prints a line per kernel of a
layer: how often, its opcode, and the last operation that was fused into it. Products, attention and the cache's writer
must be kernels; what stands beside them is what RMSNorm, RoPE, SwiGLU and the residuals cost in launches.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from aot import MODELS

from jaxinfer.tools.aot import hlo, targets

CHILD = "JAXINFER_KERNELS_PER_LAYER_CHILD"
DEPTHS = (2, 3)
# What launches nothing: names and views of arrays, and the second half of what runs beside the kernels.
NO_KERNELS = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id")
BESIDE = ("copy-start", "copy-done", "slice-start", "slice-done", "async-start", "async-done")
PRODUCTS = ("dot", "convolution")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


def kernels(program: hlo.Program, computation: str) -> Counter[tuple[str, str]]:
    """(opcode, last operation in it) -> how often it stands in a computation, those that it calls included."""
    found: Counter[tuple[str, str]] = Counter()
    for instruction in program.computations[computation]:
        called = re.findall(r"(?:to_apply|body|called_computations=\{)=?%?([\w.\-]+)", instruction.text)
        if instruction.opcode in ("call", "while"):
            for name in called:
                found += kernels(program, name)
        elif instruction.opcode not in NO_KERNELS:
            op_name, target = _OP_NAME.search(instruction.text), _TARGET.search(instruction.text)
            opcode = f"{instruction.opcode} {target[1]}" if target else instruction.opcode
            fused = _CALLS.search(instruction.text)
            if fused and any(i.opcode in PRODUCTS for i in program.computations[fused[1]]):
                opcode += " with a product"
            found[opcode, "/".join(op_name[1].split("/")[-2:]) if op_name else ""] += 1
    return found


def compile_texts(model: str, target_name: str, kind: str, rows: int) -> tuple[str, dict[int, str]]:
    """The program's name, and its compiled text by depth. The child's part."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxinfer.tools.aot import gpu_targets
    from jaxinfer.tools.aot.build import AbsentDevice, build
    from jaxinfer.tools.aot.child import Gpu

    target, capability = targets.find(target_name), ""
    if target.platform == "tpu":
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{target.name}:{target.topology}"
        )
    else:
        facts = gpu_targets.TARGETS[target.name]
        capability = "{}.{}".format(*facts.compute_capability)
        described = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.topology,
            topology=target.topology,
            target_config=gpu_targets.config_text(facts),
        )
    mesh = Mesh(np.array(described.devices[:1]), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    abstract = mesh.abstract_mesh
    if capability:
        named = abstract.abstract_device
        gpu = Gpu(named.device_kind, named.num_cores, named.platform, capability)
        abstract = abstract.update(abstract_device=gpu)
    device = AbsentDevice(target.platform, described.devices[0].device_kind, 64 << 30, capability)

    options = {"max_num_seqs": rows, "max_num_batched_tokens": 512, "max_model_len": 2048, "decode_steps": 1}
    texts: dict[int, str] = {}
    for depth in DEPTHS:
        with tempfile.TemporaryDirectory() as folder:
            config = MODELS[model] | {"num_hidden_layers": depth}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            made = build(folder, options, device)
        program = max(
            (p for p in made.programs().values() if p.kind == kind and p.variant == "greedy"),
            key=lambda p: (p.num_tokens, p.num_rows),
        )
        with jax.sharding.use_abstract_mesh(abstract):
            compiled: Any = made.compiler().get(program, made.arguments(program, sharding))
        texts[depth] = compiled.as_text()
    return str(program), texts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=targets.TARGETS, required=True)
    parser.add_argument("--model", choices=MODELS, default="llama3-8b")
    parser.add_argument("--programs", default="decode,prefill")
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()
    platform = targets.find(args.target).platform
    if CHILD not in os.environ:
        environment = os.environ | targets.ENVIRONMENTS[platform] | {CHILD: "1"}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    for kind in args.programs.split(","):
        name, texts = compile_texts(args.model, args.target, kind, args.rows)
        programs = {depth: hlo.parse(text) for depth, text in texts.items()}
        less, more = (kernels(programs[depth], programs[depth].entry) for depth in DEPTHS)
        layer = more - less
        beside = sum(count for (opcode, _), count in layer.items() if opcode in BESIDE)
        title = f"{args.target} {args.model} {name}"
        print(f"{title}: {layer.total() - beside} kernels a layer, {beside} copies beside them")
        for (opcode, operation), count in sorted(layer.items()):
            print(f"  {count} {opcode:45s} {operation}", flush=True)


if __name__ == "__main__":
    main()
