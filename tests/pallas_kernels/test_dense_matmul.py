"""dense_matmul by every implementation against numpy in float64; and the contract's refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels.cpu_sums import one_row_matmul
from jaxinfer.pallas_kernels.dense_matmul import IMPLEMENTATIONS, dense_matmul
from jaxinfer.pallas_kernels.dense_matmul.cases import CASES, make_inputs

MULTIPLY = jax.jit(dense_matmul, static_argnames=("out_dtype", "implementation"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_numpy(case, implementation):
    """Sums of D terms in float32: D units of 2**-24 of the terms' sum. The result is rounded once more."""
    inputs = make_inputs(case, seed=0)
    with jax.default_matmul_precision("highest"):
        got = MULTIPLY(**inputs, implementation=implementation)
    x, weight = (np.asarray(inputs[name], np.float64) for name in ("x", "weight"))
    out_dtype = jnp.dtype(case.out_dtype or case.dtype)
    want = x @ weight.T
    bound = case.in_dim * 2.0**-24 * (np.abs(x) @ np.abs(weight).T)
    bound += np.abs(want) * float(jnp.finfo(out_dtype).eps) if out_dtype != jnp.float32 else 0
    assert got.dtype == out_dtype and got.shape == want.shape
    assert (np.abs(np.asarray(got, np.float64) - want) <= bound).all()


@pytest.mark.parametrize("size", [100, 576, 1536, 64 * 37])
def test_one_row_times_int8_is_exact_while_sums_fit_float32(size):
    """Of codes below 32 every partial sum is a whole number below 2**24."""
    rng = np.random.default_rng(0)
    x, weight = rng.integers(-31, 32, (1, size)), rng.integers(-31, 32, (40, size))
    got = jax.jit(one_row_matmul)(jnp.asarray(x, jnp.int8), jnp.asarray(weight, jnp.int8))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, x @ weight.T)


def test_one_row_of_bfloat16_is_never_widened_in_memory_for_a_cpu():
    # Bug: XLA:CPU hands the product to a loop of its own, or keeps the weight in float32 beside the one that is read.
    x, weight = jnp.ones((1, 576), jnp.bfloat16), jnp.ones((4096, 576), jnp.bfloat16)
    compiled = MULTIPLY.lower(x, weight, implementation="cpu").compile()
    assert " dot(" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < weight.size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((2, 8), jnp.int8)}, r"x is int8\[2, 8\] but must be \[T, D\]"),
        ({"x": jnp.zeros(8)}, r"x is float32\[8\]"),
        ({"weight": jnp.zeros((3, 9))}, r"weight is float32\[3, 9\] but must be float32\[3, 8\]"),
        ({"weight": jnp.zeros((3, 8), jnp.bfloat16)}, "weight is bfloat16"),
        ({"out_dtype": jnp.int8}, "out_dtype is int8"),
        ({"implementation": "fast"}, "choose one of"),
    ],
)
def test_refuses_by_name(change, message):
    good = {"x": jnp.zeros((2, 8)), "weight": jnp.zeros((3, 8)), "implementation": "xla"}
    with pytest.raises(ValueError, match=message):
        dense_matmul(**(good | change))
