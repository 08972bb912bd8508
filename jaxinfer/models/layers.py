"""The pure functions that model files are made of.

Shape letters: T tokens, D embed_dim, N query heads, K KV heads, H head_dim, F mlp_dim.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.pallas_kernels.gated_mlp import gated_mlp as kernel_of_gated_mlp
from jaxinfer.weights import quantization


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm over the last axis (Zhang and Sennrich, 2019), computed in float32.

    Args:
      x: [..., D].
      weight: f32[D].
      eps: added to the mean of squares.

    Returns:
      [..., D] in x's dtype; NaN where the squares overflow, whose reciprocal root would make zeros of them.
    """
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps
    scale = jnp.where(jnp.isinf(mean), jnp.nan, jax.lax.rsqrt(mean))
    return (x32 * scale * weight).astype(x.dtype)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and how it is stretched to long contexts.

    kind: "default"; "linear" (positions divided by `factor`; Chen et al., 2023); "llama3" (low
    frequencies divided by `factor`, high ones kept, a ramp between; Llama 3.1's own rule); or "factors"
    (each frequency divided by its entry of `factors`, as GGUF files store the llama3 rule).
    """

    theta: float
    head_dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] | None = None


def rope_frequencies(rope: RopeConfig) -> np.ndarray:
    """Angle per position of each rotated pair: f32[H / 2]."""
    exponent = np.arange(0, rope.head_dim, 2, dtype=np.float32) / np.float32(rope.head_dim)
    freqs = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "linear":
        return freqs / np.float32(rope.factor)
    if rope.kind == "factors":
        return freqs / np.asarray(rope.factors, np.float32)
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / freqs
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        ramp = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        mixed = (1 - ramp) * freqs / rope.factor + ramp * freqs
        scaled = np.where(wavelength > low, freqs / rope.factor, np.where(wavelength < high, freqs, mixed))
        return scaled.astype(np.float32)
    return freqs


def rope_table(rope: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each f32[T, H / 2], of positions i32[T]. Made once per step, read by all layers.

    A negative position is none (`batch.next_decode`): its numbers are NaN, and so are the logits behind it.
    """
    known = jnp.where(positions < 0, jnp.nan, positions.astype(jnp.float32))
    angles = known[:, None] * rope_frequencies(rope)
    # XLA:CPU would compute both again in each fusion that reads them: for every head of every layer.
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def apply_rope(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate x [T, heads, H] by `table`; pairs are (i, i + H / 2), as Hugging Face checkpoints have them."""
    cos, sin = (part[:, None, :] for part in table)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    halves = low * cos - high * sin, high * cos + low * sin
    # Rounded before they are joined: XLA:CPU writes the halves, what joins them, and that rounded, each to memory.
    return jnp.concatenate([half.astype(x.dtype) for half in halves], axis=-1)


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


def gated_mlp(x: jax.Array, gate: Any, up: Any, down: Any, *, kernels: quantization.Kernels) -> jax.Array:
    """SwiGLU of x [T, D] by weight leaves gate and up [F, D] and down [D, F]: [T, D]; see the kernel's docstring."""
    factors = (quantization.factor(weight, x) for weight in (gate, up, down))
    return kernel_of_gated_mlp(x, *factors, implementation=kernels.gated_mlp)
