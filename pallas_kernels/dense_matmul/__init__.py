"""Activations times a plain matrix: the contract, its checks, its implementations.

Shape letters: T tokens, D inputs, F outputs of the matrix. `cases.py` has the named shapes.
"""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.contract import check_array, load

# implementation -> the module that holds a function `dense_matmul` of the signature below, less `implementation`
IMPLEMENTATIONS = {
    "reference": "jaxinfer.pallas_kernels.dense_matmul.reference",  # in float32 whatever JAX's precision is: the truth
    "xla": "jaxinfer.pallas_kernels.dense_matmul.xla",  # the production path on TPU and GPU
    "cpu": "jaxinfer.pallas_kernels.dense_matmul.cpu",  # the production path on CPU
}
FLOAT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def dense_matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str,
) -> jax.Array:
    """x times the transposed weight, accumulated in float32.

    Products of float32 have JAX's default matmul precision, but for the reference's, which are whole.

    Args:
        x: [T, D], float32, bfloat16 or float16.
        weight: [F, D], stored as published, outputs first; of x's dtype.
        out_dtype: of the result, one of these dtypes; None: x's.
        implementation: a key of IMPLEMENTATIONS. There is no default and no falling back.

    Returns:
        [T, F] in out_dtype.

    Raises:
        ValueError: a shape, dtype or option is outside this contract.
        NotImplementedError: the implementation is not part of this build.
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if x.ndim != 2 or x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x is {x.dtype}{list(x.shape)} but must be [T, D] in float32, bfloat16 or float16")
    check_array("weight", weight, (weight.shape[0], x.shape[1]), x.dtype)
    if out_dtype not in FLOAT_DTYPES:
        raise ValueError(f"out_dtype is {out_dtype} but must be float32, bfloat16 or float16")
    return load("dense_matmul", IMPLEMENTATIONS, implementation)(x, weight, out_dtype=out_dtype)
