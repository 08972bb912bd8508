"""What the TPU kernel is compiled for, and what it fetches and computes, as arithmetic: used by the kernel on scalars
and by `tpu_costs` on numpy arrays, so that what is counted is what runs.

Three nested steps. An item is a block of one row's query tokens. It fetches its kv pages `kv_fetch` tokens at a
time. In each fetch, every tile of `q_tile` query tokens computes first with interior blocks of `kv_block` kv
tokens, which all its queries see whole and which need no mask, and with masked edge blocks of edge tokens on
either side.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LANES = 128  # of a vector register


class Blocks(NamedTuple):
    """The static block sizes of one call, all in tokens."""

    q_block: int  # query tokens of one item, a power of two
    q_tile: int  # query tokens computed with at once; divides q_block
    kv_fetch: int  # kv tokens fetched at once; a multiple of page_size and kv_edge
    kv_block: int  # kv tokens of an interior block; a multiple of kv_edge, at most kv_fetch
    kv_edge: int  # kv tokens of an edge block; a multiple of LANES


@dataclasses.dataclass(frozen=True)
class Static:
    """Everything that the kernel is compiled for."""

    is_decode: bool  # the path
    max_q_len: int  # rows with more query tokens are the other path's
    blocks: Blocks
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    compute_dtype: Any  # q's, and that of both products' inputs
    kv_dtype: Any
    sm_scale: float
    sliding_window: int | None
    soft_cap: float | None
    return_lse: bool

    @property
    def quantized(self) -> bool:
        return jax.dtypes.itemsize_bits(self.kv_dtype) <= 8

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def num_tiles(self) -> int:
        return self.blocks.q_block // self.blocks.q_tile

    @property
    def tile_rows(self) -> int:
        return cdiv(self.blocks.q_tile * self.group, 8) * 8

    @property
    def heads_at_once(self) -> int:
        """kv heads whose blocks are computed side by side: a decode tile alone is too small to hide latencies."""
        return next(n for n in range(8, 0, -1) if self.num_kv_heads % n == 0) if self.is_decode else 1

    @property
    def width(self) -> int:
        return self.head_dim if self.head_dim % LANES == 0 else 2 * self.head_dim


class Item(NamedTuple):
    """One block of query tokens of one row, in positions of that row."""

    q_start: Any  # position of the first query token
    q_end: Any  # after the last
    kv_start: Any  # first kv position that a query sees
    page_start: Any  # first page fetched
    page_end: Any  # after the last
    num_fetches: Any


class Tile(NamedTuple):
    """The kv tokens that one tile of queries computes with in one fetch, as offsets in the fetched buffer."""

    start: Any  # first edge block before the interior
    interior: Any  # first interior block
    num_interior: Any
    rest: Any  # first edge block after the interior
    end: Any  # after the last edge block; everything is empty where end <= start


def cdiv(x: Any, y: int) -> Any:
    return (x + (y - 1)) // y


def item_of(
    kv_len: Any, q_len: Any, block: Any, blocks: Blocks, page_size: int, sliding_window: int | None
) -> Item:
    """The `block`-th item of a row with q_len query tokens, the last at kv_len - 1."""
    q_start = kv_len - q_len + block * blocks.q_block
    q_end = _min(q_start + blocks.q_block, kv_len)
    kv_start = q_start * 0 if sliding_window is None else _max(q_start - sliding_window + 1, 0)
    page_start, page_end = kv_start // page_size, cdiv(q_end, page_size)
    num_fetches = cdiv(page_end - page_start, blocks.kv_fetch // page_size)
    return Item(q_start, q_end, kv_start, page_start, page_end, num_fetches)


def tile_of(
    item: Item, fetch: Any, tile: Any, blocks: Blocks, page_size: int, sliding_window: int | None
) -> Tile:
    """What the `tile`-th tile of an item computes with in its `fetch`-th fetch."""
    edge = blocks.kv_edge
    base = item.page_start * page_size + fetch * blocks.kv_fetch  # position of the buffer's first token
    first = item.q_start + tile * blocks.q_tile  # positions of the tile's first and last query
    last = _min(first + blocks.q_tile, item.q_end) - 1
    end = _min(cdiv(last + 1 - base, edge) * edge, blocks.kv_fetch)
    interior_end = _min(first + 1 - base, blocks.kv_fetch) // edge * edge  # all queries see what is before it
    start = interior = base * 0
    if sliding_window is not None:
        start = _max(first - sliding_window + 1 - base, 0) // edge * edge
        interior = cdiv(_max(last - sliding_window + 1 - base, 0), edge) * edge
    num_interior = _max(interior_end - interior, 0) // blocks.kv_block
    interior = interior * (num_interior > 0) + start * (num_interior == 0)
    return Tile(start, interior, num_interior, interior + num_interior * blocks.kv_block, end)


def _min(x: Any, y: Any) -> Any:
    return (jnp if isinstance(x, jax.Array) or isinstance(y, jax.Array) else np).minimum(x, y)


def _max(x: Any, y: Any) -> Any:
    return (jnp if isinstance(x, jax.Array) or isinstance(y, jax.Array) else np).maximum(x, y)
