"""Compiles the GPU kernels with the real CUDA compiler for a GPU that is not attached: a JSON line per case.

    python scripts/aot_kernels_gpu.py --python VENV/bin/python --target h200 [--only SUBSTRING]

VENV has the same jax as this one plus `jax[cuda13]` (the plugin, pjrt and the nvidia-* wheels); targets are in
jaxinfer/tools/aot/gpu_targets.py. Proves that each program is accepted and what it needs (bytes, registers, spills,
shared memory); proves nothing about values or speed. Each case compiles in a child process of its own, since an
installed plugin changes a plain start and a compiler that aborts must not end the others.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # VENV need not have this package

from jaxinfer.tools.aot.gpu_resources import kernel_resources  # noqa: E402
from jaxinfer.tools.aot.gpu_targets import LIMITS, TARGETS, config_text  # noqa: E402

CASE_TIMEOUT = 180  # seconds


def cases(capability: tuple[int, int]) -> dict:
    """Name -> thunk that returns (function to compile, its ShapeDtypeStructs, indices of the donated)."""
    import functools

    import jax
    import jax.numpy as jnp

    from jaxinfer.pallas_kernels.kv_append import gpu as kv_append
    from jaxinfer.pallas_kernels.quantized_matmul import gpu as quantized_matmul
    from jaxinfer.pallas_kernels.quantized_matmul.cases import model_case, structs
    from jaxinfer.pallas_kernels.ragged_paged_attention import gpu as attention

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

    def multiply(weight, form, num_tokens):
        case = model_case(weight, form, num_tokens)
        arrays = (jax.ShapeDtypeStruct((num_tokens, case.in_dim), case.dtype), *structs(case)[1:])
        function = functools.partial(
            quantized_matmul.quantized_matmul,
            w8a8=case.w8a8,
            out_dtype=jnp.dtype(case.dtype),
            compute_capability=capability,
        )
        return function, arrays, ()

    matmuls = [
        *(
            ("llama3_8b_gate", form, rows)
            for form in ("int8", "int4", "q4_1", "w8a8")
            for rows in (1, 64, 512)
        ),
        *(("llama3_8b_k", form, 8) for form in ("int8", "q4_1")),
        *(("llama3_8b_down", form, 7) for form in ("int8", "int4", "q4_1")),
        ("llama3_8b_unembed", "int8", 64),
        *(("smollm2_q", form, 7) for form in ("int8", "q4_1", "w8a8")),
        ("qwen3_0.6b_q", "int4", 64),
        ("qwen3_0.6b_o", "int8", 11),
        ("gemma3_1b_down", "int4", 512),
        ("gemma3_1b_unembed", "int8", 1),
    ]
    return {
        f"quantized_matmul {weight} {form} {rows}": functools.partial(multiply, weight, form, rows)
        for weight, form, rows in matmuls
    } | {
        "decode smollm2 page16": lambda: attend((9, 3), 64, 16, 64, 2048),
        "decode llama3_8b page16 batch 1": lambda: attend((32, 8), 128, 16, 1, 8192),
        "decode llama3_8b page16 batch 64": lambda: attend((32, 8), 128, 16, 64, 8192),
        "decode llama3_8b page128 batch 256": lambda: attend((32, 8), 128, 128, 256, 8192),
        "decode llama3_70b_shard page64": lambda: attend((8, 1), 128, 64, 64, 8192),
        "decode qwen3 page16": lambda: attend((16, 8), 128, 16, 64, 8192),
        "decode gemma3 page16 window": lambda: attend((4, 1), 256, 16, 64, 8192, sliding_window=512),
        "decode phi2 h80 page16": lambda: attend((32, 32), 80, 16, 64, 2048),
        "decode phi3 h96 page16": lambda: attend((32, 32), 96, 16, 64, 4096),
        "decode llama3_8b page64": lambda: attend((32, 8), 128, 64, 64, 8192),
        "decode llama3_8b int8 page64": lambda: attend((32, 8), 128, 64, 64, 8192, "int8"),
        "decode llama3_8b fp8 page64": lambda: attend((32, 8), 128, 64, 64, 8192, "float8_e4m3fn"),
        "decode smollm2 int8 page32": lambda: attend((9, 3), 64, 32, 64, 2048, "int8"),
        "decode llama3_70b_shard fp8 page128": lambda: attend((8, 1), 128, 128, 64, 8192, "float8_e4m3fn"),
        "decode gemma3 int8 page64 window": lambda: attend(
            (4, 1), 256, 64, 64, 8192, "int8", sliding_window=512
        ),
        "drafts llama3_8b int8 page64 q16": lambda: attend(
            (32, 8), 128, 64, 16, 8192, "int8", num_tokens=256, max_q_len=16
        ),
        "decode llama3_8b page256 soft_cap lse": lambda: attend(
            (32, 8), 128, 256, 16, 8192, soft_cap=30.0, return_lse=True
        ),
        "drafts llama3_8b page16 q16": lambda: attend(
            (32, 8), 128, 16, 16, 8192, num_tokens=256, max_q_len=16
        ),
        "drafts gemma3 page16 q16": lambda: attend((4, 1), 256, 16, 16, 8192, num_tokens=256, max_q_len=16),
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
        "prefill llama3_8b int8 page64": lambda: attend(
            (32, 8), 128, 64, 16, 8192, "int8", num_tokens=2048, max_q_len=2048
        ),
        "prefill llama3_8b fp8 page128": lambda: attend(
            (32, 8), 128, 128, 16, 8192, "float8_e4m3fn", num_tokens=2048, max_q_len=2048
        ),
        "prefill smollm2 int8 page64": lambda: attend(
            (9, 3), 64, 64, 16, 2048, "int8", num_tokens=512, max_q_len=512
        ),
        "prefill gemma3 int8 page64 window": lambda: attend(
            (4, 1), 256, 64, 16, 8192, "int8", num_tokens=2048, max_q_len=2048, sliding_window=512
        ),
        "prefill phi2 h80 page16": lambda: attend((32, 32), 80, 16, 16, 2048, num_tokens=512, max_q_len=512),
        "prefill phi3 h96 page16": lambda: attend((32, 32), 96, 16, 16, 2048, num_tokens=512, max_q_len=512),
        "prefill phi3 h96 page128 window cap lse": lambda: attend(
            (32, 32),
            96,
            128,
            16,
            2048,
            num_tokens=512,
            max_q_len=512,
            sliding_window=1024,
            soft_cap=30.0,
            return_lse=True,
        ),
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

    capability = TARGETS[target].compute_capability
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="1x1x1",
        topology="1x1x1",
        target_config=config_text(TARGETS[target]),
    )
    mesh = Mesh(np.array(topology.devices)[:1], "x")
    sharding = NamedSharding(mesh, PartitionSpec())

    @dataclasses.dataclass(frozen=True)
    class Device(jax.sharding.AbstractDevice):
        """Mosaic GPU takes a device that names no compute capability for a 9.0."""

        compute_capability: str

    named = mesh.abstract_mesh.abstract_device
    device = Device(named.device_kind, named.num_cores, named.platform, "{}.{}".format(*capability))
    abstract_mesh = mesh.abstract_mesh.update(abstract_device=device)
    start = time.perf_counter()
    try:
        function, arrays, donated = cases(capability)[name]()
        arrays = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arrays)
        with jax.sharding.use_abstract_mesh(abstract_mesh):
            compiled = jax.jit(function, donate_argnums=donated).lower(*arrays).compile()
    except NotImplementedError as error:
        if "implementation" not in str(error):
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


def run_child(python: str, name: str, target: str) -> dict:
    with tempfile.TemporaryDirectory() as dump:
        environment = os.environ | {
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "MOSAIC_GPU_DUMP_TO": dump,
            "MOSAIC_GPU_DUMP_PTXAS": "1",
        }
        command = [python, __file__, "--child", name, "--target", target]
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
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--only", default="", help="compile the cases whose name contains this")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    target = arguments.target
    if arguments.child:
        print(json.dumps(compile_case(arguments.child, target)))
        return
    capability = TARGETS[target].compute_capability
    failed = False
    for name in cases(capability):
        if arguments.only in name:
            outcome = run_child(arguments.python, name, target)
            for kernel in outcome.get("kernels", ()):
                if (kernel["smem_bytes"] or 0) > LIMITS[capability].shared_bytes_per_block:
                    outcome |= {
                        "result": "failed",
                        "error": f"{kernel['kernel']}: over the chip's shared memory",
                    }
            failed |= outcome["result"] == "failed"
            print(json.dumps({"case": name, "target": target} | outcome), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
