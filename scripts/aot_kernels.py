"""Compiles the TPU kernels with the real TPU compiler, for chips that are not attached.

    python scripts/aot_kernels.py --python VENV/bin/python --target v6e [--only kv_append]

VENV has the same jax as this one plus `jax[tpu]` (libtpu); apart, because an installed libtpu changes how a plain jax
starts. Prints one JSON line per kernel case: whether the compiler took it, the bytes it set aside besides arguments
and results (a copy of the pool would stand there), the bytes that alias, the seconds. Exits with 1 when a case was
rejected or copies the pool.
Arrays have the layouts in memory that the kernels read, as docs/kernels.md says: who owns them asks for these.
It proves that the chip's compiler accepts the programs and that nothing is copied; it does not prove speed.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOPOLOGIES = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "v5p": "v5p:1x1x1", "tpu7x": "tpu7x:1x1x1"}
CHILD_ENVIRONMENT = {  # no metadata server, no device, and no lock on a device that is not there
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
POOLS = ("kv_pages", "kv_scales")
LANES = (
    128  # 2H that is no multiple of it gets another default layout, and must be kept row major by who owns it
)
POOL_TOKENS = 1 << 16  # tokens in the pool of every case

# model -> N, K, H
MODELS = {
    "smollm2": (9, 3, 64),
    "llama3_8b": (32, 8, 128),
    "llama3_70b_shard": (8, 1, 128),
    "qwen3_0.6b": (16, 8, 128),
    "gemma3_1b": (4, 1, 256),
    "phi2": (32, 32, 80),
    "phi3": (32, 32, 96),
}
DECODE: dict[str, Any] = {}
DRAFTS: dict[str, Any] = {"num_tokens": 256, "max_q_len": 8}
MIXED: dict[str, Any] = {"num_tokens": 2048, "max_q_len": 2048}


@dataclasses.dataclass(frozen=True)
class Case:
    kernel: str
    model: str
    page_size: int
    kv_dtype: str = "bfloat16"
    num_tokens: int = 64
    num_rows: int = 64
    max_q_len: int = 1
    dtype: str = "bfloat16"
    options: tuple[tuple[str, Any], ...] = ()  # of ragged_paged_attention

    @property
    def name(self) -> str:
        step = "decode" if self.max_q_len == 1 else f"mixed{self.max_q_len}"
        options = "".join(f"_{key}" for key, _ in self.options)
        return f"{self.kernel}_{self.model}_{step}_page{self.page_size}_{self.kv_dtype}{options}"


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A product with quantized weights, by the name of its shapes in quantized_matmul/cases.py."""

    weight: str
    form: str
    num_tokens: int

    @property
    def name(self) -> str:
        return f"quantized_matmul_{self.weight}_{self.form}_{self.num_tokens}"


def matmul_cases() -> list[Matmul]:
    """Every form at Llama-3-8B's shapes, and every shape of the other models, with few rows and with many."""
    llama = ("q", "k", "gate", "down", "unembed")
    others = [f"smollm2_{name}" for name in llama]
    others += [f"qwen3_0.6b_{name}" for name in ("q", "o", "gate", "down")]
    others += [f"gemma3_1b_{name}" for name in ("q", "o", "gate", "down", "unembed")]
    found = []
    for form in ("int8", "int4", "q4_1", "w8a8"):
        for rows in (1, 64, 512):
            found += [Matmul(f"llama3_8b_{name}", form, rows) for name in llama if rows > 1 or name == "down"]
    found += [
        Matmul(weight, form, rows) for weight in others for form in ("int8", "q4_1") for rows in (7, 512)
    ]
    return found


