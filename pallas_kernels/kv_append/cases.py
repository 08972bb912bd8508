"""Named shapes shared by the tests and benches of every implementation of kv_append."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One append: num_tokens live tokens in distinct slots, pad_tokens more that go to the null page."""

    name: str
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_tokens: int
    pad_tokens: int = 0
    dtype: str = "float32"  # of k and v
    kv_dtype: str = "float32"  # of the pages
    contiguous: bool = False  # slots of one prefill, position after position, instead of random ones


_SMOLLM2: dict[str, Any] = {"num_kv_heads": 3, "head_dim": 64}
_LLAMA3_8B: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128}
_LLAMA3_70B_SHARD: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 128}
_GEMMA3: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 256}
_BF16: dict[str, Any] = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}

CASES: tuple[Case, ...] = (
    Case("smollm2_one", page_size=16, **_SMOLLM2, num_tokens=1),
    Case("smollm2_decode", page_size=16, **_SMOLLM2, num_tokens=13, pad_tokens=3),
    Case("smollm2_decode_bf16", page_size=32, **_SMOLLM2, **_BF16, num_tokens=13, pad_tokens=3),
    Case("smollm2_all_padding", page_size=16, **_SMOLLM2, num_tokens=0, pad_tokens=4),
    Case("smollm2_prefill", page_size=16, **_SMOLLM2, num_tokens=37, pad_tokens=11, contiguous=True),
    Case("f32_into_bf16", page_size=16, **_SMOLLM2, num_tokens=5, kv_dtype="bfloat16"),
    Case("llama3_8b_prefill_bf16", page_size=16, **_LLAMA3_8B, **_BF16, num_tokens=33, contiguous=True),
    Case("llama3_70b_shard_page128", page_size=128, **_LLAMA3_70B_SHARD, **_BF16, num_tokens=9, pad_tokens=7),
    Case("gemma3_decode", page_size=16, **_GEMMA3, num_tokens=5),
    Case("h80", page_size=16, num_kv_heads=8, head_dim=80, num_tokens=6, pad_tokens=2),
    Case("h96_bf16", page_size=16, num_kv_heads=8, head_dim=96, **_BF16, num_tokens=6, pad_tokens=2),
    Case("int8", page_size=128, **_SMOLLM2, num_tokens=13, pad_tokens=3, kv_dtype="int8"),
    Case(
        "int8_bf16",
        page_size=16,
        **_LLAMA3_8B,
        num_tokens=19,
        dtype="bfloat16",
        kv_dtype="int8",
        contiguous=True,
    ),
    Case("int4", page_size=128, **_SMOLLM2, num_tokens=13, pad_tokens=3, kv_dtype="int4"),
    Case("fp8", page_size=128, **_LLAMA3_8B, num_tokens=13, pad_tokens=3, kv_dtype="float8_e4m3fn"),
)
CASES_BY_NAME = {case.name: case for case in CASES}


def make_inputs(case: Case, seed: int) -> dict[str, Any]:
    """The keyword arguments of kv_append (all but `implementation`) for a case; k of token 0 is all zeros."""
    rng = np.random.default_rng(seed)
    page_size, total = case.page_size, case.num_tokens + case.pad_tokens
    num_pages = 1 + -(-max(case.num_tokens, 1) // page_size) + 2
    live = page_size + 3 + np.arange(case.num_tokens)  # slots from the fourth of page 1 on
    if not case.contiguous:
        live = page_size + rng.permutation((num_pages - 1) * page_size)[: case.num_tokens]
    slots = np.concatenate([live, rng.integers(0, page_size, case.pad_tokens)])

    k, v = rng.standard_normal((2, total, case.num_kv_heads, case.head_dim), np.float32)
    k[0] = 0.0
    shape = (num_pages, case.num_kv_heads, page_size, 2 * case.head_dim)
    kv_dtype = jnp.dtype(case.kv_dtype)
    kv_scales = None
    if kv_dtype.name in ("int8", "int4", "float8_e4m3fn"):
        kv_scales = jnp.asarray(
            rng.uniform(0.5, 1.5, (num_pages, case.num_kv_heads, 2, page_size)), jnp.float32
        )
    return {
        "k": jnp.asarray(k, case.dtype),
        "v": jnp.asarray(v, case.dtype),
        "kv_pages": jnp.asarray(rng.integers(-7, 8, shape), jnp.float32).astype(kv_dtype),
        "kv_scales": kv_scales,
        "slot_mapping": jnp.asarray(slots, jnp.int32),
    }
