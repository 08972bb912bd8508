"""The stages `check` and `kernels` of device_check.py."""

import argparse
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.options import defaults
from jaxinfer.pallas_kernels import cpu_pages
from jaxinfer.tools.planner.hardware import Hardware

Record = dict[str, Any]
Emit = Callable[[Record], None]
Item = tuple[str, Callable[[Emit], None]]  # a name, and what to do under it
Errors = dict[str, tuple[float, float]]  # what is compared -> (error, tolerance)

COMPILERS = 4  # cases that are compiled while another runs
STATIC = (
    "sm_scale",
    "max_q_len",
    "sliding_window",
    "soft_cap",
    "w8a8",
    "out_dtype",
)  # arguments that are no arrays
TINY = {
    "ragged_paged_attention": ("smollm2_mixed_bf16", "decode_int8"),
    "kv_append": ("smollm2_decode", "int8"),
    "quantized_matmul": ("f32", "q8_0"),
}


def all_cases(kernel: str) -> tuple[Any, ...]:
    """The named cases of a kernel. Of quantized_matmul the awkward ones, and every form and number of rows of two
    weights: its other hundreds differ in size alone."""
    cases = importlib.import_module(f"jaxinfer.pallas_kernels.{kernel}.cases")
    if kernel == "quantized_matmul":
        weights = ("smollm2_down", "llama3_8b_k")
        return (*cases.AWKWARD_CASES, *(case for case in cases.MODEL_CASES if case.name.startswith(weights)))
    return cases.CASES


def has(kernel: str, implementation: str) -> bool:
    """quantized_matmul has no gpu_xla."""
    return implementation in importlib.import_module(f"jaxinfer.pallas_kernels.{kernel}").IMPLEMENTATIONS


# check


def check_items(args: argparse.Namespace, device: jax.Device, implementation: str) -> list[Item]:
    """Every case of every kernel, first with the chosen implementation, then with `xla`."""
    entries = [
        (f"{kernel}/{chosen}/{case.name}", kernel, adapted(kernel, case, chosen), chosen)
        for chosen in dict.fromkeys((implementation, "xla"))
        for kernel in TINY
        for case in all_cases(kernel)
        if has(kernel, chosen) and (not args.tiny or case.name in TINY[kernel])
    ]
    entries = [entry for entry in entries if args.only in entry[0]]
    compilers = ThreadPoolExecutor(COMPILERS)
    pending = {
        name: compilers.submit(prepare, kernel, case, chosen, device)
        for name, kernel, case, chosen in entries[args.skip :]
    }
    return [(name, partial(check_case, pending.get(name), kernel)) for name, kernel, _, _ in entries]


def adapted(kernel: str, case: Any, implementation: str) -> Any:
    """The nearest case that an implementation takes: GPU attention in bfloat16, TPU pages of whole tiles."""
    if implementation == "gpu" and kernel == "ragged_paged_attention":
        kv_dtype = "bfloat16" if case.kv_dtype == "float32" else case.kv_dtype
        return dataclasses.replace(case, dtype="bfloat16", kv_dtype=kv_dtype)
    if implementation == "tpu" and kernel != "quantized_matmul":
        tile = 8 * 32 // jax.dtypes.itemsize_bits(jnp.dtype(case.kv_dtype))
        return dataclasses.replace(case, page_size=max(case.page_size, tile))
    return case


@dataclasses.dataclass
class Prepared:
    """A case that is ready to run on the device, and what the reference made of it on the CPU."""

    case: Any
    compiled: Callable[..., Any]
    arrays: Mapping[str, Any]
    want: list[np.ndarray]


def prepare(kernel: str, case: Any, implementation: str, device: jax.Device) -> Prepared:
    function = getattr(importlib.import_module(f"jaxinfer.pallas_kernels.{kernel}"), kernel)
    with jax.default_device(jax.devices("cpu")[0]):
        inputs = importlib.import_module(f"jaxinfer.pallas_kernels.{kernel}.cases").make_inputs(case, seed=0)
        arrays = {name: x for name, x in inputs.items() if name not in STATIC}
        static = {name: x for name, x in inputs.items() if name in STATIC}
        if kernel == "ragged_paged_attention":
            static["return_lse"] = True
        want = jax.jit(partial(function, **static, implementation="reference"))(**arrays)
    if "kv_pages" in arrays:
        arrays["kv_pages"] = cpu_pages.of_layout(arrays["kv_pages"], implementation)
        if kernel == "kv_append":
            want = (cpu_pages.of_layout(want[0], implementation), *want[1:])
    static |= of_device(function, device)
    arrays = jax.device_put(arrays, device)
    # What is compared is float32 arithmetic. The Pallas kernels ask for it themselves, dot by dot.
    precision = "highest" if implementation == "xla" else None
    with jax.default_device(device), jax.default_matmul_precision(precision):
        jitted = jax.jit(partial(function, **static, implementation=implementation))
        compiled = jitted.lower(**arrays).compile()
    return Prepared(case, compiled, arrays, as_numpy(want))


def of_device(function: Callable[..., Any], device: jax.Device) -> dict[str, Any]:
    """What a kernel has to be told of a GPU: its compute capability."""
    if device.platform != "gpu" or "compute_capability" not in inspect.signature(function).parameters:
        return {}
    return {"compute_capability": tuple(int(n) for n in device.compute_capability.split("."))}