def attention_cases() -> list[Case]:
    """Every head shape, page dtype, page size and option at least once in a decode and in a mixed program."""
    smallest_page = {"float32": 16, "int8": 32, "int4": 64, "float8_e4m3fn": 32}
    found = []
    for kernel in ("kv_append", "attention"):
        for model in MODELS:
            found.append(Case(kernel, model, 128))
            found.append(Case(kernel, model, 128, **MIXED))
        found += [Case(kernel, "llama3_8b", page_size) for page_size in (16, 32, 64, 256)]
        for kv_dtype, page_size in smallest_page.items():
            dtypes: dict[str, Any] = {
                "kv_dtype": kv_dtype,
                "dtype": "float32" if kv_dtype == "float32" else "bfloat16",
            }
            for model in ("smollm2", "llama3_8b", "llama3_70b_shard", "gemma3_1b"):
                found.append(Case(kernel, model, 128, **dtypes))
            found.append(Case(kernel, "llama3_8b", page_size, **dtypes))
            found.append(Case(kernel, "llama3_8b", 256, **dtypes, **MIXED))
    options = (("sliding_window", 1024), ("soft_cap", 50.0), ("sinks", True), ("return_lse", True))
    for model in ("smollm2", "llama3_8b"):
        for shape in (DECODE, DRAFTS, MIXED):
            found.append(Case("attention", model, 128, options=options, **shape))
    found.append(Case("attention", "llama3_8b", 128, "int8", options=options, **MIXED))
    for model in MODELS:
        found.append(Case("append_then_attend", model, 128))
    found.append(Case("append_then_attend", "llama3_8b", 128, **MIXED))
    found.append(Case("append_then_attend", "smollm2", 128, "int8"))
    return found


