"""Pallas Mosaic GPU: which rows take which kernel, what is refused, and the packing around the kernels.

Compute capability 8.0 to 12.1 for rows of few query tokens (gpu_decode), 9.0 alone for others (gpu_prefill).

Rows whose query tokens times G heads fit one tile of 64 rows (all of a pure decode program, drafts) take gpu_decode.
With a larger max_q_len, rows [0, decode_end) take gpu_decode as rows of one token and the others gpu_prefill.
"""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels import mosaic_gpu
from jaxinfer.pallas_kernels.ragged_paged_attention import gpu_costs, gpu_decode, gpu_prefill, gpu_tuning

MAX_DECODE_Q_LEN = 16  # query tokens of a draft row that take the decode kernel, if they fit its tile
QUANTIZED_DTYPES = (jnp.int8, jnp.float8_e4m3fn)
ELSE = "use implementation='xla'"


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
    compute_capability: tuple[int, int],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See the package's docstring. compute_capability is that of the GPU that the program is compiled for.

    Raises:
        NotImplementedError: `refusal` has a reason.
    """
    reason = refusal(q, kv_pages, max_q_len, compute_capability)
    if reason is not None:
        raise NotImplementedError(f"ragged_paged_attention implementation 'gpu': {reason}")
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = kv_pages.shape[1:3]
    num_rows, pages_per_row = page_table.shape
    group, max_kv_len = num_q_heads // num_kv_heads, pages_per_row * page_size
    decode_q_len = max_q_len if takes_decode_only(max_q_len, group, head_dim, compute_capability) else 1
    decode = gpu_decode.make_schedule(
        num_rows,
        pages_per_row,
        num_kv_heads,
        group,
        head_dim,
        page_size,
        decode_q_len,
        kv_pages.dtype.itemsize,
        compute_capability,
    )
    tokens = jnp.arange(num_tokens)
    rows = jnp.clip(jnp.searchsorted(cu_q_lens, tokens, side="right") - 1, 0, num_rows - 1)  # i32[T]

    # Heads beyond G fill a token's rows up to whole copies.
    spare = decode.group - group
    if sink_logits is None:
        sink_logits = jnp.full((num_q_heads,), -jnp.inf, jnp.float32)
    grouped_q = jnp.pad(
        q.reshape(num_tokens, num_kv_heads, group, head_dim), ((0, 0), (0, 0), (0, spare), (0, 0))
    )
    sinks = jnp.pad(sink_logits.reshape(num_kv_heads, group), ((0, 0), (0, spare)))

    row_end = distribution[2] if decode_q_len == max_q_len else distribution[0]
    out, lse = gpu_decode.attend(
        grouped_q,
        kv_pages,
        kv_scales,
        page_table,
        kv_lens,
        cu_q_lens,
        row_end,
        sinks,
        schedule=decode,
        cost_estimate=gpu_costs.estimate_decode(decode, max_kv_len),
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )  # [B, K, decode_q_len * group, H], f32[B, K, decode_q_len * group]
    out = out.reshape(num_rows, num_kv_heads, decode_q_len, decode.group, head_dim)
    lse = lse.reshape(num_rows, num_kv_heads, decode_q_len, decode.group)
    index = jnp.clip(tokens - cu_q_lens[rows], 0, decode_q_len - 1)
    out, lse = out[rows, :, index], lse[rows, :, index]  # [T, K, group, H], f32[T, K, group]

    if decode_q_len < max_q_len:
        prefill = gpu_prefill.make_schedule(
            num_tokens, num_rows, num_kv_heads, group, head_dim, page_size, kv_pages.dtype.itemsize
        )
        prefill_out, prefill_lse = gpu_prefill.attend(
            grouped_q,
            kv_pages,
            kv_scales,
            page_table,
            kv_lens,
            cu_q_lens,
            distribution,
            sinks,
            schedule=prefill,
            cost_estimate=gpu_costs.estimate_prefill(prefill, num_tokens, max_kv_len),
            sm_scale=sm_scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        is_decode = (rows < row_end)[:, None, None]
        out = jnp.where(is_decode[..., None], out, prefill_out)
        lse = jnp.where(is_decode, lse, prefill_lse)

    live = (tokens < cu_q_lens[distribution[2]]) & (kv_lens[rows] > 0)
    out = jnp.where(live[:, None, None], out[:, :, :group].reshape(q.shape), 0)
    lse = jnp.where(live[:, None], lse[:, :, :group].reshape(num_tokens, num_q_heads), -jnp.inf)
    return (out, lse) if return_lse else out


def takes_decode_only(max_q_len: int, group: int, head_dim: int, compute_capability: tuple[int, int]) -> bool:
    """Whether all rows of a call take the decode kernel."""
    return max_q_len <= MAX_DECODE_Q_LEN and gpu_decode.fits(max_q_len, group, head_dim, compute_capability)


def refusal(
    q: jax.Array, kv_pages: jax.Array, max_q_len: int, compute_capability: tuple[int, int]
) -> str | None:
    """Why this combination has no GPU kernel and what would work, or None."""
    _, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = kv_pages.shape[1:3]
    group, capability = num_q_heads // num_kv_heads, "{}.{}".format(*compute_capability)
    if compute_capability not in gpu_tuning.DECODE_LIMITS:
        known = ", ".join("{}.{}".format(*known) for known in gpu_tuning.DECODE_LIMITS)
        return f"compute capability {capability} is none of {known}: {ELSE}"
    is_quantized = kv_pages.dtype in QUANTIZED_DTYPES
    if not is_quantized and kv_pages.dtype not in (jnp.bfloat16, jnp.float16):
        return f"kv_pages {kv_pages.dtype} is none of bfloat16, float16, int8, float8_e4m3fn: {ELSE}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q {q.dtype} is neither bfloat16 nor float16: cast it, or {ELSE}"
    if not is_quantized and q.dtype != kv_pages.dtype:
        return f"q {q.dtype} must have the dtype of kv_pages {kv_pages.dtype}: cast it, or {ELSE}"
    if head_dim % 16 or not 32 <= head_dim <= 256:
        return f"head_dim {head_dim} is not a multiple of 16 from 32 to 256: {ELSE}"
    least_page = gpu_tuning.MIN_BLOCK_KV if is_quantized else 8
    if page_size & (page_size - 1) or page_size < least_page:
        return (
            f"page_size {page_size} is not a power of two from {least_page} on (kv_pages {kv_pages.dtype}):"
            f" use such a one, or {ELSE}"
        )
    by_tma = compute_capability >= mosaic_gpu.FIRST_WITH_TMA
    if not by_tma and page_size < 32 and not mosaic_gpu.cp_async_takes(page_size, head_dim):
        return (
            f"page_size {page_size} with head_dim {head_dim} is too small for cp.async, which compute capability"
            f" {capability} needs: use page_size 32 or more, or {ELSE}"
        )
    if not by_tma and is_quantized and head_dim % 32:
        # Widened 16 lanes at a time, from a buffer that cp.async fills, its layouts are searched for minutes.
        return (
            f"head_dim {head_dim} with kv_pages {kv_pages.dtype} on compute capability {capability} is not a multiple"
            f" of 32: use pages of {q.dtype}, or {ELSE}"
        )
    if not gpu_decode.fits(1, group, head_dim, compute_capability):
        return (
            f"{group} query heads per kv head of head_dim {head_dim} exceed the query tile, or the shared memory of"
            f" compute capability {capability}: {ELSE}"
        )
    is_decode = takes_decode_only(max_q_len, group, head_dim, compute_capability)
    if not is_decode and compute_capability != gpu_prefill.COMPUTE_CAPABILITY:
        return (
            f"max_q_len {max_q_len} needs the prefill kernel, whose WGMMA exists on compute capability 9.0 only,"
            f" not {capability}: {ELSE}, or 'gpu_xla', which takes xla for such programs alone"
        )
    return None
