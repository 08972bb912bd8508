"""What one call of ragged_paged_attention costs, beside what it must cost.

On a CPU, at SmolLM2's shapes (N 9, K 3, H 64):

    python -m jaxinfer.pallas_kernels.ragged_paged_attention.bench \
        [--implementation xla] [--pages float32:16,bfloat16:64] ...

On an accelerator `scripts/device_check.py --stage kernels` times `chip_cases`. With --distance nothing is run: it
prints what the kernels move and compute on v6e and H200 over the least possible, by their own schedules.

First a card per workload: the bytes that must be read (each resident K and V once) and the FLOPs under the causal
mask, and the time they take at the given limits. Then times: all variants of a workload in turn, in one process, so
that their ratio holds on a busy machine; the least of the repetitions, by the wall clock and in CPU seconds of the
process (the second is what is left of the figure when other programs hold the cores). Last line: JSON.
"""

import argparse
import dataclasses
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.pallas_kernels import cpu_pages, timing
from jaxinfer.pallas_kernels.ragged_paged_attention import QUANTIZED_DTYPES, distance, ragged_paged_attention
from jaxinfer.pallas_kernels.ragged_paged_attention.cases import Case, make_inputs

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
    """The least bytes and FLOPs of a case, and the time that the larger of them takes.

    Each resident K and V (and scale) is read once, q read and out written once; FLOPs are those under the causal
    mask. Windows are not looked at.
    """
    kv_bits = jax.dtypes.itemsize_bits(jnp.dtype(case.kv_dtype))
    kv_token = case.num_kv_heads * (2 * case.head_dim * kv_bits // 8 + 8 * is_quantized(case))
    q_token = 2 * case.num_q_heads * case.head_dim * jnp.dtype(case.dtype).itemsize
    moved = sum(case.kv_lens) * kv_token + sum(case.q_lens) * q_token
    pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    flops = 4 * pairs * case.num_q_heads * case.head_dim
    bound = max(moved / gb_per_s / 1e6, flops / gflop_per_s / 1e6)
    return {"mbytes": moved / 1e6, "mflops": flops / 1e6, "bound_ms": bound}


def is_quantized(case: Case) -> bool:
    return jnp.dtype(case.kv_dtype) in [jnp.dtype(dtype) for dtype in QUANTIZED_DTYPES]


def chip_cases(page_size: int) -> tuple[Case, ...]:
    """What is timed on an accelerator: decode, prefill and mixed batches of real models, in bfloat16."""
    rng = np.random.default_rng(0)
    models = {"llama3_8b": (32, 8, 128), "llama3_70b_shard": (8, 1, 128), "qwen3_0.6b": (16, 8, 128)}

    def lengths(rows: int, mean: int) -> tuple[int, ...]:
        return tuple(int(n) for n in rng.uniform(0.5 * mean, 1.5 * mean, rows))

    def case(name: str, model: str, q_lens: Any, kv_lens: Any, **options: Any) -> Case:
        shape = (*models[model], page_size)
        options = {"dtype": "bfloat16", "kv_dtype": "bfloat16"} | options
        return Case(f"{model}_{name}", *shape, tuple(q_lens), tuple(kv_lens), **options)

    prompts = lengths(16, 560)
    return (
        case("decode_64x1k", "llama3_8b", [1] * 64, lengths(64, 1024)),
        case("decode_256x1k", "qwen3_0.6b", [1] * 256, lengths(256, 1024)),
        case("prefill_16x560", "qwen3_0.6b", prompts, prompts),
        case("prefill_1x8k", "llama3_8b", [8192], [8192]),
        case("decode_64x8k", "llama3_8b", [1] * 64, lengths(64, 8192)),
        case("decode_1x32k", "llama3_8b", [1], [32768]),
        case("mixed_64x1k_2k_of_8k", "llama3_8b", [1] * 64 + [1984], (*lengths(64, 1024), 8192)),
        case("drafts_64x4_1k", "llama3_8b", [4] * 64, lengths(64, 1024)),
        case("decode_64x8k", "llama3_70b_shard", [1] * 64, lengths(64, 8192)),
        case("decode_64x8k_int8", "llama3_8b", [1] * 64, lengths(64, 8192), kv_dtype="int8"),
        case("decode_64x8k_fp8", "llama3_8b", [1] * 64, lengths(64, 8192), kv_dtype="float8_e4m3fn"),
    )


def chip_inputs(case: Case, seed: int) -> dict[str, Any]:
    """make_inputs for pools of gigabytes: q, pages and scales are drawn on the device."""
    small = dataclasses.replace(case, num_q_heads=1, num_kv_heads=1, head_dim=1)
    inputs = make_inputs(small, seed, poison=False)
    num_pages, num_tokens = inputs["kv_pages"].shape[0], inputs["q"].shape[0]
    shape = (num_pages, case.num_kv_heads, case.page_size, 2 * case.head_dim)
    q_key, kv_key = jax.random.split(jax.random.key(seed))

    @jax.jit
    def draw_pages() -> jax.Array:
        values = jax.random.normal(kv_key, shape, jnp.bfloat16)
        return (values * (40.0 if case.kv_dtype == "int8" else 1.0)).astype(case.kv_dtype)

    inputs["q"] = jax.random.normal(q_key, (num_tokens, case.num_q_heads, case.head_dim), case.dtype)
    inputs["kv_pages"] = draw_pages()
    if is_quantized(case):
        inputs["kv_scales"] = jnp.full((num_pages, case.num_kv_heads, 2, case.page_size), 0.02, jnp.float32)
    return inputs | {"sm_scale": case.head_dim**-0.5}


def seconds_per_call(case: Case, implementation: str, bound_s: float, **options: Any) -> float:
    """Of one call on the device at hand. The output of a call is the next one's q.

    Args:
        options: further arguments of the kernel.

    Raises:
        NotImplementedError: the implementation does not have this case.
    """
    inputs = chip_inputs(case, seed=0)
    inputs["kv_pages"] = cpu_pages.of_layout(inputs["kv_pages"], implementation)
    static = {name: inputs.pop(name) for name in STATIC if name in inputs}

    def attend(q: jax.Array, arrays: dict[str, Any]) -> Any:
        return ragged_paged_attention(q, **arrays, **static, **options, implementation=implementation)

    q = inputs.pop("q")
    return timing.seconds_per_call(attend, q, inputs, timing.num_calls(bound_s))


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
    parser.add_argument("--implementation", default="cpu")
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
    parser.add_argument(
        "--distance", action="store_true", help="the TPU and GPU kernels on paper, for Llama-3-8B"
    )
    args = parser.parse_args()
    if args.distance:
        print(distance.table())
        return

    results = []
    for workload in args.workloads.split(","):
        q_lens, kv_lens = workloads(args.seed)[workload]
        variants, cards = {}, {}
        for pages in args.pages.split(","):
            dtype, page_size = pages.split(":")
            case = Case(workload, 9, 3, 64, int(page_size), q_lens, kv_lens, dtype=dtype, kv_dtype=dtype)
            variants[pages] = make_inputs(case, args.seed)
            variants[pages]["kv_pages"] = cpu_pages.of_layout(
                variants[pages]["kv_pages"], args.implementation
            )
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