def build_matmul(case: Matmul, device_kind: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of a case and the shapes of its arguments; int8 products or bfloat16 ones, as the chip has."""
    import functools

    import jax
    import jax.numpy as jnp

    from jaxinfer.pallas_kernels.quantized_matmul import tuning
    from jaxinfer.pallas_kernels.quantized_matmul.cases import model_case
    from jaxinfer.pallas_kernels.quantized_matmul.tpu import quantized_matmul

    shape = model_case(case.weight, case.form, case.num_tokens)
    groups = shape.in_dim // shape.group if shape.group else 1
    scale = jax.ShapeDtypeStruct((shape.out_dim, groups), jnp.float32)
    multiply = functools.partial(
        quantized_matmul,
        w8a8=tuning.w8a8_products(device_kind) if shape.w8a8 else None,
        out_dtype=jnp.dtype(shape.dtype),
        device_kind=device_kind,
    )
    return multiply, {
        "x": jax.ShapeDtypeStruct((shape.num_tokens, shape.in_dim), shape.dtype),
        "qvalue": jax.ShapeDtypeStruct((shape.out_dim, shape.in_dim), shape.weight_dtype),
        "scale": scale,
        "offset": scale if shape.has_offset else None,
    }


def build(case: Case) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of a case of paged attention, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    from jaxinfer.pallas_kernels.kv_append.tpu import kv_append

    num_q_heads, num_kv_heads, head_dim = MODELS[case.model]
    num_pages = POOL_TOKENS // case.page_size
    quantized = case.kv_dtype in ("int8", "int4", "float8_e4m3fn")

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    arguments: dict[str, Any] = {
        "kv_pages": array(num_pages, num_kv_heads, case.page_size, 2 * head_dim, dtype=case.kv_dtype),
        "kv_scales": array(num_pages, num_kv_heads, 2, case.page_size, dtype=jnp.float32)
        if quantized
        else None,
    }
    kv = array(case.num_tokens, num_kv_heads, head_dim, dtype=case.dtype)
    appended = {"k": kv, "v": kv, "slot_mapping": array(case.num_tokens)}
    if case.kernel == "kv_append":
        return kv_append, arguments | appended

    from jaxinfer.pallas_kernels.ragged_paged_attention.tpu import ragged_paged_attention

    options = dict(case.options)
    sinks = options.pop("sinks", False)
    pages_per_row = 8192 // case.page_size
    arguments |= {
        "q": array(case.num_tokens, num_q_heads, head_dim, dtype=case.dtype),
        "page_table": array(case.num_rows, pages_per_row),
        "kv_lens": array(case.num_rows),
        "cu_q_lens": array(case.num_rows + 1),
        "distribution": array(3),
        "sink_logits": array(num_q_heads, dtype=jnp.float32) if sinks else None,
    }

    def attend(**arrays: Any) -> Any:
        return ragged_paged_attention(**arrays, sm_scale=head_dim**-0.5, max_q_len=case.max_q_len, **options)

    def append_then_attend(
        k: Any, v: Any, kv_pages: Any, kv_scales: Any, slot_mapping: Any, **arrays: Any
    ) -> Any:
        kv_pages, kv_scales = kv_append(k, v, kv_pages, kv_scales, slot_mapping)
        return kv_pages, kv_scales, attend(kv_pages=kv_pages, kv_scales=kv_scales, **arrays)

    return (attend, arguments) if case.kernel == "attention" else (append_then_attend, arguments | appended)


def compile_case(case: Case | Matmul, topology: Any) -> dict[str, Any]:
    """The JSON record of one case: "compiled", "refused" by our own check or "rejected" by the compiler."""
    import jax
    import numpy as np
    from jax.experimental.layout import Format, Layout
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(topology.devices[:1]), ("chip",))
    sharding = NamedSharding(mesh, PartitionSpec())
    record: dict[str, Any] = {"case": case.name, "chip": topology.devices[0].device_kind}
    started = time.perf_counter()
    try:
        pool: Any = sharding
        if isinstance(case, Matmul):
            function, shapes = build_matmul(case, topology.devices[0].device_kind)
            by_rows, by_columns = (Format(Layout(order), sharding) for order in ((0, 1), (1, 0)))
            # As tpu.quantized_matmul reads them; x comes out of another operation in a program.
            formats = {"x": by_rows, "qvalue": by_rows, "scale": by_columns, "offset": by_columns}
        else:
            function, shapes = build(case)
            row_major = MODELS[case.model][2] * 2 % LANES != 0
            if row_major:
                pool = Format(Layout((0, 1, 2, 3)), sharding)
            formats = dict.fromkeys(POOLS, pool)
            record["pool_layout"] = "row major" if row_major else "default"
        arguments = {
            name: x and jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=formats.get(name, sharding))
            for name, x in shapes.items()
        }
        names = list(arguments)
        appends = isinstance(case, Case) and case.kernel != "attention"
        jitted = jax.jit(
            lambda *arrays: function(**dict(zip(names, arrays, strict=True))),
            donate_argnums=tuple(i for i, name in enumerate(names) if name in POOLS) if appends else (),
            out_shardings=(pool, None, *((None,) if "q" in names else ())) if appends else formats.get("x"),
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jitted.lower(*arguments.values())
        compiled = lowered.compile()
    except NotImplementedError as error:
        return record | {"result": "refused", "why": str(error)[:3000]}
    except Exception as error:  # whatever the compiler says is this case's result
        return record | {"result": "rejected", "why": str(error)[:3000]}
    memory = compiled.memory_analysis()
    assert memory is not None  # every compiler here reports it
    pools = [shapes[name] for name in (*POOLS, "qvalue") if shapes.get(name) is not None]
    return record | {
        "result": "compiled",
        "temp_bytes": memory.temp_size_in_bytes,
        "pool_bytes": sum(x.size * jax.dtypes.itemsize_bits(x.dtype) // 8 for x in pools),
        "alias_bytes": memory.alias_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "seconds": round(time.perf_counter() - started, 2),
    }


def compile_all(target: str, only: str) -> None:
    """The child's part: one JSON line per case on stdout."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target])
    for case in [*attention_cases(), *matmul_cases()]:
        if only in case.name:
            print(json.dumps({"target": target} | compile_case(case, topology)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has libtpu")
    parser.add_argument("--target", choices=[*TOPOLOGIES, "all"], default="v6e")
    parser.add_argument("--only", default="", help="compile the cases whose name contains this")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sys.path.insert(0, str(ROOT))
        compile_all(options.target, options.only)
        return
    failures = []
    for target in TOPOLOGIES if options.target == "all" else [options.target]:
        command = [options.python, __file__, "--child", "--target", target, "--only", options.only]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command, env=os.environ | CHILD_ENVIRONMENT, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as child,
        ):
            for line in child.stdout or ():
                print(line, end="", flush=True)
                record = json.loads(line)
                if (
                    record["result"] == "rejected"
                    or record.get("temp_bytes", 0) > record.get("pool_bytes", 0) // 2
                ):
                    failures.append(record["case"])
            if child.wait():
                errors.seek(0)
                sys.exit(
                    f"the compiler's process for {target} ended with {child.returncode}:\n{errors.read()[-3000:]}"
                )
    if failures:
        sys.exit(f"rejected, or the pool (of quantized_matmul: the weight) is copied: {failures}")


if __name__ == "__main__":
    main()
