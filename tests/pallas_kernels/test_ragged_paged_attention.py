"""The xla path and the reference against numpy in float64, on poisoned pools, and the contract's refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels import cpu_pages
from jaxinfer.pallas_kernels.ragged_paged_attention import WINDOW_AS_DATA, ragged_paged_attention, xla
from jaxinfer.pallas_kernels.ragged_paged_attention.cases import (
    CASES,
    CASES_BY_NAME,
    Case,
    make_inputs,
    without_rows,
)

STATIC = ("sm_scale", "max_q_len", "soft_cap", "return_lse", "implementation")
attend_jit = jax.jit(ragged_paged_attention, static_argnames=(*STATIC, "sliding_window"))
attend_window_as_data = jax.jit(ragged_paged_attention, static_argnames=STATIC)


def attend(*, kv_pages: jax.Array, implementation: str, **inputs: Any) -> Any:
    """With the contracts' pages in the layout of the implementation."""
    return attend_jit(
        kv_pages=cpu_pages.of_layout(kv_pages, implementation), implementation=implementation, **inputs
    )


def numpy_attention(inputs: dict) -> tuple[np.ndarray, np.ndarray]:
    """Token by token in float64, from the contract's text: out [T, N, H], lse [T, N]."""
    q = np.asarray(inputs["q"], np.float64)
    pages = np.asarray(inputs["kv_pages"].astype(jnp.float32), np.float64)
    scales, table = inputs["kv_scales"], np.asarray(inputs["page_table"])
    kv_lens, cu_q_lens = np.asarray(inputs["kv_lens"]), np.asarray(inputs["cu_q_lens"])
    num_seqs = int(inputs["distribution"][2])
    page_size, head_dim, group = pages.shape[2], q.shape[2], q.shape[1] // pages.shape[1]
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row in range(num_seqs):
        length, q_len = int(kv_lens[row]), int(cu_q_lens[row + 1] - cu_q_lens[row])
        if length == 0:
            continue
        where = [(table[row, p // page_size], p % page_size) for p in range(length)]
        kv = np.stack([pages[page, :, offset] for page, offset in where])  # [S, K, 2H]
        k, v = kv[..., :head_dim], kv[..., head_dim:]
        if scales is not None:
            s = np.stack(
                [np.asarray(scales, np.float64)[page, :, :, offset] for page, offset in where]
            )  # [S, K, 2]
            k, v = k * s[:, :, :1], v * s[:, :, 1:]
        for i in range(q_len):
            token, position = int(cu_q_lens[row]) + i, length - q_len + i
            low = 0 if inputs["sliding_window"] is None else max(0, position + 1 - inputs["sliding_window"])
            for head in range(q.shape[1]):
                scores = k[low : position + 1, head // group] @ q[token, head] * inputs["sm_scale"]
                if inputs["soft_cap"] is not None:
                    scores = inputs["soft_cap"] * np.tanh(scores / inputs["soft_cap"])
                if inputs["sink_logits"] is not None:
                    scores = np.append(scores, np.asarray(inputs["sink_logits"])[head])
                lse[token, head] = np.logaddexp.reduce(scores)
                weights = np.exp(scores - lse[token, head])[: position + 1 - low]
                out[token, head] = weights @ v[low : position + 1, head // group]
    return out, lse


def assert_close(
    case: Case,
    out: jax.Array,
    lse: jax.Array,
    expected: np.ndarray,
    expected_lse: np.ndarray,
    largest_rounded: float = 0.0,
) -> None:
    """The inputs are the same numbers in both and everything inside is float32: values under 10, sums of at most 700
    terms, err by some 1e-5. A bfloat16 result is rounded once more, to within 2**-8 of its value (half a unit in
    the last of 8 significant bits).

    largest_rounded: the largest |V| where softmax weights, which sum to 1, are rounded to bfloat16, each by 2**-9."""
    rtol = 2**-8 if case.dtype == "bfloat16" else 0.0
    atol = 2e-5 + largest_rounded * 2**-9
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), expected, rtol=rtol, atol=atol)
    np.testing.assert_allclose(np.asarray(lse), expected_lse, rtol=0, atol=5e-5)


def largest_rounded(implementation: str, inputs: dict[str, Any]) -> float:
    """For `assert_close`: tiles of xla and cpu round weights, where queries and pages both are bfloat16."""
    if (
        implementation not in ("xla", "cpu")
        or not inputs["q"].dtype == inputs["kv_pages"].dtype == jnp.bfloat16
    ):
        return 0.0
    v = np.asarray(inputs["kv_pages"].astype(jnp.float32))[..., inputs["q"].shape[-1] :]
    return float(np.nanmax(np.abs(v)))


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu", "cpu_invariant"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_numpy_on_a_poisoned_pool(case: Case, implementation: str) -> None:
    inputs = make_inputs(case, seed=0, max_pages_per_row=4)
    expected, expected_lse = numpy_attention(inputs)
    out, lse = attend(**inputs, return_lse=True, implementation=implementation)
    assert out.dtype == inputs["q"].dtype and out.shape == inputs["q"].shape
    assert_close(case, out, lse, expected, expected_lse, largest_rounded(implementation, inputs))


@pytest.mark.parametrize("implementation", ["xla", "cpu", "cpu_invariant"])
@pytest.mark.parametrize("sliding_window", [None, 140])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla_walks_several_tiles_and_blocks(
    dtype: str, sliding_window: int | None, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than one query tile per row, more than one kv block per walk, more than one chunk of decode rows' pages."""
    monkeypatch.setattr(xla, "CHUNK_TOKENS", 96)  # six pages
    decode_lens = (300, 1, 129, 128, 0, 127, 5, 257, 64, 2)
    q_lens, kv_lens = (1,) * 10 + (150, 70), (*decode_lens, 290, 70)
    case = Case(
        "tiles", 4, 2, 64, 16, q_lens, kv_lens, pad_tokens=3, pad_rows=1, sliding_window=sliding_window, sinks=True,
        dtype=dtype, kv_dtype=dtype,
    )  # fmt: skip
    inputs = make_inputs(case, seed=1)
    expected, expected_lse = numpy_attention(inputs)
    out, lse = attend(**inputs, return_lse=True, implementation=implementation)
    assert_close(case, out, lse, expected, expected_lse, largest_rounded(implementation, inputs))


@pytest.mark.parametrize("implementation", ["xla", "cpu", "cpu_invariant"])
def test_many_rows_without_kv_tokens_between_others(implementation: str) -> None:
    """As rows that finished inside a decode of several steps: more of them than are worked on at a time."""
    kv_lens = (40, *(0,) * 98, 17, 33)
    case = Case("finished", 4, 2, 64, 16, (1,) * 101, kv_lens)
    inputs = make_inputs(case, seed=4)
    expected, expected_lse = numpy_attention(inputs)
    out, lse = attend(**inputs, return_lse=True, implementation=implementation)
    assert_close(case, out, lse, expected, expected_lse, largest_rounded(implementation, inputs))


@pytest.mark.parametrize("implementation", WINDOW_AS_DATA)
def test_a_window_as_data_gives_what_a_static_one_does(implementation: str) -> None:
    """The largest number among them, which hides nothing."""
    case = Case("data", 4, 2, 64, 16, (1, 1, 70, 33), (200, 9, 290, 33), pad_tokens=3, sinks=True)
    inputs = make_inputs(case, seed=5)
    laid_out = inputs | {"kv_pages": cpu_pages.of_layout(inputs["kv_pages"], implementation)}
    for window in (1, 16, 37, 2**31 - 1):
        expected = numpy_attention(inputs | {"sliding_window": window})
        options = {"sliding_window": jnp.int32(window), "return_lse": True, "implementation": implementation}
        out, lse = attend_window_as_data(**(laid_out | options))
        assert_close(case, out, lse, *expected)


def test_a_window_as_data_is_refused_where_it_must_be_static() -> None:
    inputs = make_inputs(CASES[0], seed=0) | {"sliding_window": jnp.int32(4)}
    with pytest.raises(NotImplementedError, match="'tpu' takes sliding_window as an int alone"):
        ragged_paged_attention(**inputs, implementation="tpu")
    with pytest.raises(ValueError, match="sliding_window is int32"):
        ragged_paged_attention(**inputs | {"sliding_window": jnp.ones(2, jnp.int32)}, implementation="xla")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 250, "sinks": True},
        {"sliding_window": 40},
        {"soft_cap": 5.0, "dtype": "bfloat16", "kv_dtype": "bfloat16"},
        {"sliding_window": 190, "kv_dtype": "int8"},
    ],
)
def test_cpu_takes_blocks_that_need_no_mask_side_by_side(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of four blocks, of two and of one, among them those that a window cuts at its start."""
    monkeypatch.setattr(xla, "WIDE_SCORES", (4 * 2 * 64 * 64, 2 * 2 * 64 * 64))
    case = Case("wide", 4, 2, 64, 16, (1, 70, 33), (40, 583, 385), pad_tokens=3, **options)
    inputs = make_inputs(case, seed=3)
    expected, expected_lse = numpy_attention(inputs)
    out, lse = attend(**inputs, return_lse=True, implementation="cpu")
    assert_close(case, out, lse, expected, expected_lse, largest_rounded("cpu", inputs))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {}), ("bfloat16", {"sliding_window": 37, "soft_cap": 5.0, "sinks": True})],
)
def test_cpu_invariant_gives_a_token_the_same_bits_in_every_batch(dtype: str, options: dict) -> None:
    """Mixed with other rows, as one of many decode rows, in a chunk of its own that starts anywhere."""
    q_lens, kv_lens = (1, 1, 1, 40, 17, 133), (300, 1, 129, 290, 17, 133)
    case = Case("bits", 9, 3, 64, 16, q_lens, kv_lens, 5, 2, dtype=dtype, kv_dtype=dtype, **options)
    inputs = make_inputs(case, seed=2)

    def bits(**change) -> list[np.ndarray]:
        found = attend(**(inputs | change), return_lse=True, implementation="cpu_invariant")
        return [np.asarray(x.astype(jnp.float32)) for x in found]

    whole = bits()
    rows = np.repeat(np.arange(len(q_lens)), q_lens)
    positions = np.concatenate([np.arange(kv - q, kv) for q, kv in zip(q_lens, kv_lens, strict=True)])
    q, table = np.asarray(inputs["q"]), np.asarray(inputs["page_table"])
    order = np.random.default_rng(0).permutation(sum(q_lens))
    for chunk in (order, order[:1]):  # decode rows, sorted by nothing
        decode = bits(
            q=q[chunk],
            page_table=table[rows[chunk]],
            kv_lens=positions[chunk].astype(np.int32) + 1,
            cu_q_lens=np.arange(len(chunk) + 1, dtype=np.int32),
            distribution=np.full(3, len(chunk), np.int32),
            max_q_len=1,
        )
        for got, want in zip(decode, whole, strict=True):
            np.testing.assert_array_equal(got, want[chunk])
    begin = int(inputs["cu_q_lens"][5])
    for start, end in ((1, 70), (50, 53)):  # chunks of the last row
        alone = bits(
            q=q[begin + start : begin + end],
            page_table=table[5:6],
            kv_lens=np.array([end], np.int32),
            cu_q_lens=np.array([0, end - start], np.int32),
            distribution=np.array([0, 1, 1], np.int32),
            max_q_len=end - start,
        )
        for got, want in zip(alone, whole, strict=True):
            np.testing.assert_array_equal(got, want[begin + start : begin + end])


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu", "cpu_invariant"])
def test_a_batch_without_rows_is_zeros(implementation: str) -> None:
    """What warming a program up asks for: every row and token is padding."""
    out, lse = attend(
        **without_rows(CASES_BY_NAME["mixed_window_cap_sinks"]),
        return_lse=True,
        implementation=implementation,
    )
    assert not np.asarray(out).any()
    assert (np.asarray(lse) == -np.inf).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((2, 4, 32))}, r"with head_dim 32 needs \[num_pages, K, page_size, 64\]"),
        ({"implementation": "cpu"}, r"needs \[num_pages, 2, K, page_size \* 64 / lanes, lanes\]"),
        ({"q": jnp.zeros((2, 3, 64))}, "no multiple of 2 kv heads"),
        ({"kv_scales": jnp.zeros((5, 2, 2, 16))}, "pass kv_scales=None"),
        ({"kv_pages": jnp.zeros((5, 2, 16, 128), jnp.int8)}, "kv_scales f32"),
        ({"kv_pages": jnp.zeros((5, 2, 16, 128), jnp.int32)}, "must be one of"),
        ({"kv_lens": jnp.zeros(3, jnp.int32)}, "kv_lens is"),
        ({"cu_q_lens": jnp.zeros(2, jnp.int32)}, "cu_q_lens is"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"soft_cap": 0.0}, "soft_cap is 0"),
        ({"max_q_len": 0}, "max_q_len is 0"),
        ({"sink_logits": jnp.zeros(3)}, "sink_logits is"),
        ({"implementation": "fast"}, "choose one of"),
    ],
)
def test_refuses_by_name(change: dict, message: str) -> None:
    good = {
        "q": jnp.zeros((2, 4, 64)),
        "kv_pages": jnp.zeros((5, 2, 16, 128)),
        "kv_scales": None,
        "page_table": jnp.zeros((2, 2), jnp.int32),
        "kv_lens": jnp.zeros(2, jnp.int32),
        "cu_q_lens": jnp.zeros(3, jnp.int32),
        "distribution": jnp.zeros(3, jnp.int32),
        "sm_scale": 0.1,
        "max_q_len": 1,
        "implementation": "xla",
    }
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**(good | change))
