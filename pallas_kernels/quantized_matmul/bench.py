"""What one call of quantized_matmul costs at the shapes of real models, beside what it must cost.

    python -m jaxinfer.pallas_kernels.quantized_matmul.bench \
        [--implementation cpu] [--weights smollm2_gate,...] [--rows 1,64]

First a card per case: the bytes that must move (each array once), the FLOPs, and the time that the larger of them takes
at the given limits; with --card nothing more. Then times: all forms of a shape in turn, in one process, so that their
ratio holds on a busy machine; beside them the same product with weights in x's dtype. The least of the repetitions, by
the wall clock and in CPU seconds of the process. Last line: JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels import timing
from jaxinfer.pallas_kernels.quantized_matmul import quantized_matmul
from jaxinfer.pallas_kernels.quantized_matmul.cases import FORMS, Case, make_inputs, model_case

PLAIN = "plain"  # the product with weights that are not quantized


def card(case: Case, gb_per_s: float, gflop_per_s: float, form: str = "") -> dict[str, float]:
    """The least bytes and FLOPs of a case, and the time that the larger of them takes."""
    bits = jax.dtypes.itemsize_bits(case.dtype if form == PLAIN else case.weight_dtype)
    moved = case.out_dim * case.in_dim * bits // 8
    moved += case.num_tokens * (case.in_dim + case.out_dim) * jnp.dtype(case.dtype).itemsize
    if form != PLAIN:
        groups = case.in_dim // case.group if case.group else 1
        moved += (1 + case.has_offset) * case.out_dim * groups * 4
    flops = 2 * case.num_tokens * case.out_dim * case.in_dim
    bound = max(moved / gb_per_s / 1e6, flops / gflop_per_s / 1e6)
    return {"mbytes": moved / 1e6, "mflops": flops / 1e6, "bound_ms": bound}


def chip_cases(page_size: int) -> tuple[Case, ...]:
    """What scripts/device_check.py times on an accelerator, where nothing depends on the page size."""
    del page_size
    large = [model_case("llama3_8b_unembed", form, 64) for form in ("int8", "int4")]
    layers = [("gate", 64), ("down", 64), ("gate", 512)]
    return (*large, *(model_case(f"llama3_8b_{name}", form, rows) for name, rows in layers for form in FORMS))


def seconds_per_call(case: Case, implementation: str, bound_s: float, **options: Any) -> float:
    """Of one call on the device at hand. The next call's x has the first column of the result, times 0, added.

    Weights of less than the device's cache come out of it, faster than out of memory.

    Args:
        options: further arguments of the kernel.

    Raises:
        NotImplementedError: the implementation does not have this case.
    """
    inputs = make_inputs(case, seed=0)
    static = {name: inputs.pop(name) for name in ("w8a8", "out_dtype")}

    def multiply(x: jax.Array, weight: dict[str, Any]) -> jax.Array:
        out = quantized_matmul(x, **weight, **static, **options, implementation=implementation)
        return x + (out[:, :1] * 0).astype(x.dtype)

    x = inputs.pop("x")
    return timing.seconds_per_call(multiply, x, inputs, timing.num_calls(bound_s))


def call_of(case: Case, form: str, implementation: str) -> Callable[[], jax.Array]:
    """A compiled product with its arguments bound."""
    inputs = make_inputs(case, seed=0)
    if form == PLAIN:
        weight = inputs["qvalue"].astype(case.dtype)
        multiply: Callable[..., jax.Array] = jax.jit(
            lambda x, weight: jax.lax.dot_general(
                x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            ).astype(x.dtype)
        )
        return lambda: multiply(inputs["x"], weight)
    static = {name: inputs.pop(name) for name in ("w8a8", "out_dtype")}
    multiply = jax.jit(lambda arrays: quantized_matmul(**arrays, **static, implementation=implementation))
    return lambda: multiply(inputs)


def measure(calls: dict[str, Callable[[], jax.Array]], repeats: int) -> dict[str, dict[str, float]]:
    """Form -> least wall and CPU milliseconds of a call."""
    times: dict[str, list[tuple[float, float]]] = {form: [] for form in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(repeats):
        for form, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            times[form].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        form: {"wall_ms": 1e3 * min(t[0] for t in ts), "cpu_ms": 1e3 * min(t[1] for t in ts)}
        for form, ts in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--implementation", default="cpu")
    parser.add_argument("--weights", default="smollm2_q,smollm2_gate,smollm2_down,llama3_8b_q")
    parser.add_argument("--rows", default="1,8,64,512")
    parser.add_argument("--forms", default=",".join([PLAIN, *FORMS]))
    parser.add_argument("--dtype", default="float32", help="of x")
    parser.add_argument("--card", action="store_true", help="the cards alone")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--gb-per-s", type=float, default=20.0, help="memory limit of the device for the card"
    )
    parser.add_argument(
        "--gflop-per-s", type=float, default=150.0, help="limit of the device's products for the card"
    )
    args = parser.parse_args()

    results: list[dict[str, Any]] = []
    for weight in args.weights.split(","):
        for rows in map(int, args.rows.split(",")):
            cases = {
                form: model_case(weight, "int8" if form == PLAIN else form, rows, dtype=args.dtype)
                for form in args.forms.split(",")
            }
            figures: dict[str, dict[str, float]] = {form: {} for form in cases}
            if not args.card:
                calls = {form: call_of(case, form, args.implementation) for form, case in cases.items()}
                figures = measure(calls, args.repeats)
            for form, case in cases.items():
                result = card(case, args.gb_per_s, args.gflop_per_s, form) | figures[form]
                results.append({"weight": weight, "rows": rows, "form": form} | result)
                cells = "  ".join(f"{name} {value:9.3f}" for name, value in result.items())
                print(f"{weight:18s} {rows:4d} {form:6s} {cells}", flush=True)
    print(
        json.dumps(
            {
                "implementation": args.implementation,
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
