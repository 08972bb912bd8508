"""Named shapes of real models, and awkward ones, for the tests and benches of every implementation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PER_CHANNEL = 0  # group of a weight that has one scale per output


@dataclasses.dataclass(frozen=True)
class Case:
    """One product: T tokens times a weight [F, D]."""

    name: str
    num_tokens: int
    out_dim: int
    in_dim: int
    weight_dtype: str = "int8"
    group: int = PER_CHANNEL
    has_offset: bool = False
    dtype: str = "bfloat16"  # of x
    out_dtype: str | None = None
    w8a8: str | None = None


# weight -> F, D
MODELS: dict[str, tuple[int, int]] = {
    "smollm2_q": (576, 576),
    "smollm2_k": (192, 576),
    "smollm2_gate": (1536, 576),
    "smollm2_down": (576, 1536),
    "smollm2_unembed": (49152, 576),
    "llama3_8b_q": (4096, 4096),
    "llama3_8b_k": (1024, 4096),
    "llama3_8b_gate": (14336, 4096),
    "llama3_8b_down": (4096, 14336),
    "llama3_8b_unembed": (128256, 4096),
    "qwen3_0.6b_q": (2048, 1024),
    "qwen3_0.6b_o": (1024, 2048),
    "qwen3_0.6b_gate": (3072, 1024),
    "qwen3_0.6b_down": (1024, 3072),
    "gemma3_1b_q": (1024, 1152),
    "gemma3_1b_o": (1152, 1024),
    "gemma3_1b_gate": (6912, 1152),
    "gemma3_1b_down": (1152, 6912),
    "gemma3_1b_unembed": (262144, 1152),
}
ROWS = (1, 7, 8, 64, 512)
INT8: dict[str, Any] = {}
INT4: dict[str, Any] = {"weight_dtype": "int4", "group": 128, "has_offset": True}
Q4_1: dict[str, Any] = {"weight_dtype": "int4", "group": 32, "has_offset": True}
FORMS: dict[str, dict[str, Any]] = {
    "int8": INT8,
    "int4": INT4,
    "q4_1": Q4_1,
    "w8a8": {"w8a8": "int8"},
}


def model_case(weight: str, form: str, num_tokens: int, **changes: Any) -> Case:
    """The case of a weight of MODELS in a form of FORMS; int4 takes the largest group that divides D."""
    out_dim, in_dim = MODELS[weight]
    options = FORMS[form] | changes
    if options.get("group") and in_dim % options["group"]:
        options["group"] = next(group for group in (64, 32) if in_dim % group == 0)
    return Case(f"{weight}_{form}_{num_tokens}", num_tokens, out_dim, in_dim, **options)


MODEL_CASES = tuple(
    model_case(weight, form, num_tokens) for weight in MODELS for form in FORMS for num_tokens in ROWS
)
AWKWARD_CASES = (
    Case("f32", 5, 192, 256, dtype="float32"),
    Case("f32_33_rows", 33, 192, 256, dtype="float32"),
    Case("f32_many_rows", 70, 192, 256, dtype="float32"),
    Case("f32_w8a8", 5, 192, 256, dtype="float32", w8a8="int8"),
    Case("f32_int4_group32", 9, 128, 256, "int4", 32, True, dtype="float32"),
    Case("int4_per_channel", 3, 128, 256, "int4"),
    Case("int4_group64_no_offset", 17, 320, 512, "int4", 64),
    Case("int4_group128_many_rows", 70, 192, 512, "int4", 128, True),
    Case("int4_group32_many_rows", 70, 192, 576, "int4", 32, True),
    Case("q8_0", 6, 192, 256, "int8", 32),
    Case("into_f32", 2, 128, 256, out_dtype="float32"),
    Case("w8a8_without_int8_products", 7, 192, 256, w8a8="bfloat16"),
    Case("w8a8_one_row", 1, 192, 256, w8a8="int8"),
    Case("w8a8_many_rows", 70, 192, 384, w8a8="int8"),
    Case("ragged_out_dim", 4, 200, 256),
)
CASES_BY_NAME = {case.name: case for case in MODEL_CASES + AWKWARD_CASES}


def capped(case: Case, out_dim: int, in_dim: int, num_tokens: int = 80) -> Case:
    """The case with its dimensions cut down, to multiples of what they were multiples of (at most 128)."""

    def cut(size: int, limit: int) -> int:
        if size <= limit:
            return size
        step = max(power for power in (1, 2, 4, 8, 16, 32, 64, 128) if size % power == 0)
        return max(limit // step, 1) * step

    return dataclasses.replace(
        case,
        out_dim=cut(case.out_dim, out_dim),
        in_dim=cut(case.in_dim, in_dim),
        num_tokens=min(case.num_tokens, num_tokens),
    )


def make_inputs(case: Case, seed: int) -> dict[str, Any]:
    """The keyword arguments of quantized_matmul (all but `implementation`); the last row of x is zeros if T > 1.

    Products sum to about 1: x is normal, weights are of size 1 / sqrt(D).
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.num_tokens, case.in_dim), np.float32)
    if case.num_tokens > 1:
        x[-1] = 0.0
    top = {"int8": 127, "int4": 7}[case.weight_dtype]
    qvalue = rng.integers(-top - 1, top + 1, (case.out_dim, case.in_dim)).astype(np.int8)
    groups = 1 if case.group == PER_CHANNEL else case.in_dim // case.group
    unit = 1.7 / (top * np.sqrt(case.in_dim))
    scale, offset = (unit * rng.uniform(0.5, 1.5, (2, case.out_dim, groups))).astype(np.float32)
    return {
        "x": jnp.asarray(x, case.dtype),
        "qvalue": jnp.asarray(qvalue).astype(case.weight_dtype),
        "scale": jnp.asarray(scale),
        "offset": jnp.asarray(offset * 3.0) if case.has_offset else None,
        "w8a8": case.w8a8,
        "out_dtype": case.out_dtype,
    }


def structs(case: Case) -> tuple[Any, Any, Any, Any]:
    """Shapes and dtypes of x, qvalue, scale and offset (or None), x as it is multiplied: int8 with `w8a8`."""
    groups = 1 if case.group == PER_CHANNEL else case.in_dim // case.group
    scale = jax.ShapeDtypeStruct((case.out_dim, groups), jnp.float32)
    return (
        jax.ShapeDtypeStruct((case.num_tokens, case.in_dim), "int8" if case.w8a8 else case.dtype),
        jax.ShapeDtypeStruct((case.out_dim, case.in_dim), case.weight_dtype),
        scale,
        scale if case.has_offset else None,
    )


def tolerance(case: Case) -> float:
    """The largest absolute difference from the reference that rounding explains, for inputs of make_inputs.

    Terms are products of |x| up to 5 (8 million normal draws) and weights up to 5 / sqrt(D), D of them with random
    signs, so a sum of terms that are each off by r differs by some r x sqrt(D) x 5 / sqrt(D) = 5 r x (a few sigma).
    float32 sums of D terms: r = D x 2^-24 of 1. Weights that a group scales are rounded to bfloat16: r = 2^-9.
    A bfloat16 result of at most 8 is off by 2^-9 x 8.
    """
    out_dtype = case.out_dtype or case.dtype
    error = 8.0 * case.in_dim * 2.0**-24
    if case.group != PER_CHANNEL and case.dtype == "bfloat16":
        error += 8.0 * 2.0**-9
    if out_dtype == "bfloat16":
        error += 8.0 * 2.0**-9
    return error
