"""The pure functions that model files are made of.

Shape letters: T tokens, D embed_dim, N query heads, K KV heads, H head_dim, F mlp_dim.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.gated_mlp import Matrix
from jaxinfer.pallas_kernels.gated_mlp import gated_mlp as kernel_of_gated_mlp
from jaxinfer.weights import quantization


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm over the axes of its weight (Zhang and Sennrich, 2019), computed in float32.

    Args:
      x: [..., D], or [..., N, H] for a norm over all heads at once.
      weight: f32[D], or f32[N, H].
      eps: added to the mean of squares.

    Returns:
      As x, in its dtype; NaN where the squares overflow, whose reciprocal root would make zeros of them.
    """
    x32 = x.astype(jnp.float32)
    axes = tuple(range(-weight.ndim, 0))
    mean = jnp.mean(x32 * x32, axis=axes, keepdims=True) + eps
    scale = jnp.where(jnp.isinf(mean), jnp.nan, jax.lax.rsqrt(mean))
    return (x32 * scale * weight).astype(x.dtype)


def project_heads(
    x: jax.Array, weight: Any, bias: jax.Array | None = None, *, kernels: quantization.Kernels
) -> jax.Array:
    """Project x [T, D] to heads by a weight leaf [heads, H, D]: [T, heads, H]. bias: f32[heads, H]."""
    out = quantization.project(x, weight, kernels=kernels)
    return out if bias is None else (out + bias).astype(x.dtype)


def merge_heads(
    x: jax.Array, weight: Any, bias: jax.Array | None = None, *, kernels: quantization.Kernels
) -> jax.Array:
    """Project heads x [T, N, H] by a weight leaf [D, N, H]: [T, D]. bias: f32[D] or None."""
    out = quantization.project(x, weight, in_axes=2, kernels=kernels)
    return out if bias is None else (out + bias).astype(x.dtype)


def gated_mlp(
    x: jax.Array,
    gate: Any,
    up: Any,
    down: Any,
    biases: tuple[jax.Array | None, jax.Array | None, jax.Array | None] = (None, None, None),
    *,
    activation: str = "silu",
    kernels: quantization.Kernels,
) -> jax.Array:
    """Gated MLP of x [T, D] by weight leaves gate and up [F, D] and down [D, F]: [T, D]; see the kernel's docstring.

    biases: of the three products, f32[F], f32[F] and f32[D]. activation: of the gate.
    """
    factors = (
        _with_bias(quantization.factor(weight, x), bias, kernels)
        for weight, bias in zip((gate, up, down), biases, strict=True)
    )
    return kernel_of_gated_mlp(x, *factors, activation=activation, implementation=kernels.gated_mlp)


def _with_bias(matrix: Matrix, bias: jax.Array | None, kernels: quantization.Kernels) -> Matrix:
    if bias is None:
        return matrix

    def multiply(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        if callable(matrix):
            product = matrix(x, jnp.float32)
        else:
            product = quantization.project(x, matrix, out_dtype=jnp.float32, kernels=kernels)
        return (product + bias).astype(dtype)

    return multiply
