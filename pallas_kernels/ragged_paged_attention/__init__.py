"""Attention of a ragged batch of queries over a paged KV cache: the contract, its checks, its
implementations.

Shape letters: T tokens of the batch, B rows, N query heads, K kv heads, G = N/K, H head_dim, P pages per row.
One call serves decode rows, rows of a few draft tokens, prefill chunks and whole prefills, mixed.
The online softmax follows FlashAttention (arXiv:2205.14135), pages PagedAttention (arXiv:2309.06180), learned
sinks gpt-oss, soft_cap Gemma 2. `cases.py` has the named shapes that every implementation is tested with.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels import cpu_pages
from jaxinfer.pallas_kernels.contract import check_array, load, without_gradient

# implementation -> the module that holds a function `ragged_paged_attention` of the signature below, less
# `implementation`. Imported on first use, so that a CPU run never loads an accelerator's Pallas lowering.
IMPLEMENTATIONS = {
    "reference": "jaxinfer.pallas_kernels.ragged_paged_attention.reference",  # plain, dense, float32: the truth
    "xla": "jaxinfer.pallas_kernels.ragged_paged_attention.xla",  # plain XLA, for every device
    "cpu": "jaxinfer.pallas_kernels.ragged_paged_attention.xla",  # the same over pages of the CPU layout
    # CPU, for batch_invariant=True: no bit of a token's result depends on what else is in the batch
    "cpu_invariant": "jaxinfer.pallas_kernels.ragged_paged_attention.cpu_invariant",
    "tpu": "jaxinfer.pallas_kernels.ragged_paged_attention.tpu",  # Pallas Mosaic TPU
    "gpu": "jaxinfer.pallas_kernels.ragged_paged_attention.gpu",  # Pallas Mosaic GPU
    # calls that the decode kernel of gpu takes whole by gpu, every other call by xla
    "gpu_xla": "jaxinfer.pallas_kernels.ragged_paged_attention.gpu_xla",
}
WINDOW_AS_DATA = ("reference", "xla", "cpu", "cpu_invariant")  # a loop over layers has one attention for all
QUANTIZED_DTYPES = (jnp.int8, jnp.int4, jnp.float8_e4m3fn)  # page dtypes that need kv_scales
FLOAT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)  # page dtypes that must not have kv_scales; q dtypes


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_scales: jax.Array | None,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    sm_scale: float,
    max_q_len: int,
    sliding_window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str,
    compute_capability: tuple[int, int] = (9, 0),
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal attention of each row's query tokens over the row's pages.

    The tokens of row b are q[cu_q_lens[b]:cu_q_lens[b+1]]; the last of them sits at kv position
    kv_lens[b] - 1, the one before at kv_lens[b] - 2, and so on; this step's K and V are already in the pages.
    Query head n reads kv head n // G. Scores, softmax and accumulation are float32.

    Args:
        q: [T, N, H], float32, bfloat16 or float16.
        kv_pages: [num_pages, K, page_size, 2H]; K in lanes [0, H), V in [H, 2H); for cpu and cpu_invariant in the
            layout of `cpu_pages`. Page 0 is the null page. q's dtype or another float dtype, or int8, int4,
            float8_e4m3fn (then value = scale * qvalue).
        kv_scales: f32[num_pages, K, 2, page_size] (K scale, V scale) with quantized pages, else None.
        page_table: i32[B, P]; position p of row b lies in page page_table[b, p // page_size]. Tails are 0,
            and entries of pages that lie wholly behind the sliding window may be.
        kv_lens: i32[B], tokens resident, this step's included; at most P * page_size; 0 in padded rows.
        cu_q_lens: i32[B + 1], non-decreasing from 0; entries after num_seqs repeat cu_q_lens[num_seqs] <= T.
        distribution: i32[3] = (decode_end, prefill_end, num_seqs), non-decreasing. Rows [0, decode_end) have
            exactly one query token, so the token of row b is q[b]; rows [decode_end, num_seqs) have any
            number up to max_q_len, 0 and 1 included. prefill_end is a hint: no value depends on it.
        sm_scale: factor on q.k, before soft_cap.
        max_q_len: static upper bound of the query tokens in one row. 1 is the pure decode program: decode_end
            is num_seqs there. Rows of 2 to 16 tokens (drafts) take the decode path of tpu and gpu alone; xla walks
            them one by one, as tiles of queries.
        sliding_window: a query at position p sees positions p - sliding_window < j <= p; None: all j <= p. As data,
            i32[] of at least 1, for the implementations of WINDOW_AS_DATA.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves them.
        sink_logits: f32[N], one more logit per head in the softmax's denominator that has no value.
        return_lse: also return the log of the softmax's denominator (sink included).
        implementation: a key of IMPLEMENTATIONS. There is no default and no falling back. "reference" alone has a
            gradient (jax.grad), which is finite whatever stands in what has no effect.
        compute_capability: of the GPU that the program is compiled for; only gpu and gpu_xla look at it.

    Returns:
        [T, N, H] in q's dtype, or (that, f32[T, N]). Padded tokens (>= cu_q_lens[num_seqs]) and tokens of
        rows with kv_lens 0 are zeros, their lse -inf. What lies in the null page, in unused pages and behind
        kv_lens has no effect, NaN included.

    Raises:
        ValueError: a shape, dtype or option is outside this contract.
        NotImplementedError: the implementation does not have this combination, or is not part of this build.
    """
    _validate(q, kv_pages, kv_scales, page_table, kv_lens, cu_q_lens, distribution, implementation)
    _validate_options(q, sm_scale, max_q_len, sliding_window, soft_cap, sink_logits)
    if isinstance(sliding_window, jax.Array):
        check_array("sliding_window", sliding_window, (), jnp.int32)
        if implementation not in WINDOW_AS_DATA:
            raise NotImplementedError(
                f"{implementation!r} takes sliding_window as an int alone; {', '.join(WINDOW_AS_DATA)} take data too"
            )
    arrays: dict[str, Any] = {
        "q": q,
        "kv_pages": kv_pages,
        "kv_scales": kv_scales,
        "page_table": page_table,
        "kv_lens": kv_lens,
        "cu_q_lens": cu_q_lens,
        "distribution": distribution,
        "sink_logits": sink_logits,
    }
    static: dict[str, Any] = {
        "sm_scale": sm_scale,
        "max_q_len": max_q_len,
        "soft_cap": soft_cap,
        "return_lse": return_lse,
    }
    (arrays if isinstance(sliding_window, jax.Array) else static)["sliding_window"] = sliding_window
    if implementation in ("gpu", "gpu_xla"):
        static["compute_capability"] = compute_capability
    kernel = load("ragged_paged_attention", IMPLEMENTATIONS, implementation)

    def attend(arrays: dict[str, Any]) -> Any:
        return kernel(**arrays, **static)

    if implementation == "reference":
        return attend(arrays)
    return without_gradient("ragged_paged_attention", implementation, attend)(arrays)


