"""Compiles the GPU kernels with the real CUDA compiler for a GPU that is not attached: a JSON line per case.

    python scripts/aot_kernels_gpu.py --python VENV/bin/python --target TARGET.txtpb [--only SUBSTRING]

VENV has the same jax as this one plus `jax[cuda13]` (the plugin, pjrt and the nvidia-* wheels); TARGET is a
GpuTargetConfig in text form with the chip's published limits. Proves that each program is accepted and what it
needs (bytes, registers, spills, shared memory); proves nothing about values or speed. Each case compiles in a
child process of its own, since an installed plugin changes a plain start and a compiler that aborts must not
end the others.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASE_TIMEOUT = 180  # seconds


def cases(capability: tuple[int, int]) -> dict:
    """Name -> thunk that returns (function to compile, its ShapeDtypeStructs, indices of the donated)."""
    import functools

    import jax
    import jax.numpy as jnp

    from pallas_kernels.kv_append import gpu as kv_append
    from pallas_kernels.ragged_paged_attention import gpu as attention

    def append(heads, head_dim, page_size, kv_dtype, num_tokens=256, num_pages=4096):
        struct = jax.ShapeDtypeStruct
        quantized = kv_dtype in ("int8", "float8_e4m3fn", "int4")
        kv = struct((num_tokens, heads, head_dim), jnp.bfloat16)
        arrays = (
            kv,
            kv,
            struct((num_pages, heads, page_size, 2 * head_dim), jnp.dtype(kv_dtype)),
            struct((num_pages, heads, 2, page_size), jnp.float32) if quantized else None,
            struct((num_tokens,), jnp.int32),
        )
        function = functools.partial(kv_append.kv_append, compute_capability=capability)
        return function, arrays, (2, 3) if quantized else (2,)

    def attend(
        heads,
        head_dim,
        page_size,
        rows,
        max_len,
        kv_dtype="bfloat16",
        num_tokens=None,
        max_q_len=1,
        **options,
    ):
        struct, (num_q_heads, num_kv_heads), num_pages = jax.ShapeDtypeStruct, heads, 4096
        quantized = kv_dtype in ("int8", "float8_e4m3fn", "int4")
        arrays = (
            struct((num_tokens or rows, num_q_heads, head_dim), jnp.bfloat16),
            struct((num_pages, num_kv_heads, page_size, 2 * head_dim), jnp.dtype(kv_dtype)),
            struct((num_pages, num_kv_heads, 2, page_size), jnp.float32) if quantized else None,
            struct((rows, max_len // page_size), jnp.int32),
            struct((rows,), jnp.int32),
            struct((rows + 1,), jnp.int32),
            struct((3,), jnp.int32),
        )
        function = functools.partial(
            attention.ragged_paged_attention,
            sm_scale=head_dim**-0.5,
            max_q_len=max_q_len,
            compute_capability=capability,
            **options,
        )
        return function, arrays, ()

    return {
        "decode smollm2 page16": lambda: attend((9, 3), 64, 16, 64, 2048),
        "decode llama3_8b page16 batch 1": lambda: attend((32, 8), 128, 16, 1, 8192),
        "decode llama3_8b page16 batch 64": lambda: attend((32, 8), 128, 16, 64, 8192),
        "decode llama3_8b page128 batch 256": lambda: attend((32, 8), 128, 128, 256, 8192),
        "decode llama3_70b_shard page64": lambda: attend((8, 1), 128, 64, 64, 8192),
        "decode qwen3 page16": lambda: attend((16, 8), 128, 16, 64, 8192),
        "decode gemma3 page16 window": lambda: attend((4, 1), 256, 16, 64, 8192, sliding_window=512),
        "decode phi2 h80 page16": lambda: attend((32, 32), 80, 16, 64, 2048),
        "decode phi3 h96 page16": lambda: attend((32, 32), 96, 16, 64, 4096),
        "decode llama3_8b page256 soft_cap lse": lambda: attend(
            (32, 8), 128, 256, 16, 8192, soft_cap=30.0, return_lse=True
        ),
        "drafts llama3_8b page16 q16": lambda: attend(
            (32, 8), 128, 16, 16, 8192, num_tokens=256, max_q_len=16
        ),
        "prefill llama3_8b page16": lambda: attend(
            (32, 8), 128, 16, 16, 8192, num_tokens=2048, max_q_len=2048
        ),
        "prefill llama3_8b page128 window cap lse": lambda: attend(
            (32, 8),
            128,
            128,
            16,
            8192,
            num_tokens=2048,
            max_q_len=2048,
            sliding_window=1024,
            soft_cap=30.0,
            return_lse=True,
        ),
        "prefill smollm2 page16": lambda: attend((9, 3), 64, 16, 16, 2048, num_tokens=512, max_q_len=512),
        "prefill gemma3 page16 window": lambda: attend(
            (4, 1), 256, 16, 16, 8192, num_tokens=2048, max_q_len=2048, sliding_window=512
        ),
        "prefill phi2 h80 page16": lambda: attend((32, 32), 80, 16, 16, 2048, num_tokens=512, max_q_len=512),
        "prefill phi3 h96 page16": lambda: attend((32, 32), 96, 16, 16, 2048, num_tokens=512, max_q_len=512),
        "kv_append smollm2 bf16 page16": lambda: append(3, 64, 16, "bfloat16"),
        "kv_append llama3_8b bf16 page16": lambda: append(8, 128, 16, "bfloat16"),
        "kv_append llama3_8b bf16 page16 one token": lambda: append(8, 128, 16, "bfloat16", num_tokens=1),
        "kv_append llama3_70b_shard bf16 page128": lambda: append(1, 128, 128, "bfloat16"),
        "kv_append gemma3 bf16 page16": lambda: append(1, 256, 16, "bfloat16"),
        "kv_append phi2 h80 bf16 page16": lambda: append(8, 80, 16, "bfloat16"),
        "kv_append llama3_8b int8 page128": lambda: append(8, 128, 128, "int8"),
        "kv_append smollm2 int8 page32": lambda: append(3, 64, 32, "int8"),
        "kv_append llama3_8b fp8 page128": lambda: append(8, 128, 128, "float8_e4m3fn"),
        "kv_append llama3_8b int4 page128": lambda: append(8, 128, 128, "int4"),
    }


def compile_case(name: str, target: str) -> dict:
    """Compiles one case in this process: the child's part."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=target
    )
    mesh = Mesh(np.array(topology.devices)[:1], "x")
    sharding = NamedSharding(mesh, PartitionSpec())
    start = time.perf_counter()
    try:
        function, arrays, donated = cases(capability_of(target))[name]()
        arrays = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arrays)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = jax.jit(function, donate_argnums=donated).lower(*arrays).compile()
    except NotImplementedError as error:
        if "use implementation=" not in str(error):
            raise  # the compiler's, not a refusal of ours
        return {"result": "refused", "reason": str(error)}
    memory = compiled.memory_analysis()
    donated_bytes = sum(arrays[i].size * arrays[i].dtype.itemsize for i in donated)
    return {
        "result": "compiled",
        "seconds": round(time.perf_counter() - start, 2),
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "donated_bytes": donated_bytes,
    }


