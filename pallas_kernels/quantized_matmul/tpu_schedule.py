"""What the TPU kernel fetches and computes, as a value: its blocks, and the bytes and FLOPs counted from them."""

import dataclasses
from typing import NamedTuple

from jax.experimental import pallas as pl

from jaxinfer.pallas_kernels.quantized_matmul.costs import Cost, Product, bits

LANES = 128


class Blocks(NamedTuple):
    """The sizes of one step of the grid (T, F, D), and of the part of it that is computed at once."""

    block_t: int
    block_f: int
    block_d: int  # divides D
    tile_f: int  # divides block_f
    chunk: int  # inputs of one product where sums are scaled: as many as the matrix unit is deep


@dataclasses.dataclass(frozen=True)
class Schedule(Product):
    """All that the kernel is compiled for, and that the counts below need."""

    scales_sums: bool  # a group's sum is scaled (few rows), or its weights are (many rows)
    blocks: Blocks

    @property
    def grid(self) -> tuple[int, int, int]:
        b = self.blocks
        return (
            pl.cdiv(self.num_tokens, b.block_t),
            pl.cdiv(self.out_dim, b.block_f),
            self.in_dim // b.block_d,
        )

    @property
    def block_groups(self) -> int:
        return self.blocks.block_d // self.group


def count(s: Schedule) -> Cost:
    """What a call moves and computes: every copy of every step of the grid, padding in products included.

    A block whose index stays from one step to the next is not copied again, and blocks are cut at an array's end.
    """
    steps_t, steps_f, steps_d = s.grid
    b = s.blocks
    weights = s.out_dim * s.in_dim * bits(s.weight_dtype) // 8
    x = s.num_tokens * s.in_dim * bits(s.x_dtype) // 8
    moved = steps_t * weights if steps_f * steps_d > 1 else weights
    moved += steps_f * x if steps_d > 1 else x
    moved += s.num_tokens * s.out_dim * bits(s.out_dtype) // 8
    if s.per_channel:
        moved += steps_t * s.out_dim * 4
        moved += 4 * s.num_tokens * (s.x_dtype == "int8")
    else:
        moved += steps_t * (1 + s.has_offset) * s.out_dim * (s.in_dim // s.group) * 4
    spread = b.chunk // s.group if s.scales_sums and not s.per_channel else 1
    flops = 2 * steps_t * b.block_t * steps_f * b.block_f * s.in_dim * max(spread, 1)
    return Cost(moved, flops)
