"""Which layouts of pages and scales the TPU compiler takes without copying the pool: a table in Markdown.

    python scripts/page_layout.py [--target v6e]        needs the extra aot-tpu

For each layout a small kernel that aliases the pool is compiled: it reads one page into scratch memory and writes it
back. What the program then needs besides its arguments, divided by the bytes of the pool, is the table: 0 is a pool
in place, 1 and more is a copy of all of it in every call. Exits with 1 if the layout that jaxinfer has is copied.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxinfer.tools.aot import targets

PAGE_SIZE = 128
POOL_BYTES = 1 << 30  # far over VMEM: a smaller pool is copied there, and the copy counts nowhere
HEADS = (1, 3, 8)  # K
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "int8", "int4", "float8_e4m3fn")


class Case(NamedTuple):
    layout: str
    ours: bool
    num_kv_heads: int
    head_dim: int  # 0 for scales
    dtype: str
    page_shape: tuple[int, ...]


def cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for k in HEADS:
            for h in HEAD_DIMS:
                yield Case("pages [page, 2K, H]", False, k, h, dtype, (PAGE_SIZE, 2 * k, h))
                yield Case("pages [K, page, 2H]", True, k, h, dtype, (k, PAGE_SIZE, 2 * h))
    for dtype in ("float32", "bfloat16"):
        for k in HEADS:
            yield Case("scales [2K, page]", False, k, 0, dtype, (2 * k, PAGE_SIZE))
            yield Case("scales [K, 2, page]", dtype == "float32", k, 0, dtype, (k, 2, PAGE_SIZE))


def compile_all(target: str) -> None:
    """The child's part: one JSON line per case."""
    import jax
    import ml_dtypes  # noqa: F401  # numpy learns the names of small dtypes
    import numpy as np
    from jax.experimental import pallas as pl
    from jax.experimental import topologies
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    name = f"{target}:{targets.find(target).topology}"
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    mesh = Mesh(np.array(topology.devices[:1]), ("chip",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def temporaries(case: Case) -> float:
        """Temporary bytes / bytes of the pool."""
        bits = jax.dtypes.itemsize_bits(np.dtype(case.dtype))
        num_pages = 8 * POOL_BYTES // bits // math.prod(case.page_shape)
        pool = jax.ShapeDtypeStruct((num_pages, *case.page_shape), case.dtype, sharding=sharding)

        def body(page_ref, pool_ref, out_ref, scratch_ref, semaphore):
            there = pltpu.make_async_copy(pool_ref.at[page_ref[0]], scratch_ref, semaphore)
            there.start()
            there.wait()
            back = pltpu.make_async_copy(scratch_ref, out_ref.at[page_ref[0]], semaphore)
            back.start()
            back.wait()

        def touch(page, pool):
            return pl.pallas_call(
                body,
                in_specs=[
                    pl.BlockSpec(memory_space=pltpu.SMEM),
                    pl.BlockSpec(memory_space=pl.ANY),
                ],
                out_specs=pl.BlockSpec(memory_space=pl.ANY),
                out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
                input_output_aliases={1: 0},
                scratch_shapes=[pltpu.VMEM(case.page_shape, case.dtype), pltpu.SemaphoreType.DMA],
            )(page, pool)

        page = jax.ShapeDtypeStruct((1,), "int32", sharding=sharding)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            memory: Any = jax.jit(touch, donate_argnums=1).lower(page, pool).compile().memory_analysis()
        return memory.temp_size_in_bytes / (pool.size * bits / 8)

    for case in cases():
        try:
            found: dict[str, Any] = {"ratio": temporaries(case)}
        except Exception as error:  # whatever the compiler says is this case's result
            found = {"error": (str(error).strip().splitlines() or [type(error).__name__])[0][:200]}
        print(json.dumps(case._asdict() | found), flush=True)


def table(records: list[dict[str, Any]]) -> list[str]:
    """Rows of dtype and K; a column per layout and head_dim."""
    columns = list(dict.fromkeys((r["layout"], r["head_dim"]) for r in records))
    found = {
        (r["layout"], r["head_dim"], r["dtype"], r["num_kv_heads"]): f"{r['ratio']:.2f}"
        if "ratio" in r
        else "rejected"
        for r in records
    }
    lines = []
    for kind in ("pages", "scales"):
        mine = [column for column in columns if column[0].startswith(kind)]
        mine.sort(key=lambda column: column[0], reverse=True)
        names = [f"{layout.removeprefix(kind + ' ')}{f' H {h}' if h else ''}" for layout, h in mine]
        lines += [
            f"| {kind} | K | {' | '.join(f'`{name}`' for name in names)} |",
            "|" + "---|" * (len(names) + 2),
        ]
        rows = dict.fromkeys((r["dtype"], r["num_kv_heads"]) for r in records if r["layout"].startswith(kind))
        for dtype, k in rows:
            cells = []
            for layout, h in mine:
                cells.append(found.get((layout, h, dtype, k), "not run"))
            lines.append(f"| {dtype} | {k} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", choices=[t.name for t in targets.TARGETS.values() if t.platform == "tpu"], default="v6e"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        compile_all(options.target)
        return
    targets.check_compiler("tpu")
    done = subprocess.run(
        [sys.executable, __file__, "--child", "--target", options.target],
        env=os.environ | targets.ENVIRONMENTS["tpu"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"the compiler's process ended with {done.returncode}:\n{done.stderr[-2000:]}")
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print("\n".join(table(records)), end="")
    copied = [r for r in records if r["ours"] and r.get("ratio", 1) > 0.01]
    if copied:
        sys.exit(f"the pool of our layout is copied, or rejected: {copied[0]}")


if __name__ == "__main__":
    main()
