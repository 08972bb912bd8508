"""The path of `xla`'s blocks whose result for a query token has the same bits in every batch: slower, on CPU.

Every row, of one query token or of a thousand, is cut into units of UNIT_QUERIES query tokens. Every unit walks its
row's blocks of keys from position 0 on, in a group of GROUP_UNITS units: products and reductions have the same shapes
in all programs, and units are a batch axis of both. A block that only its neighbours need is masked for a unit and
changes nothing: the peak stays, so the sums decay by exp(0), and what is added is zero. The online softmax is xla's.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import cpu_pages
from pallas_kernels.ragged_paged_attention.xla import CPU_BLOCK_TOKENS, Block, pad_columns, read_block, walk

UNIT_QUERIES = 2  # query tokens of a unit; those that a decode row has not are computed for nothing
GROUP_UNITS = 16  # units that walk together


def ragged_paged_attention(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # of the CPU layout
    kv_scales: jax.Array | None,  # f32[num_pages, K, 2, page_size]
    page_table: jax.Array,  # i32[B, P]
    kv_lens: jax.Array,  # i32[B]
    cu_q_lens: jax.Array,  # i32[B + 1]
    distribution: jax.Array,  # i32[3]
    *,
    sm_scale: float,
    max_q_len: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See the package's docstring. Takes no note of max_q_len: one path serves all rows."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = cpu_pages.num_kv_heads(kv_pages), cpu_pages.page_size(kv_pages, head_dim)
    num_rows = page_table.shape[0]
    block_pages = max(1, CPU_BLOCK_TOKENS // page_size)
    block = block_pages * page_size  # C
    page_table = pad_columns(page_table, block_pages)
    sinks = None
    if sink_logits is not None:
        sinks = jnp.repeat(sink_logits.reshape(num_kv_heads, -1), UNIT_QUERIES, axis=1)  # f32[K, M]

    # Units in the order of the rows, then sorted so that a group ends when its longest unit ends.
    is_live = (jnp.arange(num_rows) < distribution[2]) & (kv_lens > 0)
    q_lens = jnp.where(is_live, cu_q_lens[1:] - cu_q_lens[:-1], 0)  # i32[B]
    unit_ends = jnp.cumsum((q_lens + UNIT_QUERIES - 1) // UNIT_QUERIES)  # i32[B], of the rows up to this one
    unit_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), unit_ends[:-1]])
    num_groups = -(-(num_tokens // UNIT_QUERIES + min(num_rows, num_tokens)) // GROUP_UNITS)
    units = jnp.arange(num_groups * GROUP_UNITS)  # at least as many as rows can be cut into
    rows = jnp.minimum(jnp.searchsorted(unit_ends, units, side="right", method="compare_all"), num_rows - 1)
    offsets = (units - unit_starts[rows]) * UNIT_QUERIES  # of a unit's first query token in its row
    positions = (kv_lens - q_lens)[rows] + offsets  # of it among the row's kv tokens
    kv_ends = jnp.minimum(positions + UNIT_QUERIES, kv_lens[rows])
    kv_ends = jnp.where(units < unit_ends[-1], kv_ends, 0)
    order = jnp.argsort(-kv_ends)
    firsts = (cu_q_lens[rows] + offsets)[order]  # index in q of a unit's first query token
    positions, kv_ends, table = positions[order], kv_ends[order], page_table[rows[order]]

    def attend_group(group: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = group * GROUP_UNITS

        def of_group(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, GROUP_UNITS)

        ends = of_group(kv_ends)
        slots = jnp.arange(UNIT_QUERIES)
        query_positions = of_group(positions)[:, None] + slots  # i32[W, UNIT_QUERIES]

        def block_of(i: jax.Array) -> Block:
            kv_positions = i * block + jnp.arange(block)  # i32[C]
            live = kv_positions < ends[:, None]
            visible = kv_positions <= query_positions[..., None]  # bool[W, UNIT_QUERIES, C]
            if sliding_window is not None:
                live &= kv_positions > query_positions[:, :1] - sliding_window
                visible &= kv_positions > query_positions[..., None] - sliding_window
            visible &= live[:, None]
            page_ids = jax.lax.dynamic_slice(table, (start, i * block_pages), (GROUP_UNITS, block_pages))
            kv = read_block(kv_pages, kv_scales, page_ids, live, head_dim)
            group_size = num_q_heads // num_kv_heads
            return *kv, live, jnp.tile(visible, (1, group_size, 1))[:, None]

        first: jax.Array | int = 0
        if sliding_window is not None:
            earliest = jnp.where(ends > 0, query_positions[:, 0], ends.max()).min()
            first = jnp.maximum(earliest + 1 - sliding_window, 0) // block
        # Queries that a unit has not are other rows' or the last one: their results are not read.
        unit_q = q[jnp.minimum(of_group(firsts)[:, None] + slots, num_tokens - 1)]  # [W, UNIT_QUERIES, N, H]
        unit_q = unit_q.astype(jnp.float32)
        unit_q = unit_q.transpose(0, 2, 1, 3).reshape(GROUP_UNITS, num_kv_heads, -1, head_dim)  # [W, K, M, H]
        last = (ends.max() + block - 1) // block
        out, lse = walk(unit_q, sinks, block_of, first, last, sm_scale, soft_cap)
        out = out.reshape(GROUP_UNITS, num_q_heads, UNIT_QUERIES, head_dim)
        lse = lse.reshape(GROUP_UNITS, num_q_heads, UNIT_QUERIES)
        return (
            jax.lax.dynamic_update_slice_in_dim(state[0], out, start, 0),
            jax.lax.dynamic_update_slice_in_dim(state[1], lse, start, 0),
        )

    shape = (len(units), num_q_heads, UNIT_QUERIES)
    state = (jnp.zeros((*shape, head_dim)), jnp.zeros(shape))
    live_groups = (unit_ends[-1] + GROUP_UNITS - 1) // GROUP_UNITS
    unit_out, unit_lse = jax.lax.fori_loop(0, live_groups, attend_group, state)

    # Back to tokens: where each one's unit stands, and where in the unit the token.
    tokens = jnp.arange(num_tokens)
    token_rows = jnp.minimum(
        jnp.searchsorted(cu_q_lens[1:], tokens, side="right", method="compare_all"), num_rows - 1
    )
    inside = tokens - cu_q_lens[token_rows]
    place = jnp.argsort(order)[unit_starts[token_rows] + inside // UNIT_QUERIES]  # i32[T]
    slot = inside % UNIT_QUERIES
    has_row = (tokens < cu_q_lens[distribution[2]]) & is_live[token_rows]

    out = jnp.where(has_row[:, None, None], unit_out[place, :, slot], 0.0).astype(q.dtype)  # [T, N, H]
    if not return_lse:
        return out
    return out, jnp.where(has_row[:, None], unit_lse[place, :, slot], -jnp.inf)
