"""Named shapes of real models, and awkward ones, for the tests of every implementation."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One product: T tokens times a matrix [F, D]."""

    name: str
    num_tokens: int
    out_dim: int
    in_dim: int
    dtype: str = "bfloat16"
    out_dtype: str | None = None


CASES = (
    Case("one_row", 1, 192, 576),
    Case("one_row_down", 1, 576, 1536),
    Case("one_row_into_f32", 1, 50, 1536, out_dtype="float32"),
    Case("one_row_of_awkward_size", 1, 50, 300),
    Case("one_row_of_a_prime_of_lanes", 1, 50, 64 * 37),
    Case("one_row_f32", 1, 192, 576, "float32"),
    Case("one_row_f16", 1, 50, 96, "float16"),
    Case("two_rows", 2, 192, 576),
    Case("rows_f32", 7, 200, 300, "float32"),
    Case("many_rows", 64, 320, 576),
    Case("many_rows_into_f32", 70, 192, 384, out_dtype="float32"),
)


def make_inputs(case: Case, seed: int) -> dict[str, Any]:
    """The keyword arguments of dense_matmul (all but `implementation`). Products sum to about 1."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.num_tokens, case.in_dim), np.float32)
    weight = rng.standard_normal((case.out_dim, case.in_dim), np.float32) / np.float32(case.in_dim**0.5)
    return {
        "x": jnp.asarray(x, case.dtype),
        "weight": jnp.asarray(weight, case.dtype),
        "out_dtype": case.out_dtype,
    }
