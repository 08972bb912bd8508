"""What one call of kv_append costs on the device at hand, beside what it must cost.

    python -m jaxinfer.pallas_kernels.kv_append.bench --implementation gpu --gb-per-s 4800

Decode steps write so little that what is seen is the time to start a kernel; prefills are bound by memory.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels import cpu_pages, timing
from jaxinfer.pallas_kernels.kv_append import QUANTIZED_MAX, kv_append
from jaxinfer.pallas_kernels.kv_append.cases import Case, make_inputs


def chip_cases(page_size: int) -> tuple[Case, ...]:
    """What is timed on an accelerator: steps of Llama-3-8B and of one of its 70B's eight shards."""

    def case(name: str, num_kv_heads: int, num_tokens: int, **options: Any) -> Case:
        options = {"dtype": "bfloat16", "kv_dtype": "bfloat16"} | options
        return Case(name, num_kv_heads, 128, page_size, num_tokens, **options)

    return (
        case("llama3_8b_decode_64", 8, 64),
        case("llama3_8b_decode_256", 8, 256),
        case("llama3_8b_prefill_32k", 8, 32768, contiguous=True),
        case("llama3_70b_shard_prefill_32k", 1, 32768, contiguous=True),
        case("llama3_8b_prefill_32k_int8", 8, 32768, contiguous=True, kv_dtype="int8"),
        case("llama3_8b_prefill_32k_fp8", 8, 32768, contiguous=True, kv_dtype="float8_e4m3fn"),
    )


def card(case: Case, gb_per_s: float, gflop_per_s: float) -> dict[str, float]:
    """The least bytes of a case (k and v read, their slots and scales written) and the time that they take.

    There are no products, so that `gflop_per_s` bounds nothing.
    """
    del gflop_per_s
    vectors = 2 * case.num_tokens * case.num_kv_heads  # of K and of V
    bits = [jax.dtypes.itemsize_bits(jnp.dtype(dtype)) for dtype in (case.dtype, case.kv_dtype)]
    moved = vectors * (case.head_dim * sum(bits) // 8 + 4 * (case.kv_dtype in QUANTIZED_MAX))
    return {"mbytes": moved / 1e6, "mflops": 0.0, "bound_ms": moved / gb_per_s / 1e6}


def seconds_per_call(case: Case, implementation: str, bound_s: float, **options: Any) -> float:
    """Of one call on the device at hand. Every call writes the pages that the one before has written.

    Args:
        options: further arguments of the kernel.

    Raises:
        NotImplementedError: the implementation does not have this case.
    """
    inputs = make_inputs(case, seed=0)
    pool = (cpu_pages.of_layout(inputs.pop("kv_pages"), implementation), inputs.pop("kv_scales"))

    def append(pool: tuple[Any, Any], arrays: dict[str, Any]) -> Any:
        return kv_append(
            kv_pages=pool[0], kv_scales=pool[1], **arrays, **options, implementation=implementation
        )

    return timing.seconds_per_call(append, pool, inputs, timing.num_calls(bound_s))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--implementation", default="cpu")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--gb-per-s", type=float, default=20.0, help="memory limit of the device")
    args = parser.parse_args()
    for case in chip_cases(args.page_size):
        facts = card(case, args.gb_per_s, 1.0)
        print(f"{case.name:30s} {facts['mbytes']:8.2f} MB, at least {facts['bound_ms']:8.4f} ms", end=" | ")
        print(
            f"{1e3 * seconds_per_call(case, args.implementation, facts['bound_ms'] / 1e3):8.4f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
