"""What a product has to move and compute whoever does it; the schedules of the kernels count what they really do."""

import dataclasses
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl


@dataclasses.dataclass(frozen=True)
class Product:
    """The sizes and dtypes of one call."""

    num_tokens: int  # T
    out_dim: int  # F
    in_dim: int  # D
    group: int  # D where there is one scale per output
    has_offset: bool
    x_dtype: jax.typing.DTypeLike  # int8: w8a8
    weight_dtype: jax.typing.DTypeLike
    out_dtype: jax.typing.DTypeLike

    @property
    def per_channel(self) -> bool:
        return self.group == self.in_dim


class Cost(NamedTuple):
    bytes: int  # between HBM and the chip
    flops: int  # 2 per multiply-add


def least(p: Product) -> Cost:
    """Each array read or written once, and no padding."""
    groups = 1 if p.per_channel else p.in_dim // p.group
    moved = p.out_dim * p.in_dim * bits(p.weight_dtype) // 8
    moved += p.num_tokens * (p.in_dim * bits(p.x_dtype) + p.out_dim * bits(p.out_dtype)) // 8
    moved += (1 + p.has_offset) * p.out_dim * groups * 4 + 4 * p.num_tokens * (p.x_dtype == "int8")
    return Cost(moved, 2 * p.num_tokens * p.out_dim * p.in_dim)


def estimate(cost: Cost) -> pl.CostEstimate:
    """The compiler's hint for a call."""
    return pl.CostEstimate(flops=cost.flops, transcendentals=0, bytes_accessed=cost.bytes)


def bits(dtype: jax.typing.DTypeLike) -> int:
    return jax.dtypes.itemsize_bits(dtype)
