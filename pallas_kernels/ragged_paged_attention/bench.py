"""What one call of ragged_paged_attention costs at SmolLM2's shapes (N 9, K 3, H 64), beside what it must cost.

    python -m pallas_kernels.ragged_paged_attention.bench [--implementation xla] [--pages float32:16,bfloat16:64] ...

First a card per workload: the bytes that must be read (each resident K and V once) and the FLOPs under the causal
mask, and the time they take at the given limits. Then times: all variants of a workload in turn, in one process, so
that their ratio holds on a busy machine; the least of the repetitions, by the wall clock and in CPU seconds of the
process (the second is what is left of the figure when other programs hold the cores). Last line: JSON.
"""

import argparse
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import Case, make_inputs

STATIC = ("sm_scale", "max_q_len", "sliding_window", "soft_cap", "implementation")


def workloads(seed: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Name -> (q_lens, kv_lens)."""
    rng = np.random.default_rng(seed)
    ragged = tuple(int(n) for n in rng.integers(32, 769, 64))
    return {
        "decode-1": ((1,), (200,)),
        "decode-64": ((1,) * 64, ragged),
        "prefill-512": ((512,), (512,)),
        "mixed-48+464": ((1,) * 48 + (464,), (*ragged[:48], 464)),
    }


def card(case: Case, gb_per_s: float, gflop_per_s: float) -> dict[str, float]:
    """The least bytes and FLOPs of a case, and the time that the larger of them takes."""
    lanes = 2 * case.head_dim * case.num_kv_heads
    read = sum(case.kv_lens) * lanes * jnp.dtype(case.kv_dtype).itemsize
    pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    flops = 4 * pairs * case.num_q_heads * case.head_dim
    bound = max(read / gb_per_s / 1e6, flops / gflop_per_s / 1e6)
    return {"mbytes": read / 1e6, "mflops": flops / 1e6, "bound_ms": bound}


def measure(
    variants: dict[str, dict[str, Any]], implementation: str, repeats: int
) -> dict[str, dict[str, float]]:
    """Variant -> least wall and CPU milliseconds of a call."""
    attend = jax.jit(ragged_paged_attention, static_argnames=STATIC)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for inputs in variants.values():
        jax.block_until_ready(attend(**inputs, implementation=implementation))
    for _ in range(repeats):
        for name, inputs in variants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(attend(**inputs, implementation=implementation))
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: {"wall_ms": 1e3 * min(t[0] for t in ts), "cpu_ms": 1e3 * min(t[1] for t in ts)}
        for name, ts in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--implementation", default="xla")
    parser.add_argument(
        "--pages", default="float32:16,float32:32,float32:64,float32:128,bfloat16:16,bfloat16:64"
    )
    parser.add_argument("--workloads", default="decode-1,decode-64,prefill-512,mixed-48+464")
    parser.add_argument(
        "--max-model-len", type=int, default=2048, help="tokens that a page table has room for"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--gb-per-s", type=float, default=20.0, help="memory limit of the device for the card"
    )
    parser.add_argument(
        "--gflop-per-s", type=float, default=150.0, help="float32 limit of the device for the card"
    )
    args = parser.parse_args()

    results = []
    for workload in args.workloads.split(","):
        q_lens, kv_lens = workloads(args.seed)[workload]
        variants, cards = {}, {}
        for pages in args.pages.split(","):
            dtype, page_size = pages.split(":")
            case = Case(workload, 9, 3, 64, int(page_size), q_lens, kv_lens, dtype=dtype, kv_dtype=dtype)
            variants[pages] = make_inputs(case, args.seed)
            columns = args.max_model_len // case.page_size - variants[pages]["page_table"].shape[1]
            variants[pages]["page_table"] = jnp.pad(
                variants[pages]["page_table"], ((0, 0), (0, max(0, columns)))
            )
            cards[pages] = card(case, args.gb_per_s, args.gflop_per_s)
        for pages, figures in measure(variants, args.implementation, args.repeats).items():
            result = {"workload": workload, "pages": pages, **cards[pages], **figures}
            results.append(result)
            print(
                f"{workload:14s} {pages:14s} {result['mbytes']:7.1f} MB {result['mflops']:7.1f} MFLOP "
                f"bound {result['bound_ms']:7.3f} ms | wall {result['wall_ms']:8.3f} ms cpu {result['cpu_ms']:8.3f} ms",
                flush=True,
            )
    device = jax.devices()[0].device_kind
    print(
        json.dumps(
            {
                "implementation": args.implementation,
                "device": device,
                "jax": jax.__version__,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