def _validate(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_scales: jax.Array | None,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    implementation: str,
) -> None:
    if q.ndim != 3 or q.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"q is {q.dtype}{list(q.shape)} but must be [T, N, H] in float32, bfloat16 or float16"
        )
    _, num_q_heads, head_dim = q.shape
    num_pages, num_kv_heads, page_size = cpu_pages.check_shape(kv_pages, implementation, None, head_dim)
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads are no multiple of {num_kv_heads} kv heads")
    if kv_pages.dtype in QUANTIZED_DTYPES:
        if kv_scales is None:
            raise ValueError(
                f"kv_pages is {kv_pages.dtype}: kv_scales f32[num_pages, K, 2, page_size] is required"
            )
        check_array("kv_scales", kv_scales, (num_pages, num_kv_heads, 2, page_size), jnp.float32)
    elif kv_pages.dtype in FLOAT_DTYPES:
        if kv_scales is not None:
            raise ValueError(f"kv_pages is {kv_pages.dtype}, which has no scales: pass kv_scales=None")
    else:
        names = [jnp.dtype(dtype).name for dtype in FLOAT_DTYPES + QUANTIZED_DTYPES]
        raise ValueError(f"kv_pages is {kv_pages.dtype} but must be one of {names}")
    if page_table.ndim != 2:
        raise ValueError(f"page_table is {list(page_table.shape)} but must be i32[B, pages per row]")
    num_rows, pages_per_row = page_table.shape
    check_array("page_table", page_table, (num_rows, pages_per_row), jnp.int32)
    check_array("kv_lens", kv_lens, (num_rows,), jnp.int32)
    check_array("cu_q_lens", cu_q_lens, (num_rows + 1,), jnp.int32)
    check_array("distribution", distribution, (3,), jnp.int32)


def _validate_options(
    q: jax.Array,
    sm_scale: float,
    max_q_len: int,
    sliding_window: int | jax.Array | None,
    soft_cap: float | None,
    sink_logits: jax.Array | None,
) -> None:
    if not sm_scale > 0:
        raise ValueError(f"sm_scale is {sm_scale} but must be positive")
    if not max_q_len >= 1:
        raise ValueError(f"max_q_len is {max_q_len} but must be at least 1")
    if isinstance(sliding_window, int) and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window} but must be at least 1, or None for no window")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap} but must be positive, or None for no cap")
    if sink_logits is not None:
        check_array("sink_logits", sink_logits, (q.shape[1],), jnp.float32)
