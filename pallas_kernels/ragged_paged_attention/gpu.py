"""Pallas Mosaic GPU: which rows take which kernel, what is refused, and the packing around the kernels."""

import math

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import gpu_decode


def ragged_paged_attention(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, K, page_size, 2H]
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
    compute_capability: tuple[int, int] = (9, 0),
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See the package's docstring. compute_capability is that of the GPU that the program is compiled for."""
    num_tokens, num_q_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = kv_pages.shape
    num_rows, pages_per_row = page_table.shape
    group = num_q_heads // num_kv_heads
    schedule = gpu_decode.make_schedule(
        num_rows, pages_per_row, num_kv_heads, group, head_dim, page_size, max_q_len
    )
    assert schedule is not None
    if sink_logits is None:
        sink_logits = jnp.full((num_q_heads,), -jnp.inf, jnp.float32)
    grouped_q = q.reshape(num_tokens, num_kv_heads, group, head_dim)
    grouped_q = jnp.pad(grouped_q, ((0, 0), (0, 0), (0, schedule.group - group), (0, 0)))
    sinks = jnp.pad(sink_logits.reshape(num_kv_heads, group), ((0, 0), (0, schedule.group - group)))
    out, lse = gpu_decode.attend(
        grouped_q,
        kv_pages,
        page_table,
        kv_lens,
        cu_q_lens,
        distribution[2],
        sinks,
        schedule=schedule,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0),
    )
    # [B, K, max_q_len * group, H] -> [T, N, H]
    tokens = jnp.arange(num_tokens)
    rows = jnp.clip(jnp.searchsorted(cu_q_lens, tokens, side="right") - 1, 0, num_rows - 1)
    index = jnp.clip(tokens - cu_q_lens[rows], 0, max_q_len - 1)
    out = out.reshape(num_rows, num_kv_heads, max_q_len, schedule.group, head_dim)[rows, :, index, :group]
    lse = lse.reshape(num_rows, num_kv_heads, max_q_len, schedule.group)[rows, :, index, :group]
    live = (tokens < cu_q_lens[distribution[2]]) & (kv_lens[rows] > 0)
    out = jnp.where(live[:, None, None], out.reshape(q.shape), 0)
    lse = jnp.where(live[:, None], lse.reshape(num_tokens, num_q_heads), -jnp.inf)
    return (out, lse) if return_lse else out
