"""gated_mlp by every implementation against numpy in float64; and the contract's refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels.gated_mlp import IMPLEMENTATIONS, gated_mlp
from jaxinfer.pallas_kernels.gated_mlp.cases import CASES, Case, make_inputs

ARRAYS = jax.jit(gated_mlp, static_argnames="implementation")


def numpy_mlp(x, gate, up, down):
    x, gate, up, down = (np.asarray(a, np.float64) for a in (x, gate, up, down))
    gate = x @ gate.T
    return gate / (1 + np.exp(-gate)) * (x @ up.T) @ down.T


def tolerance(case: Case) -> float:
    """Halves and their product are of size 1 (up to 5), and a result is their sum of random signs: a few times 1.

    bfloat16 rounds each half, the product and the result by 2**-8 of it at most: 4 roundings of up to 5 sigma of sums
    that are each about as large as one term of size 1. float32 sums of D and F terms: as many units of 2**-24.
    """
    exact = 8.0 * (case.embed_dim + case.mlp_dim) * 2.0**-24
    return exact if case.dtype == "float32" else exact + 4 * 5 * float(jnp.finfo(case.dtype).eps) / 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_numpy(case, implementation):
    inputs = make_inputs(case, seed=0)
    with jax.default_matmul_precision("highest"):
        got = ARRAYS(**inputs, implementation=implementation)
    assert got.dtype == case.dtype
    want = numpy_mlp(**inputs)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=tolerance(case))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_what_multiplies_takes_the_place_of_a_matrix(name, implementation):
    """Twice the matrix, so that the answer says whether the function was asked."""
    inputs = make_inputs(Case("columns", 64, 24, 40), seed=1)
    matrix = inputs[name]
    want = numpy_mlp(**(inputs | {name: 2 * matrix}))

    def multiply(x, out_dtype):
        return (2 * jnp.dot(x, matrix.T.astype(x.dtype))).astype(out_dtype)

    got = gated_mlp(**(inputs | {name: multiply}), implementation=implementation)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=0.25)


@pytest.mark.parametrize(("num_tokens", "columns"), [(64, True), (128, True), (40, False), (1, False)])
def test_a_cpu_has_a_token_per_column_in_whole_blocks_of_tokens_alone(num_tokens, columns):
    inputs = make_inputs(Case("smollm2", num_tokens, 576, 1536), seed=0)
    lowered = ARRAYS.lower(**inputs, implementation="cpu").as_text()
    assert (f"tensor<1536x{num_tokens}xf32>" in lowered) == columns


@pytest.mark.parametrize("num_tokens", [6, 64])
def test_a_cpu_rounds_to_bfloat16_once_before_the_last_product(num_tokens):
    """silu and the product of the halves are in float32. The last matrix is the identity."""
    inputs = make_inputs(Case("square", num_tokens, 48, 48), seed=0) | {
        "down": jnp.eye(48, dtype=jnp.bfloat16)
    }
    got = ARRAYS(**inputs, implementation="cpu")
    # half a unit of bfloat16's 8 bits, and what float32 loses before
    np.testing.assert_allclose(
        np.asarray(got, np.float64), numpy_mlp(**inputs), rtol=2**-8 * (1 + 1e-3), atol=1e-5
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((2, 8), jnp.int8)}, r"x is int8\[2, 8\]"),
        ({"gate": jnp.zeros((5, 9))}, r"gate is float32\[5, 9\] but must be float32\[5, 8\]"),
        ({"up": jnp.zeros((6, 8))}, r"up is float32\[6, 8\] but must be float32\[5, 8\]"),
        ({"down": jnp.zeros((5, 8))}, r"down is float32\[5, 8\] but must be float32\[8, 5\]"),
        ({"up": jnp.zeros((5, 8), jnp.bfloat16)}, "up is bfloat16"),
        ({"implementation": "tpu"}, "choose one of"),
    ],
)
def test_refuses_by_name(change, message):
    good = {
        "x": jnp.zeros((2, 8)),
        "gate": jnp.zeros((5, 8)),
        "up": jnp.zeros((5, 8)),
        "down": jnp.zeros((8, 5)),
    }
    with pytest.raises(ValueError, match=message):
        gated_mlp(**({"implementation": "xla"} | good | change))
