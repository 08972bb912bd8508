"""The xla path and the reference against numpy in float64, on poisoned pools, and the contract's refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import CASES, CASES_BY_NAME, Case, make_inputs

STATIC = ("sm_scale", "max_q_len", "sliding_window", "soft_cap", "return_lse", "implementation")
attend = jax.jit(ragged_paged_attention, static_argnames=STATIC)


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


def tolerance(case: Case) -> tuple[float, float]:
    """(out, lse). Inputs are exact in both, sums are float32: |values| stay under about 8, sums over at most 700 terms
    err by some 1e-5 at worst in float32; a bfloat16 result is rounded once more, by 2**-9 of a value under 4."""
    return 2e-5 + (4 * 2**-9 if case.dtype == "bfloat16" else 0.0), 5e-5


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_numpy_on_a_poisoned_pool(case: Case, implementation: str) -> None:
    inputs = make_inputs(case, seed=0, max_pages_per_row=4)
    expected, expected_lse = numpy_attention(inputs)
    out, lse = attend(**inputs, return_lse=True, implementation=implementation)
    assert out.dtype == inputs["q"].dtype and out.shape == inputs["q"].shape
    out_tolerance, lse_tolerance = tolerance(case)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0, atol=out_tolerance)
    np.testing.assert_allclose(np.asarray(lse), expected_lse, rtol=0, atol=lse_tolerance)
