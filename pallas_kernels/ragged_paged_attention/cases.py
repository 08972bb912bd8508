"""Named shapes of real models and awkward batches, for the tests and benches of every implementation."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch for ragged_paged_attention: row b has q_lens[b] query tokens, the last at kv_lens[b] - 1.

    Rows with one query token stand first. The batch is padded to pad_tokens more tokens and pad_rows more
    rows.
    """

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    pad_tokens: int = 0
    pad_rows: int = 0
    dtype: str = "float32"  # of q
    kv_dtype: str = "float32"  # of the pages
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    max_q_len: int | None = None  # None: the longest of q_lens


def _decode(*kv_lens: int) -> dict[str, Any]:
    return {"q_lens": (1,) * len(kv_lens), "kv_lens": kv_lens}


def _boundary_lens(page_size: int) -> dict[str, Any]:
    """Decode rows at every place around a page boundary, an empty row (kv_len 0) between them."""
    return _decode(1, page_size - 1, page_size, 0, page_size + 1, 2 * page_size, 3 * page_size + 1)


_SMOLLM2: dict[str, Any] = {"num_q_heads": 9, "num_kv_heads": 3, "head_dim": 64}
_LLAMA3_8B: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
_LLAMA3_70B_SHARD: dict[str, Any] = {
    "num_q_heads": 8,
    "num_kv_heads": 1,
    "head_dim": 128,
}  # one of 8 tensor-parallel shards
_QWEN3: dict[str, Any] = {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 128}  # 0.6B
_GEMMA3: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 256}  # 1B
_PHI2: dict[str, Any] = {
    "num_q_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 80,
}  # a quarter of the heads: MHA at head_dim 80
_PHI3: dict[str, Any] = {
    "num_q_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 96,
}  # a quarter of the heads: MHA at head_dim 96
_BF16: dict[str, Any] = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}

# Mixed batches: decode rows first, then chunks of a longer prompt (q_len < kv_len), then whole prefills.
_MIXED: dict[str, Any] = {
    "q_lens": (1, 1, 1, 24, 17, 33),
    "kv_lens": (40, 1, 17, 90, 17, 33),
    "pad_tokens": 5,
    "pad_rows": 2,
}

