"""What the GPU kernel fetches and computes, as a value: its blocks, and the bytes and FLOPs counted from them."""

import dataclasses
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl

COMPUTE_WARPGROUPS = 2
WGMMA_ROWS = 64  # outputs of one warpgroup
BLOCK_F = COMPUTE_WARPGROUPS * WGMMA_ROWS
CHUNK = 128  # inputs that are widened in registers at once; whole groups


class Blocks(NamedTuple):
    block_t: int  # tokens of a tile, N of WGMMA
    block_d: int  # inputs per step
    num_stages: int  # steps whose arrays are in shared memory at once
    num_splits: int  # parts of D that different blocks take


@dataclasses.dataclass(frozen=True)
class Schedule:
    """All that the kernel is compiled for, and that the counts below need."""

    num_tokens: int  # T
    out_dim: int  # F
    in_dim: int  # D
    group: int  # D where there is one scale per output
    has_offset: bool
    x_dtype: jax.typing.DTypeLike  # int8: w8a8
    weight_dtype: jax.typing.DTypeLike
    out_dtype: jax.typing.DTypeLike
    blocks: Blocks

    @property
    def per_channel(self) -> bool:
        return self.group == self.in_dim

    @property
    def steps_t(self) -> int:
        return pl.cdiv(self.num_tokens, self.blocks.block_t)

    @property
    def steps_f(self) -> int:
        return pl.cdiv(self.out_dim, BLOCK_F)

    @property
    def steps_d(self) -> int:
        return pl.cdiv(self.in_dim, self.blocks.block_d)

    @property
    def steps_of_split(self) -> int:
        return pl.cdiv(self.steps_d, self.blocks.num_splits)

    @property
    def block_groups(self) -> int:
        return self.blocks.block_d // self.group

    @property
    def sum_dtype(self) -> jax.typing.DTypeLike:
        """Of what the kernel leaves: parts of a sum are float32."""
        return self.out_dtype if self.blocks.num_splits == 1 else "float32"


class Cost(NamedTuple):
    bytes: int  # between device memory and the chip
    flops: int  # 2 per multiply-add


def count(s: Schedule) -> Cost:
    """What a call moves and computes: every TMA copy cut at the array's end, and the sums of splits.

    Tiles that read the same weights or scales, and those that read the same x, run side by side: L2 reads each once.
    """
    groups = 1 if s.per_channel else s.in_dim // s.group
    moved = s.out_dim * s.in_dim * _bits(s.weight_dtype) // 8
    moved += s.num_tokens * s.in_dim * _bits(s.x_dtype) // 8
    moved += (1 + s.has_offset) * s.out_dim * groups * 4 + 4 * s.num_tokens * (s.x_dtype == "int8")
    moved += s.num_tokens * s.out_dim * _bits(s.out_dtype) // 8
    if s.blocks.num_splits > 1:
        moved += 2 * s.blocks.num_splits * s.num_tokens * s.out_dim * 4
    flops = 2 * s.steps_t * s.blocks.block_t * s.steps_f * BLOCK_F * s.steps_d * s.blocks.block_d
    return Cost(moved, flops)


def least(s: Schedule) -> Cost:
    """Each array read or written once, and no padding."""
    groups = 1 if s.per_channel else s.in_dim // s.group
    moved = s.out_dim * s.in_dim * _bits(s.weight_dtype) // 8
    moved += s.num_tokens * (s.in_dim * _bits(s.x_dtype) + s.out_dim * _bits(s.out_dtype)) // 8
    moved += (1 + s.has_offset) * s.out_dim * groups * 4 + 4 * s.num_tokens * (s.x_dtype == "int8")
    return Cost(moved, 2 * s.num_tokens * s.out_dim * s.in_dim)


def estimate(s: Schedule) -> pl.CostEstimate:
    """The compiler's hint for a call."""
    cost = count(s)
    return pl.CostEstimate(flops=cost.flops, transcendentals=0, bytes_accessed=cost.bytes)


def _bits(dtype: jax.typing.DTypeLike) -> int:
    return jax.dtypes.itemsize_bits(dtype)
