"""Block sizes of the GPU kernels by compute capability: rules from published limits, none from a measurement.

Nothing here has run on a GPU yet. A device whose measurements disagree gets its own row.
"""

from typing import NamedTuple

KIB = 1024


class DecodeLimits(NamedTuple):
    """What the decode schedule needs to know of one compute capability."""

    stage_bytes: int  # of K|V buffers in one block: with q, weights and out, two blocks share an SM
    target_blocks: int  # two on each SM: a grid with fewer is cut into splits
    block_bytes: int  # of shared memory that one block can have


# Shared memory of an SM is 228 KiB on 9.0 and 10.x, 164 KiB on 8.0 and 8.7, 100 KiB on 8.6, 8.9 and 12.x, and one
# block can have 1 KiB less. SMs are those of the largest chip of each (H100 132, B200 148, A100 108, L40S 142,
# RTX 5090 170).
DECODE_LIMITS = {
    (8, 0): DecodeLimits(64 * KIB, 216, 163 * KIB),
    (8, 6): DecodeLimits(32 * KIB, 168, 99 * KIB),
    (8, 7): DecodeLimits(64 * KIB, 32, 163 * KIB),
    (8, 9): DecodeLimits(32 * KIB, 284, 99 * KIB),
    (9, 0): DecodeLimits(72 * KIB, 264, 227 * KIB),
    (10, 0): DecodeLimits(72 * KIB, 296, 227 * KIB),
    (10, 3): DecodeLimits(72 * KIB, 320, 227 * KIB),
    (12, 0): DecodeLimits(32 * KIB, 340, 99 * KIB),
    (12, 1): DecodeLimits(32 * KIB, 96, 99 * KIB),
}
MAX_BLOCK_KV = 64  # kv tokens of one step
MIN_BLOCK_KV = 32  # the least columns that four warps can share
MAX_STAGES = 4
# Registers of a decode thread, of its 255, that hold what decode_registers counts. With more ptxas spills.
MOST_DECODE_REGISTERS = 200


def decode_blocks(
    head_dim: int,
    page_size: int,
    kv_itemsize: int,
    tile_rows: int,
    m_warps: int,
    compute_capability: tuple[int, int],
) -> tuple[int, int]:
    """(block_kv, num_stages): two stages at least, in stage_bytes where MIN_BLOCK_KV allows it."""
    stage_bytes = DECODE_LIMITS[compute_capability].stage_bytes
    token_bytes = 2 * head_dim * kv_itemsize
    wide_bytes = 2 * head_dim * 2 if kv_itemsize == 1 else 0  # a token of 8-bit pages, widened apart
    block_kv = MAX_BLOCK_KV if head_dim <= 128 else MIN_BLOCK_KV
    if decode_registers(head_dim, tile_rows, m_warps, block_kv) > MOST_DECODE_REGISTERS:
        block_kv = MIN_BLOCK_KV
    if block_kv * (2 * token_bytes + wide_bytes) > stage_bytes:
        block_kv = MIN_BLOCK_KV
    if kv_itemsize == 1:
        block_kv = min(block_kv, page_size)  # its scales are read as one run of one page
    num_stages = (stage_bytes - block_kv * wide_bytes) // (block_kv * token_bytes)
    return block_kv, min(max(num_stages, 2), MAX_STAGES)


def decode_registers(head_dim: int, tile_rows: int, m_warps: int, block_kv: int) -> int:
    """Of a thread for q, a block of K or V, float32 out and scores, and weights: 128 threads share out and scores; of q
    and weights each warp holds the rows of its m_warps-th, of K or V the columns of its (4 / m_warps)-th."""
    q, weights = (tile_rows * size // (64 * m_warps) for size in (head_dim, block_kv))
    return q + block_kv * head_dim * m_warps // 256 + tile_rows * (head_dim + block_kv) // 128 + weights


def most_decode_bytes(tile_rows: int, head_dim: int, compute_capability: tuple[int, int]) -> int:
    """Shared memory of a decode block at most: q, float32 out and weights of its tile, K|V buffers, barriers."""
    tile_bytes = tile_rows * (head_dim * (2 + 4) + MAX_BLOCK_KV * 2)
    # The same with 8-bit pages: half of it, and as much widened.
    least_stages = 2 * MIN_BLOCK_KV * 2 * head_dim * 2
    return tile_bytes + max(DECODE_LIMITS[compute_capability].stage_bytes, least_stages) + KIB


# Registers of a prefill thread that hold sums, scores and weights. ptxas gives a thread 168 in a block of three
# warpgroups and 255 in one of two (it ignores setmaxnreg, log/chips.md); the rest is addresses, peaks and masks.
MOST_PREFILL_REGISTERS = 144


def prefill_blocks(head_dim: int, kv_itemsize: int) -> tuple[int, int]:
    """(computing warpgroups, block_kv): the largest blocks, 64 or 128, that spill no registers.

    A thread holds half a row of 64: head_dim / 2 sums, block_kv / 2 scores and block_kv / 4 registers of weights. K
    and V are read once for all computing warpgroups, whatever block_kv is, and less lies above the diagonal in
    smaller blocks; larger ones only wait less often. Two computing warpgroups halve the reads of K and V.
    """
    compute_warpgroups = 2 if head_dim <= 128 else 1
    # Widened 8-bit pages need the shared memory of longer blocks.
    fits_long = kv_itemsize == 2 and head_dim // 2 + 128 // 2 + 128 // 4 <= MOST_PREFILL_REGISTERS
    return compute_warpgroups, 128 if fits_long else 64
