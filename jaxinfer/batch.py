"""What one step reads beside weights and cache: a flat token axis, and where each token belongs.

T tokens, B rows, P pages per row. Rows with one query token (decode) stand first.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxinfer import kv_cache as kv
from jaxinfer.page_allocator import NULL_PAGE


@struct.dataclass
class StepBatch:
    token_ids: jax.Array  # i32[T]
    positions: jax.Array  # i32[T], for rope
    slot_mappings: tuple[jax.Array, ...]  # i32[T] per KV group; padding writes to the null page
    page_tables: tuple[jax.Array, ...]  # i32[B, P] per KV group; tails are 0
    kv_lens: jax.Array  # i32[B], resident tokens, this step's included; 0 for padded rows
    cu_q_lens: jax.Array  # i32[B + 1]
    distribution: jax.Array  # i32[3] = (decode_end, prefill_end, num_seqs)
    row_ids: jax.Array  # i32[B], index into RowState; padded rows point at its spare row
    from_row: jax.Array  # bool[B], the row's one input id is RowState.last_token
    samples: jax.Array  # bool[B], the row's last token is followed by a drawn one
    max_q_len: int = struct.field(pytree_node=False)
    # Tokens that are worked on together, for batch invariance (see tiles.py); None: all at once.
    tile: int | None = struct.field(pytree_node=False, default=None)


def pack(
    rows: Seq[tuple[Seq[int], int, Seq[Any]]],
    *,
    page_size: int,
    num_tokens: int | None = None,
    num_rows: int | None = None,
    pages_per_row: int | None = None,
    row_ids: Seq[int] | None = None,
    spare_row: int = 0,
    from_row: Seq[bool] | None = None,
    samples: Seq[bool] | None = None,
    max_q_len: int | None = None,
    tile: int | None = None,
) -> StepBatch:
    """Pack rows into a StepBatch of numpy arrays, padded to a bucket.

    Args:
      rows: per row (token ids of this step, position of the first of them, pages of the row: a list of ids, or of
        such lists, one for each KV group). Rows with one token must stand first.
      page_size: tokens per page.
      num_tokens, num_rows, pages_per_row: the bucket (T, B, P); None takes what the rows need.
      row_ids: per row its index in RowState; None counts from 0.
      spare_row: the RowState row that padding points at.
      from_row: per row, whether the input id is read from RowState; None reads none.
      samples: per row, whether a token is drawn; None draws for all.
      max_q_len: static bound of tokens in one row; None takes num_tokens (1 if every row has one token).
      tile: see StepBatch.

    Raises:
      ValueError: the rows do not fit the bucket or their pages, or rows with one token do not stand first.
    """
    lengths = [len(tokens) for tokens, _, _ in rows]
    total, count = sum(lengths), len(rows)
    num_decode = next((i for i, n in enumerate(lengths) if n != 1), count)
    if any(n == 1 for n in lengths[num_decode:]):
        raise ValueError(f"rows with one token must stand first; row lengths are {lengths}")
    num_tokens, num_rows = num_tokens or total, num_rows or count
    groups = list(
        zip(*(_by_group(pages) for _, _, pages in rows), strict=True)
    )  # of each the pages of all rows
    pages_per_row = pages_per_row or max(len(pages) for group in groups for pages in group)
    if total > num_tokens or count > num_rows:
        raise ValueError(
            f"{count} rows of {total} tokens do not fit a bucket of {num_rows} rows, {num_tokens}"
        )

    for b, (tokens, start, pages) in enumerate(rows):
        for of_group in _by_group(pages):
            _check_pages(b, len(tokens), start, of_group, page_size, pages_per_row)

    token_ids = np.zeros(num_tokens, np.int32)
    positions = np.zeros(num_tokens, np.int32)
    slot_mappings = [np.zeros(num_tokens, np.int32) for _ in groups]
    page_tables = [np.zeros((num_rows, pages_per_row), np.int32) for _ in groups]
    kv_lens = np.zeros(num_rows, np.int32)
    cu_q_lens = np.full(num_rows + 1, total, np.int32)
    cu_q_lens[0] = 0
    cu_q_lens[1 : count + 1] = np.cumsum(lengths)
    for b, (tokens, start, _) in enumerate(rows):
        begin, end = cu_q_lens[b], cu_q_lens[b + 1]
        token_ids[begin:end] = tokens
        positions[begin:end] = np.arange(start, start + len(tokens))
        kv_lens[b] = start + len(tokens)
    token_rows = np.repeat(np.arange(count), lengths)
    for pages_of_rows, page_table, slots in zip(groups, page_tables, slot_mappings, strict=True):
        for b, pages in enumerate(pages_of_rows):
            page_table[b, : len(pages)] = pages
        slots[:total] = kv.slot_mapping(page_table, token_rows, positions[:total], page_size)

    def padded(values, fill, dtype) -> np.ndarray:
        out = np.full(num_rows, fill, dtype)
        out[:count] = values
        return out

    if max_q_len is None:
        max_q_len = 1 if num_tokens == num_rows and num_decode == count else num_tokens
    # The leaves are numpy arrays: the program that takes them puts them on the device.
    fields: dict[str, Any] = dict(
        token_ids=token_ids,
        positions=positions,
        slot_mappings=tuple(slot_mappings),
        page_tables=tuple(page_tables),
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
        distribution=np.array([num_decode, num_decode, count], np.int32),
        row_ids=padded(range(count) if row_ids is None else row_ids, spare_row, np.int32),
        from_row=padded(False if from_row is None else from_row, False, bool),
        samples=padded(True if samples is None else samples, False, bool),
        max_q_len=max_q_len,
        tile=tile,
    )
    return StepBatch(**fields)


def _check_pages(
    row: int, num_tokens: int, start: int, pages: Seq[int], page_size: int, pages_per_row: int
) -> None:
    """Raises ValueError if a row has no page for one of its tokens."""
    end, held = start + num_tokens, len(pages)
    if start < 0 or end > held * page_size:
        raise ValueError(
            f"row {row}: tokens at positions {start} to {end - 1} do not fit its {held} pages of {page_size} tokens; "
            f"give it pages for {end} tokens: {kv.pages_needed(max(end, 1), page_size)}"
        )
    if held > pages_per_row:
        raise ValueError(f"row {row}: {held} pages are over the bucket's pages_per_row={pages_per_row}")
    if NULL_PAGE in pages[start // page_size : -(-end // page_size)]:
        raise ValueError(f"row {row}: page {NULL_PAGE} is the null page, which keeps no token")


def _by_group(pages: Seq[Any]) -> Seq[Seq[int]]:
    return pages if pages and isinstance(pages[0], list | tuple) else [pages]


def last_token_indices(batch: StepBatch) -> jax.Array:
    """Index on the token axis of each row's last token: i32[B] (0 for padded rows)."""
    return jnp.maximum(batch.cu_q_lens[1:] - 1, 0)


def next_decode(batch: StepBatch, active: jax.Array, page_size: int) -> StepBatch:
    """The decode batch one token later: every row reads what it has just drawn.

    Args:
      batch: a batch of one token per row.
      active: bool[B]; rows that are not go to the null page with kv_lens 0.
      page_size: tokens per page.

    A row that has no page for its next token gets position -1, of which models make NaN, and writes to the null page.
    """
    rows, index = jnp.arange(len(batch.kv_lens)), jnp.where(active, batch.kv_lens, 0)
    pages = [
        table.at[rows, index // page_size].get(mode="fill", fill_value=NULL_PAGE)
        for table in map(jnp.asarray, batch.page_tables)
    ]
    has_page = jnp.all(jnp.stack(pages) != NULL_PAGE, axis=0)
    slots = tuple(jnp.where(active & has_page, page * page_size + index % page_size, 0) for page in pages)
    return replace(
        batch,
        positions=jnp.where(active & ~has_page, -1, batch.positions + 1),
        kv_lens=jnp.where(active, batch.kv_lens + has_page, 0),
        slot_mappings=slots,
        from_row=jnp.ones_like(batch.from_row),  # the first id may have come from the host
    )
