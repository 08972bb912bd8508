"""What the GPU kernel fetches and computes, as a value: its blocks, and the bytes and FLOPs counted from them."""

import dataclasses
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl

from jaxinfer.pallas_kernels.quantized_matmul.costs import Cost, Product, bits

COMPUTE_WARPGROUPS = 2
WGMMA_ROWS = 64  # outputs of one warpgroup
BLOCK_F = COMPUTE_WARPGROUPS * WGMMA_ROWS
SWIZZLE_RUN = 64  # inputs: the shortest run of a swizzle, 32 bytes, of int4
CHUNK = 128  # inputs that are widened in registers at once; whole groups
ELSE = "use implementation='xla'"


def refusal(out_dim: int, in_dim: int, compute_capability: tuple[int, int]) -> str | None:
    """Why the kernel does not take a weight [F, D] on such a GPU, and what would work; or None."""
    if compute_capability[0] != 9:
        return f"WGMMA exists on compute capability 9.0 only, not {compute_capability}: {ELSE}"
    if in_dim % SWIZZLE_RUN:
        return f"D {in_dim} is no multiple of {SWIZZLE_RUN}: {ELSE}"
    if out_dim % WGMMA_ROWS:
        return f"F {out_dim} is no multiple of {WGMMA_ROWS}: pad the weight, or {ELSE}"
    return None


class Blocks(NamedTuple):
    block_t: int  # tokens of a tile, N of WGMMA
    block_d: int  # inputs per step
    num_stages: int  # steps whose arrays are in shared memory at once
    num_splits: int  # parts of D that different blocks take


@dataclasses.dataclass(frozen=True)
class Schedule(Product):
    """All that the kernel is compiled for, and that the counts below need."""

    blocks: Blocks

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


def count(s: Schedule) -> Cost:
    """What a call moves and computes: every TMA copy cut at the array's end, and the sums of splits.

    Tiles that read the same weights or scales, and those that read the same x, run side by side: L2 reads each once.
    """
    groups = 1 if s.per_channel else s.in_dim // s.group
    moved = s.out_dim * s.in_dim * bits(s.weight_dtype) // 8
    moved += s.num_tokens * s.in_dim * bits(s.x_dtype) // 8
    moved += (1 + s.has_offset) * s.out_dim * groups * 4 + 4 * s.num_tokens * (s.x_dtype == "int8")
    moved += s.num_tokens * s.out_dim * bits(s.out_dtype) // 8
    if s.blocks.num_splits > 1:
        moved += 2 * s.blocks.num_splits * s.num_tokens * s.out_dim * 4
    flops = 2 * s.steps_t * s.blocks.block_t * s.steps_f * BLOCK_F * s.steps_d * s.blocks.block_d
    return Cost(moved, flops)
