"""Block sizes of the TPU kernel by a rule from shapes.

The rule rests on counted bytes and FLOPs (`tpu_costs`), not on measurements: nothing here has run on a TPU yet. A
device kind whose measurements disagree gets a table here, before the rule.
"""

import math
from typing import Any

import jax

from jaxinfer.pallas_kernels.ragged_paged_attention.tpu_schedule import LANES, Blocks, cdiv

DECODE_MAX_Q_LEN = 16  # rows of up to so many query tokens take the decode path
FETCH_BYTES = 2 << 20  # of one of the two kv buffers: hides a copy's start, far below 64 MiB of VMEM
DECODE_TILE_ROWS = 16  # of one tile: a register of packed sublanes; a row of one token wastes no more
PREFILL_TILE_ROWS = 128  # query tokens x group size of one tile: fills the matrix unit, keeps edges short
PREFILL_Q_BLOCK = 256  # kv read once per so many queries: past v6e's 574 FLOPs per byte for G >= 4


def decode_blocks(
    page_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: Any, max_q_len: int
) -> Blocks:
    """Blocks of the decode path: all query tokens of a row in one item, in tiles that a single one fills well."""
    kv_fetch = _kv_fetch(page_size, num_kv_heads, head_dim, kv_dtype)
    q_block = 1
    while q_block < min(max_q_len, DECODE_MAX_Q_LEN):
        q_block *= 2
    q_tile = 1
    while q_tile < q_block and 2 * q_tile * (num_q_heads // num_kv_heads) <= DECODE_TILE_ROWS:
        q_tile *= 2
    # one masked block at a row's end: its latency counts, not its FLOPs
    kv_block = math.gcd(kv_fetch, 1024 if num_kv_heads <= 2 else 512)
    return Blocks(q_block, q_tile, kv_fetch, kv_block, kv_block)


def prefill_blocks(
    page_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: Any, max_q_len: int
) -> Blocks:
    """Blocks of the prefill path."""
    kv_fetch = _kv_fetch(page_size, num_kv_heads, head_dim, kv_dtype)
    q_tile = 16  # a tile of packed sublanes
    while 2 * q_tile * (num_q_heads // num_kv_heads) <= PREFILL_TILE_ROWS:
        q_tile *= 2
    q_block = q_tile
    while q_block < min(max_q_len, PREFILL_Q_BLOCK) and 2 * q_block * num_q_heads <= 32 * PREFILL_Q_BLOCK:
        q_block *= 2
    return Blocks(q_block, q_tile, kv_fetch, min(512, kv_fetch), LANES)  # short edges: FLOPs count


def _kv_fetch(page_size: int, num_kv_heads: int, head_dim: int, kv_dtype: Any) -> int:
    """Up to 1,024 tokens, as many as FETCH_BYTES hold, at least LANES; whole pages and whole LANES."""
    lanes = cdiv(2 * head_dim, LANES) * LANES
    token_bytes = num_kv_heads * lanes * jax.dtypes.itemsize_bits(kv_dtype) // 8
    step = max(page_size, LANES)
    return max(min(FETCH_BYTES // token_bytes, 1024) // step, 1) * step