def capability_of(target: str) -> tuple[int, int]:
    """(major, minor) of a GpuTargetConfig text; the text format leaves out a minor version of 0."""
    block = re.search(r"cuda_compute_capability\s*\{([^}]*)\}", target)
    if block is None:
        raise ValueError("the target has no cuda_compute_capability { ... }")
    major, minor = (re.search(rf"{part}:\s*(\d+)", block[1]) for part in ("major", "minor"))
    return int(major[1]), int(minor[1]) if minor else 0


def kernel_resources(dump: Path) -> list[dict]:
    """Registers, spills and shared memory of each kernel in Mosaic GPU's dump of ptxas."""
    kernels = []
    for log in sorted(dump.glob("*.ptxas")):
        text = log.read_text(errors="replace")
        spills = re.search(r"(\d+) bytes spill stores", text)
        registers = re.search(r"Used (\d+) registers", text)
        resources = log.with_suffix(".resources.txt")
        smem = re.search(r"smem_scratch_bytes=(\d+)", resources.read_text()) if resources.exists() else None
        kernels.append(
            {
                "kernel": log.stem,
                "target": re.search(r"for '(sm_\w+)'", text)[1],
                "registers": int(registers[1]) if registers else None,
                "spill_bytes": int(spills[1]) if spills else None,
                "smem_bytes": int(smem[1]) if smem else None,
            }
        )
    return kernels


def run_child(python: str, name: str, target_path: Path) -> dict:
    with tempfile.TemporaryDirectory() as dump:
        environment = os.environ | {
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "MOSAIC_GPU_DUMP_TO": dump,
            "MOSAIC_GPU_DUMP_PTXAS": "1",
        }
        command = [python, __file__, "--child", name, "--target", str(target_path)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=CASE_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return {"result": "failed", "error": f"the compiler did not end in {CASE_TIMEOUT} s"}
        if done.returncode:
            return {"result": "failed", "error": done.stderr.strip()[-1500:]}
        return json.loads(done.stdout.splitlines()[-1]) | {"kernels": kernel_resources(Path(dump))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", default=sys.executable, help="python of the environment with the CUDA plugin"
    )
    parser.add_argument("--target", type=Path, required=True, help="GpuTargetConfig text")
    parser.add_argument("--only", default="", help="compile the cases whose name contains this")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    target = arguments.target.read_text()
    if arguments.child:
        print(json.dumps(compile_case(arguments.child, target)))
        return
    failed = False
    for name in cases(capability_of(target)):
        if arguments.only in name:
            outcome = run_child(arguments.python, name, arguments.target)
            failed |= outcome["result"] == "failed"
            print(json.dumps({"case": name, "target": arguments.target.stem} | outcome), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
