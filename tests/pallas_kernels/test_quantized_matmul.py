"""quantized_matmul in numpy, by the reference, in XLA and in the forms for CPUs; and the contract's refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels.quantized_matmul import quantized_matmul
from jaxinfer.pallas_kernels.quantized_matmul.cases import (
    AWKWARD_CASES,
    CASES_BY_NAME,
    MODEL_CASES,
    Case,
    capped,
    make_inputs,
    tolerance,
)

MULTIPLY = jax.jit(quantized_matmul, static_argnames=("w8a8", "out_dtype", "implementation"))
FAST = ("int8_7", "q4_1_7")  # of the models' cases; the rest differs in rows and takes longer


def numpy_matmul(inputs: dict[str, Any]) -> np.ndarray:
    """float64 [T, F], weight by weight as the contract words it."""
    x, qvalue = (np.asarray(inputs[name].astype(jnp.float32)).astype(np.float64) for name in ("x", "qvalue"))
    scale = np.asarray(inputs["scale"]).astype(np.float64)
    group = qvalue.shape[1] // scale.shape[1]
    weight = qvalue * np.repeat(scale, group, axis=1)
    if inputs["offset"] is not None:
        weight += np.repeat(np.asarray(inputs["offset"]), group, axis=1)
    if inputs["w8a8"]:
        amax = np.abs(x).max(axis=1, keepdims=True)
        x_scale = amax / 127
        x = x_scale * np.rint(np.divide(x, x_scale, where=amax > 0, out=np.zeros_like(x)))
    return x @ weight.T


def check(case: Case, implementation: str) -> None:
    inputs = make_inputs(case, seed=0)
    out = MULTIPLY(**inputs, implementation=implementation)
    assert out.dtype == (case.out_dtype or case.dtype)
    # A quotient that lies within float32's rounding of a half may round to the other int8: one in some 2^15 does.
    ties = 2 * 5 / 127 * 5 / case.in_dim**0.5 if case.w8a8 else 0.0
    np.testing.assert_allclose(
        np.asarray(out.astype(jnp.float32)), numpy_matmul(inputs), rtol=0, atol=tolerance(case) + ties
    )


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu"])
@pytest.mark.parametrize("case", AWKWARD_CASES, ids=lambda case: case.name)
def test_equals_numpy(case: Case, implementation: str) -> None:
    check(case, implementation)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name.endswith(FAST) else pytest.mark.slow)
        for case in MODEL_CASES
    ],
)
@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_equals_numpy_at_the_shapes_of_real_models(case: Case, implementation: str) -> None:
    """F up to 320, D up to 640, T up to 80: their last digits are what they are in the models."""
    check(capped(case, out_dim=320, in_dim=640), implementation)


@pytest.mark.parametrize("name", ["f32", "int4_group32_many_rows", "w8a8_many_rows"])
@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_same_call_twice_gives_the_same_bits(name: str, implementation: str) -> None:
    inputs = make_inputs(CASES_BY_NAME[name], seed=1)
    first, second = (np.asarray(MULTIPLY(**inputs, implementation=implementation)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_row_of_zeros_is_zero_with_quantized_activations() -> None:
    inputs = make_inputs(CASES_BY_NAME["f32_w8a8"], seed=0)
    for implementation in ("reference", "xla", "cpu"):
        out = np.asarray(MULTIPLY(**inputs, implementation=implementation))
        assert (out[-1] == 0).all() and np.isfinite(out).all()


GOOD: dict[str, Any] = {
    "x": jnp.zeros((2, 128)),
    "qvalue": jnp.zeros((64, 128), jnp.int8),
    "scale": jnp.zeros((64, 1)),
    "offset": None,
    "implementation": "xla",
}
GROUPS_OF_32 = {"scale": jnp.zeros((64, 4)), "qvalue": jnp.zeros((64, 128), jnp.int4)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((2, 128), jnp.float16)}, r"x is float16\[2, 128\] but must be \[T, D\]"),
        ({"x": jnp.zeros((0, 128))}, "must not be empty"),
        ({"qvalue": jnp.zeros((64, 96), jnp.int8)}, r"qvalue is int8\[64, 96\] but must be \[F, 128\]"),
        ({"qvalue": jnp.zeros((64, 128), jnp.uint8)}, "int8 or int4"),
        ({"scale": jnp.zeros((64, 8))}, r"scale is \[64, 8\] .* G one of \[1, 4, 2, 1\]"),
        ({"scale": jnp.zeros((63, 1))}, r"must be float32\[64, 1\]"),
        ({"scale": jnp.zeros((64, 1), jnp.bfloat16)}, r"scale is bfloat16"),
        ({"offset": jnp.zeros((64, 1))}, "offset goes with groups"),
        (GROUPS_OF_32 | {"offset": jnp.zeros((64, 2))}, r"offset is float32\[64, 2\]"),
        ({"out_dtype": jnp.int8}, "out_dtype is int8"),
        ({"w8a8": "fp8"}, "w8a8 is 'fp8'"),
        (GROUPS_OF_32 | {"w8a8": "int8"}, r"w8a8 needs int8 weights .* qvalue is int4"),
        ({"implementation": "fast"}, "choose one of"),
    ],
)
def test_refuses_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantized_matmul(**(GOOD | change))
