"""Named shapes of real models, and awkward ones, for the tests of every implementation."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One MLP: T tokens, embed_dim D, mlp_dim F."""

    name: str
    num_tokens: int
    embed_dim: int
    mlp_dim: int
    dtype: str = "bfloat16"


CASES = (
    Case("smollm2_one_row", 1, 576, 1536),
    Case("smollm2_decode", 64, 576, 1536),
    Case("smollm2_prefill", 128, 576, 1536),
    Case("rows_of_part_of_a_block", 40, 192, 320),
    Case("too_large_for_columns", 64, 2048, 1032),
    Case("f32", 64, 192, 320, "float32"),
    Case("f32_one_row", 1, 24, 40, "float32"),
    Case("f16", 64, 64, 96, "float16"),
    Case("awkward", 5, 24, 50),
)


def make_inputs(case: Case, seed: int) -> dict[str, Any]:
    """The keyword arguments of gated_mlp (all but `implementation`): halves and results of about 1."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jnp.ndarray:
        values = rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
        return jnp.asarray(values, case.dtype)

    x = jnp.asarray(rng.standard_normal((case.num_tokens, case.embed_dim), np.float32), case.dtype)
    wide, narrow = case.mlp_dim, case.embed_dim
    return {"x": x, "gate": normal(wide, narrow), "up": normal(wide, narrow), "down": normal(narrow, wide)}