CASES: tuple[Case, ...] = (
    # decode
    Case("smollm2_decode", page_size=16, **_SMOLLM2, **_boundary_lens(16), pad_tokens=1, pad_rows=1),
    Case("smollm2_decode_bf16", page_size=32, **_SMOLLM2, **_BF16, **_boundary_lens(32)),
    Case("smollm2_decode_one", page_size=16, **_SMOLLM2, **_decode(200)),
    Case("smollm2_long_among_short", page_size=16, **_SMOLLM2, **_decode(3, 1, 700, 2, 5, 16, 9, 4)),
    Case("llama3_8b_decode_bf16", page_size=16, **_LLAMA3_8B, **_BF16, **_boundary_lens(16)),
    Case("llama3_8b_decode_page128", page_size=128, **_LLAMA3_8B, **_BF16, **_decode(127, 129, 300)),
    Case("llama3_70b_shard_decode_bf16", page_size=64, **_LLAMA3_70B_SHARD, **_BF16, **_boundary_lens(64)),
    Case("qwen3_decode_bf16", page_size=16, **_QWEN3, **_BF16, **_boundary_lens(16)),
    Case("gemma3_decode_window", page_size=16, **_GEMMA3, **_boundary_lens(16), sliding_window=20),
    Case("phi2_decode_h80", page_size=16, **_PHI2, **_boundary_lens(16)),
    Case("phi3_decode_h96_bf16", page_size=16, **_PHI3, **_BF16, **_boundary_lens(16)),
    Case("decode_page256", page_size=256, **_LLAMA3_70B_SHARD, **_decode(255, 257, 300)),
    # every option alone and all together
    Case("decode_sinks", page_size=16, **_SMOLLM2, **_boundary_lens(16), sinks=True),
    Case("decode_soft_cap", page_size=16, **_SMOLLM2, **_boundary_lens(16), soft_cap=5.0),
    Case(
        "mixed_window_cap_sinks",
        page_size=16,
        **_SMOLLM2,
        **_MIXED,
        sliding_window=19,
        soft_cap=5.0,
        sinks=True,
    ),
    Case("window_of_one", page_size=16, **_SMOLLM2, **_MIXED, sliding_window=1),
    # prefill and mixed
    Case("smollm2_prefill_one", page_size=16, **_SMOLLM2, q_lens=(75,), kv_lens=(75,)),
    Case(
        "smollm2_prefill_padded",
        page_size=16,
        **_SMOLLM2,
        q_lens=(75,),
        kv_lens=(75,),
        pad_tokens=53,
        pad_rows=3,
    ),
    Case("smollm2_mixed", page_size=16, **_SMOLLM2, **_MIXED),
    Case("smollm2_mixed_bf16", page_size=32, **_SMOLLM2, **_BF16, **_MIXED),
    Case("llama3_8b_mixed_bf16", page_size=16, **_LLAMA3_8B, **_BF16, **_MIXED),
    Case("llama3_70b_shard_mixed", page_size=16, **_LLAMA3_70B_SHARD, **_MIXED),
    Case("qwen3_mixed_bf16", page_size=16, **_QWEN3, **_BF16, **_MIXED),
    Case("gemma3_mixed_window", page_size=16, **_GEMMA3, **_MIXED, sliding_window=20),
    Case("phi2_mixed_h80", page_size=16, **_PHI2, **_MIXED),
    Case("phi3_mixed_h96", page_size=16, **_PHI3, **_MIXED),
    Case("chunk_of_long_prompt", page_size=16, **_SMOLLM2, q_lens=(32,), kv_lens=(500,)),
    Case(
        "empty_rows_between",
        page_size=16,
        **_SMOLLM2,
        q_lens=(1, 1, 0, 20, 0, 3),
        kv_lens=(0, 9, 0, 20, 0, 33),
        pad_rows=1,
    ),
    Case(
        "one_token_chunk_last",
        page_size=16,
        **_SMOLLM2,
        q_lens=(1, 20, 1),
        kv_lens=(5, 40, 33),
        pad_tokens=10,
    ),
    # rows that are resident but have nothing to ask in this step
    Case(
        "rows_without_queries",
        page_size=16,
        **_SMOLLM2,
        q_lens=(1, 0, 20, 0, 1, 3),
        kv_lens=(5, 30, 40, 9, 17, 33),
        sliding_window=19,
        soft_cap=5.0,
        sinks=True,
    ),
    # 2 to 16 query tokens per row: verification of drafts
    Case("drafts", page_size=16, **_SMOLLM2, q_lens=(1, 2, 5, 16), kv_lens=(30, 18, 5, 47), pad_tokens=8),
    Case(
        "drafts_llama3_8b_bf16", page_size=16, **_LLAMA3_8B, **_BF16, q_lens=(2, 4, 16), kv_lens=(31, 33, 48)
    ),
    # quantized pages
    Case("decode_int8", page_size=16, **_SMOLLM2, **_boundary_lens(16), kv_dtype="int8"),
    Case("mixed_int8_bf16", page_size=32, **_LLAMA3_8B, **_MIXED, dtype="bfloat16", kv_dtype="int8"),
    Case("decode_int4", page_size=16, **_SMOLLM2, **_boundary_lens(16), kv_dtype="int4"),
    Case("mixed_int4_bf16", page_size=128, **_LLAMA3_70B_SHARD, **_MIXED, dtype="bfloat16", kv_dtype="int4"),
    Case("decode_fp8", page_size=16, **_QWEN3, **_boundary_lens(16), kv_dtype="float8_e4m3fn"),
    Case("mixed_fp8_bf16", page_size=16, **_SMOLLM2, **_MIXED, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    # more query tokens allowed than any row has
    Case("slack_max_q_len", page_size=16, **_SMOLLM2, **_decode(5, 33, 17), max_q_len=64),
)
CASES_BY_NAME = {case.name: case for case in CASES}


def make_inputs(
    case: Case, seed: int, max_pages_per_row: int | None = None, poison: bool = True
) -> dict[str, Any]:
    """The keyword arguments of ragged_paged_attention (all but `implementation`) for a case, as numpy and jax
    arrays.

    max_pages_per_row caps kv_lens at one token into that many pages (4: 3 pages + 1 token) and q_lens at
    kv_lens. poison fills the null page, unused pages and the slots behind kv_lens with NaN (in kv_scales, and
    with the largest values in the pages, where the pages are integers), so that an implementation that lets
    them in shows it.
    """
    rng = np.random.default_rng(seed)
    page_size, head_dim, num_kv_heads = case.page_size, case.head_dim, case.num_kv_heads
    kv_lens, q_lens = list(case.kv_lens), list(case.q_lens)
    if max_pages_per_row is not None:
        kv_lens = [min(n, (max_pages_per_row - 1) * page_size + 1) for n in kv_lens]
        q_lens = [n if n <= 1 else min(n, kv_len) for n, kv_len in zip(q_lens, kv_lens, strict=True)]
    num_seqs, num_rows = len(q_lens), len(q_lens) + case.pad_rows
    num_tokens = sum(q_lens) + case.pad_tokens
    is_decode = [n == 1 for n in q_lens]
    decode_end = is_decode.index(False) if False in is_decode else num_seqs
    page_counts = [-(-n // page_size) for n in kv_lens]

    # page tables: distinct pages in random order out of a pool that has three unused ones besides the null
    # page
    num_pages = 1 + sum(page_counts) + 3
    free_pages = iter(rng.permutation(np.arange(1, num_pages)))
    page_table = np.zeros(
        (num_rows, max(1, *page_counts) + 1), np.int32
    )  # i32[B, P], the last column always 0
    used = np.zeros((num_pages, page_size), bool)
    for row, (count, kv_len) in enumerate(zip(page_counts, kv_lens, strict=True)):
        pages = [next(free_pages) for _ in range(count)]
        page_table[row, :count] = pages
        for position in range(kv_len):
            used[pages[position // page_size], position % page_size] = True
    unused_slots = ~used[:, None, :, None] & poison  # bool[num_pages, 1, page_size, 1]

    shape = (num_pages, num_kv_heads, page_size, 2 * head_dim)
    kv_dtype = jnp.dtype(case.kv_dtype)
    kv_scales = None
    if kv_dtype.name in ("int8", "int4"):
        top = 127 if kv_dtype.name == "int8" else 7
        values = np.where(unused_slots, top, rng.integers(-top, top + 1, shape)).astype(np.int8)
        scale_unit = 1.7 / top
    else:
        values = np.where(unused_slots, np.nan, rng.standard_normal(shape, np.float32))
        scale_unit = 1.0
    if kv_dtype.name in ("int8", "int4", "float8_e4m3fn"):
        scales = scale_unit * rng.uniform(0.5, 1.5, (num_pages, num_kv_heads, 2, page_size))
        kv_scales = jnp.asarray(np.where(unused_slots[..., 0][:, :, None], np.nan, scales), jnp.float32)

    cu_q_lens = np.full(num_rows + 1, sum(q_lens), np.int32)
    cu_q_lens[: num_seqs + 1] = np.cumsum([0, *q_lens])
    sinks = rng.standard_normal(case.num_q_heads).astype(np.float32)
    return {
        "q": jnp.asarray(rng.standard_normal((num_tokens, case.num_q_heads, head_dim)), case.dtype),
        "kv_pages": jnp.asarray(values).astype(kv_dtype),
        "kv_scales": kv_scales,
        "page_table": jnp.asarray(page_table),
        "kv_lens": jnp.asarray(kv_lens + [0] * case.pad_rows, jnp.int32),
        "cu_q_lens": jnp.asarray(cu_q_lens),
        "distribution": jnp.asarray([decode_end, num_seqs, num_seqs], jnp.int32),
        "sm_scale": head_dim**-0.5,
        "max_q_len": case.max_q_len or max(q_lens),
        "sliding_window": case.sliding_window,
        "soft_cap": case.soft_cap,
        "sink_logits": jnp.asarray(sinks) if case.sinks else None,
    }


def without_rows(case: Case) -> dict[str, Any]:
    """make_inputs of a batch in which all rows and tokens are padding."""
    inputs = make_inputs(case, seed=0)
    return inputs | {name: jnp.zeros_like(inputs[name]) for name in ("kv_lens", "cu_q_lens", "distribution")}
