"""Rotary position embedding in all its kinds: frequencies of pairs, tables of angles, the turn of heads.

Pairs are (i, i + R / 2) of the first R numbers of a head. Checkpoints whose pairs are neighbours have the rows of their
query and key matrices put into this order as they are read (`Leaf.interleaved`); products of the two do not change.

Shape letters: T tokens, H head_dim, R numbers of a head that are turned.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and how it is stretched to long contexts.

    kind:
      "default".
      "linear": positions divided by `factor` (Chen et al., 2023).
      "dynamic": a larger theta for contexts over `original_max_position` (NTK-aware; bloc97, 2023).
      "yarn": low frequencies divided by `factor`, high ones kept, a ramp between (Peng et al., 2023).
      "longrope": each frequency divided by its entry of `short_factors` or, for contexts over
        `original_max_position`, of `factors` (Ding et al., 2024).
      "llama3": Llama 3.1's own ramp.
      "proportional": of the pairs of a whole head only the first `partial` turn (Gemma 4).
      "factors": each frequency divided by its entry of `factors`, as GGUF files store a rule.
    partial: how much of a head turns.
    attention_factor: what sines and cosines are multiplied by.
    context: length in tokens of the longest text that is to be read, which "dynamic" and "longrope" are chosen by.
      transformers chooses by the text in hand; keys that lie in a cache cannot change, so one choice serves all.
    query_scale_beta: queries at position p are multiplied by 1 + beta * log(1 + floor(p / original_max_position)),
      as Llama 4 and Ministral 3 do; 0: by nothing.
    """

    theta: float
    head_dim: int
    kind: str = "default"
    partial: float = 1.0
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    original_max_position: int = 8192
    context: int = 0
    factors: tuple[float, ...] | None = None
    short_factors: tuple[float, ...] | None = None
    query_scale_beta: float = 0.0

    @property
    def dim(self) -> int:
        """R, the numbers of a head that are turned, or stand in the table with an angle of zero."""
        return self.head_dim if self.kind == "proportional" else int(self.head_dim * self.partial)


class RopeTable(NamedTuple):
    """Of each token the angles of its pairs."""

    cos: jax.Array  # f32[T, R / 2]
    sin: jax.Array  # f32[T, R / 2]
    query_scale: jax.Array | None  # f32[T]


def rope_frequencies(rope: RopeConfig) -> np.ndarray:
    """Angle per position of each pair: f32[R / 2]."""
    if rope.kind == "dynamic" and rope.context > rope.original_max_position:
        stretch = rope.factor * rope.context / rope.original_max_position - (rope.factor - 1)
        return _powers(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim)
    freqs = _powers(rope.theta, rope.dim)
    if rope.kind == "linear":
        return freqs / np.float32(rope.factor)
    if rope.kind == "proportional":
        turned = int(rope.partial * rope.head_dim // 2)
        return np.where(np.arange(rope.dim // 2) < turned, freqs / np.float32(rope.factor), np.float32(0))
    if rope.kind == "factors":
        return freqs / np.asarray(rope.factors, np.float32)
    if rope.kind == "longrope":
        is_long = rope.context > rope.original_max_position
        return freqs / np.asarray(rope.factors if is_long else rope.short_factors, np.float32)
    if rope.kind == "yarn":
        return _yarn(rope, freqs)
    if rope.kind == "llama3":
        return _llama3(rope, freqs)
    return freqs


def _powers(theta: float, dim: int) -> np.ndarray:
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (1.0 / np.float32(theta) ** exponent).astype(np.float32)


def _yarn(rope: RopeConfig, freqs: np.ndarray) -> np.ndarray:
    def pair(turns: float) -> float:
        """The pair, as a number with a fraction, that turns so often over the original context."""
        return (
            rope.dim
            * math.log(rope.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001
    slowed = np.clip((np.arange(len(freqs), dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    return (freqs / np.float32(rope.factor) * slowed + freqs * (1 - slowed)).astype(np.float32)


def _llama3(rope: RopeConfig, freqs: np.ndarray) -> np.ndarray:
    wavelength = 2 * math.pi / freqs
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    ramp = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - ramp) * freqs / rope.factor + ramp * freqs
    scaled = np.where(wavelength > low, freqs / rope.factor, np.where(wavelength < high, freqs, mixed))
    return scaled.astype(np.float32)


def rope_table(rope: RopeConfig, positions: jax.Array) -> RopeTable:
    """The table of positions i32[T]. Made once per step, read by all layers.

    A negative position is none (`batch.next_decode`): its numbers are NaN, and so are the logits behind it.
    """
    known = jnp.where(positions < 0, jnp.nan, positions.astype(jnp.float32))
    angles = known[:, None] * rope_frequencies(rope)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor != 1:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    query_scale = None
    if rope.query_scale_beta:
        periods = jnp.floor(known / rope.original_max_position)
        query_scale = 1 + rope.query_scale_beta * jnp.log1p(periods)
    # XLA:CPU would compute both again in each fusion that reads them: for every head of every layer.
    cos, sin = jax.lax.optimization_barrier((cos, sin))
    return RopeTable(cos, sin, query_scale)


def apply_rope(x: jax.Array, table: RopeTable) -> jax.Array:
    """Turns the first R numbers of each head of x [T, heads, H] by a table."""
    cos, sin = (part[:, None, :] for part in (table.cos, table.sin))
    half = cos.shape[-1]
    x32 = x.astype(jnp.float32)
    low, high = x32[..., :half], x32[..., half : 2 * half]
    halves = low * cos - high * sin, high * cos + low * sin
    # Rounded before they are joined: XLA:CPU writes the halves, what joins them, and that rounded, each to memory.
    parts = [part.astype(x.dtype) for part in halves]
    return jnp.concatenate([*parts, x[..., 2 * half :]] if 2 * half < x.shape[-1] else parts, axis=-1)


def apply_rope_to_query(q: jax.Array, table: RopeTable) -> jax.Array:
    """Turns queries [T, N, H], and scales them where the table says so."""
    q = apply_rope(q, table)
    if table.query_scale is None:
        return q
    return (q * table.query_scale[:, None, None]).astype(q.dtype)
