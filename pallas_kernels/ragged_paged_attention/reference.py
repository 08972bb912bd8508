"""The truth: each query token alone, all its row's pages gathered, everything in float32. Slow on purpose."""

import jax
import jax.numpy as jnp


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
    sliding_window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See the package's docstring. Takes no note of max_q_len: it has no blocks to size."""
    num_tokens, num_q_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = kv_pages.shape
    num_rows, pages_per_row = page_table.shape
    max_kv_len = pages_per_row * page_size  # S
    sinks = jnp.full((num_q_heads,), -jnp.inf) if sink_logits is None else sink_logits  # f32[N]

    def attend(token: jax.Array) -> tuple[jax.Array, jax.Array]:  # i32[] -> f32[N, H], f32[N]
        row = jnp.clip(jnp.searchsorted(cu_q_lens, token, side="right") - 1, 0, num_rows - 1)
        position = kv_lens[row] - (cu_q_lens[row + 1] - token)
        live = (token < cu_q_lens[distribution[2]]) & (kv_lens[row] > 0)

        kv = kv_pages[page_table[row]].astype(jnp.float32)  # f32[P, K, page_size, 2H]
        k, v = kv[..., :head_dim], kv[..., head_dim:]
        if kv_scales is not None:
            scales = kv_scales[page_table[row]]  # f32[P, K, 2, page_size]
            k, v = k * scales[:, :, 0, :, None], v * scales[:, :, 1, :, None]
        k = k.transpose(1, 0, 2, 3).reshape(num_kv_heads, max_kv_len, head_dim)  # f32[K, S, H]
        v = v.transpose(1, 0, 2, 3).reshape(num_kv_heads, max_kv_len, head_dim)

        kv_positions = jnp.arange(max_kv_len)  # i32[S]
        visible = live & (kv_positions <= position)
        if sliding_window is not None:
            visible &= kv_positions > position - sliding_window
        # 0 x NaN is NaN: a masked V must not reach the product, nor a masked K the one of the gradient.
        k, v = (jnp.where(visible[:, None], x, 0.0) for x in (k, v))

        grouped_q = q[token].astype(jnp.float32).reshape(num_kv_heads, -1, head_dim)  # f32[K, G, H]
        scores = jnp.einsum("kgh,ksh->kgs", grouped_q, k, precision="highest").reshape(
            num_q_heads, max_kv_len
        )
        scores = scores * sm_scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible, scores, -jnp.inf)  # f32[N, S]

        peak = jnp.maximum(scores.max(axis=-1), sinks)  # f32[N]
        peak = jnp.where(jnp.isfinite(peak), peak, 0.0)  # a token that sees nothing, without a sink
        weights = jnp.exp(scores - peak[:, None])  # f32[N, S]
        denominator = weights.sum(axis=-1) + jnp.exp(sinks - peak)  # f32[N]
        denominator = jnp.where(live, denominator, 1.0)  # also of the logarithm, whose gradient at 0 is NaN
        weights = weights / denominator[:, None]
        grouped = weights.reshape(num_kv_heads, -1, max_kv_len)  # f32[K, G, S]
        out = jnp.einsum("kgs,ksh->kgh", grouped, v, precision="highest").reshape(num_q_heads, head_dim)
        return out, jnp.where(live, jnp.log(denominator) + peak, -jnp.inf)

    out, lse = jax.lax.map(attend, jnp.arange(num_tokens, dtype=jnp.int32))
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out
