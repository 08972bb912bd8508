"""The pure functions that model files are made of.

Shape letters: T tokens, D embed_dim, N query heads, K KV heads, H head_dim, F mlp_dim.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import quantization

# Where `gated_mlp` has a token per column, on CPU in bfloat16 (log/cpu-products.md): with a multiple of so many tokens,
# whole blocks of the library's products, and with matrices of at most so many weights, which stay in the cache while
# blocks of tokens come by.
COLUMNS, COLUMNS_SIZE = 64, 2 << 20


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm over the last axis (Zhang and Sennrich, 2019), computed in float32.

    Args:
      x: [..., D].
      weight: f32[D].
      eps: added to the mean of squares.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
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
    """(cos, sin), each f32[T, H / 2], of positions i32[T]. Made once per step, read by all layers."""
    angles = positions.astype(jnp.float32)[:, None] * rope_frequencies(rope)
    table = jnp.cos(angles), jnp.sin(angles)
    # XLA:CPU would compute both again in each fusion that reads them: for every head of every layer.
    return jax.lax.platform_dependent(*table, cpu=_keep, default=lambda *table: table)


def _keep(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return jax.lax.optimization_barrier(arrays)


def apply_rope(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate x [T, heads, H] by `table`; pairs are (i, i + H / 2), as Hugging Face checkpoints have them."""
    # XLA:CPU writes the halves, what joins them, and that rounded, each to memory: there the halves are rounded before.
    return jax.lax.platform_dependent(
        x,
        *table,
        cpu=partial(_rotate, halves_dtype=x.dtype),
        default=partial(_rotate, halves_dtype=jnp.float32),
    )


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, halves_dtype: Any) -> jax.Array:
    cos, sin = cos[:, None, :], sin[:, None, :]
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    halves = low * cos - high * sin, high * cos + low * sin
    return jnp.concatenate([half.astype(halves_dtype) for half in halves], axis=-1).astype(x.dtype)


def project_heads(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Project x [T, D] to heads by a weight leaf [heads, H, D]: [T, heads, H]. bias: f32[heads, H]."""
    out = quantization.project(x, weight)
    return out if bias is None else (out + bias).astype(x.dtype)


def merge_heads(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Project heads x [T, N, H] by a weight leaf [D, N, H]: [T, D]. bias: f32[D] or None."""
    out = quantization.project(x, weight, in_axes=2)
    return out if bias is None else (out + bias).astype(x.dtype)


def gated_mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x)).

    Args:
      x: [T, D].
      gate, up: weight leaves [F, D].
      down: weight leaf [D, F].
    """
    plain = [quantization.plain_matrix(weight, x.shape[0]) for weight in (gate, up, down)]
    if (
        x.shape[0] % COLUMNS == 0
        and x.dtype == jnp.bfloat16
        and all(
            matrix is not None and matrix.dtype == x.dtype and matrix.size <= COLUMNS_SIZE for matrix in plain
        )
    ):
        return jax.lax.platform_dependent(x, *plain, cpu=_gated_mlp_of_columns, default=_gated_mlp)
    return _gated_mlp(x, gate, up, down)


def _gated_mlp(x: jax.Array, gate: Any, up: Any, down: Any) -> jax.Array:
    halves = (quantization.project(x, weight, out_dtype=jnp.float32) for weight in (gate, up))
    # XLA:CPU rounds to bfloat16 after each operation of silu, in several instructions: there it is all in float32.
    hidden = jax.lax.platform_dependent(
        *halves,
        cpu=partial(_gated, compute_dtype=jnp.float32, out_dtype=x.dtype),
        default=partial(_gated, compute_dtype=x.dtype, out_dtype=x.dtype),
    )
    return quantization.project(hidden, down)


def _gated_mlp_of_columns(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The same with a token per column in between, from plain matrices.

    XLA:CPU's products bring their second operand into another order first, which costs less for x than for a weight.
    """
    dot = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    gate, up = (dot(weight, x, (((1,), (1,)), ((), ()))) for weight in (gate, up))  # f32[F, T]
    hidden = _gated(gate, up, compute_dtype=jnp.float32, out_dtype=x.dtype)
    out = dot(down, hidden, (((1,), (0,)), ((), ())))  # f32[D, T]
    # Without the barrier XLA turns the product around again.
    return jax.lax.optimization_barrier(out).T.astype(x.dtype)


def _gated(gate: jax.Array, up: jax.Array, compute_dtype: Any, out_dtype: Any) -> jax.Array:
    gate, up = gate.astype(compute_dtype), up.astype(compute_dtype)
    return (jax.nn.silu(gate) * up).astype(out_dtype)
