"""dense_matmul for CPUs: one row of bfloat16 by multiplying and summing, all else as one dot_general."""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.cpu_sums import one_row_matmul
from jaxinfer.pallas_kernels.dense_matmul import xla


def dense_matmul(
    x: jax.Array,  # [T, D]
    weight: jax.Array,  # [F, D]
    *,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """See the package's docstring."""
    if x.shape[0] == 1 and x.dtype == jnp.bfloat16:
        return one_row_matmul(x, weight).astype(out_dtype)
    return xla.dense_matmul(x, weight, out_dtype=out_dtype)
