"""The gated MLP of a layer: the contract, its checks, its implementations.

Shape letters: T tokens, D embed_dim, F mlp_dim. `cases.py` has the named shapes.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.contract import check_array, load

# implementation -> the module that holds a function `gated_mlp` of the signature below, less `implementation`
IMPLEMENTATIONS = {
    "reference": "jaxinfer.pallas_kernels.gated_mlp.reference",  # in float32: the truth
    "xla": "jaxinfer.pallas_kernels.gated_mlp.xla",  # the production path on TPU and GPU
    "cpu": "jaxinfer.pallas_kernels.gated_mlp.cpu",  # the production path on CPU
}
# activation -> the function of the gate, on float32
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
FLOAT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

# A matrix [F, D]; or what multiplies x [T, D] by one that is no plain array: (x, dtype of the result) -> [T, F]
Matrix = jax.Array | Callable[[jax.Array, jax.typing.DTypeLike], jax.Array]


def gated_mlp(
    x: jax.Array, gate: Matrix, up: Matrix, down: Matrix, *, activation: str = "silu", implementation: str
) -> jax.Array:
    """Gated linear unit (Shazeer, 2020; arXiv:2002.05202): down(activation(gate(x)) * up(x)).

    Products are accumulated in float32; what is between them is computed in float32, and may be rounded to x's dtype
    on the way in and is on the way out.

    Args:
        x: [T, D], float32, bfloat16 or float16.
        gate, up: [F, D], stored as published, outputs first; of x's dtype.
        down: [D, F], likewise.
        activation: a key of ACTIVATIONS.
        implementation: a key of IMPLEMENTATIONS. There is no default and no falling back.

    Returns:
        [T, D] in x's dtype.

    Raises:
        ValueError: a shape, dtype or option is outside this contract.
        NotImplementedError: the implementation is not part of this build.
    """
    if x.ndim != 2 or x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x is {x.dtype}{list(x.shape)} but must be [T, D] in float32, bfloat16 or float16")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")
    wide = next((w.shape[0] for w in (gate, up) if not callable(w)), None)
    for name, weight in (("gate", gate), ("up", up), ("down", down)):
        if not callable(weight):
            hidden = weight.shape[name == "down"] if wide is None else wide
            shape = (x.shape[1], hidden) if name == "down" else (hidden, x.shape[1])
            check_array(name, weight, shape, x.dtype)
    return load("gated_mlp", IMPLEMENTATIONS, implementation)(x, gate, up, down, activation)