def check_case(pending: "Future[Prepared]", kernel: str, emit: Emit) -> None:
    ready = pending.result()
    got, again = (as_numpy(ready.compiled(**ready.arrays)) for _ in range(2))
    errors = ERRORS[kernel](ready, got)
    first = 1 if kernel == "kv_append" else 0  # colliding writes to the null page, of which any may win
    same = all(np.array_equal(a[first:], b[first:], equal_nan=True) for a, b in zip(got, again, strict=True))
    within = all(error <= tolerance for error, tolerance in errors.values())
    emit(
        {
            "result": "ok" if within and same else "failed",
            "twice_the_same_bits": same,
            "errors": {name: [float(f"{x:.3g}") for x in pair] for name, pair in errors.items()},
        }
    )


def as_numpy(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x).astype(np.float32) for x in jax.tree.leaves(tree)]


def attention_errors(ready: Prepared, got: list[np.ndarray]) -> Errors:
    """float32: sums over at most 700 terms of size about 4. bfloat16: softmax weights and results are each rounded, by
    2^-9 of the largest V. lse: scores are float32 sums of H products, of which |score| is at most some 8."""
    largest = np.nanmax(np.abs(np.asarray(ready.arrays["kv_pages"]).astype(np.float32)))
    if ready.arrays["kv_scales"] is not None:
        largest *= np.nanmax(np.asarray(ready.arrays["kv_scales"]))
    rounded = 2.0**-8 * largest if ready.case.dtype == "bfloat16" else 0.0
    return {
        "out": (largest_error(got[0], ready.want[0]), 2e-5 + rounded),
        "lse": (largest_error(got[1], ready.want[1]), max(5e-5, ready.case.head_dim * 2.0**-21)),
    }


def append_errors(ready: Prepared, got: list[np.ndarray]) -> Errors:
    """Outside the null page. Float pages: one cast, one place, equal bit by bit. Quantized ones: a chip divides to
    within an ulp or so, which seldom moves a value from the edge of one code to the other."""
    pages, want = got[0][1:], ready.want[0][1:]
    if ready.arrays["kv_scales"] is None:
        return {"pages": (largest_error(pages, want), 0.0)}
    step = 32.0 if ready.case.kv_dtype == "float8_e4m3fn" else 1.0  # between codes, at most
    scales, want_scales = got[1][1:], ready.want[1][1:]
    relative = np.abs(scales - want_scales) / np.maximum(np.abs(want_scales), 1e-30)
    return {
        "pages": (largest_error(pages, want), step),
        "codes_off": (float(np.mean(pages != want)), 1e-3),
        "scales": (float(relative.max()), 2.0**-20),
    }


def matmul_errors(ready: Prepared, got: list[np.ndarray]) -> Errors:
    """What rounding explains, as the kernel's own tests have it."""
    from jaxinfer.pallas_kernels.quantized_matmul.cases import tolerance

    return {"out": (largest_error(got[0], ready.want[0]), tolerance(ready.case))}


ERRORS: dict[str, Callable[[Prepared, list[np.ndarray]], Errors]] = {
    "ragged_paged_attention": attention_errors,
    "kv_append": append_errors,
    "quantized_matmul": matmul_errors,
}


def largest_error(got: np.ndarray, want: np.ndarray) -> float:
    """NaN, which is within no tolerance, if either has one."""
    with np.errstate(invalid="ignore"):  # -inf - -inf
        return float(np.where(got == want, 0.0, np.abs(got - want)).max(initial=0.0))


# kernels


def kernel_items(args: argparse.Namespace, hardware: Hardware | None, implementation: str) -> list[Item]:
    """A time per case of every kernel's `chip_cases`."""
    page_size = defaults.PAGE_SIZES[jax.devices()[0].platform]
    items = []
    for kernel, tiny in TINY.items():
        chosen = implementation if has(kernel, implementation) else "xla"
        bench = importlib.import_module(f"jaxinfer.pallas_kernels.{kernel}.bench")
        cases = bench.chip_cases(page_size)
        if args.tiny:
            cases = [case for case in all_cases(kernel) if case.name == tiny[0]]
        items += [
            (f"{kernel}/{chosen}/{case.name}", partial(time_case, kernel, case, chosen, hardware, args.tiny))
            for case in cases
        ]
    return [item for item in items if args.only in item[0]]


def time_case(
    kernel: str, case: Any, implementation: str, hardware: Hardware | None, tiny: bool, emit: Emit
) -> None:
    bench = importlib.import_module(f"jaxinfer.pallas_kernels.{kernel}.bench")
    options = of_device(getattr(bench, kernel), jax.devices()[0])
    # Without facts of the chip there is still a time; the limits then only say how often a call is repeated.
    bandwidth = hardware.memory_bandwidth if hardware else 1e12
    peak = hardware.peaks.get(case.dtype, 1e14) if hardware else 1e14
    facts = bench.card(case, gb_per_s=bandwidth / 1e9, gflop_per_s=peak / 1e9)
    bound_s = 1.0 if tiny else facts["bound_ms"] / 1e3  # the longer, the fewer calls
    seconds = bench.seconds_per_call(case, implementation, bound_s, **options)
    record = {"us": 1e6 * seconds, "mbytes": facts["mbytes"], "gflop": facts["mflops"] / 1e3}
    if hardware:
        record |= {"bound_us": 1e3 * facts["bound_ms"], "mbu": 1e6 * facts["mbytes"] / seconds / bandwidth}
        record["mfu"] = 1e6 * facts["mflops"] / seconds / peak
    emit({"result": "ok"} | {name: float(f"{x:.4g}") for name, x in record.items()})
