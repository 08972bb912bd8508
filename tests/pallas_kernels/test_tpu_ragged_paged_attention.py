"""ragged_paged_attention on TPU, by the simulator: values, races, uninitialised memory (NaN).

make_inputs poisons the null page, unused pages and the slots behind kv_lens, so every match below also says that
none of them reach a result. Accepted by the chip's compiler is scripts/aot_kernels.py's part; speed is nobody's here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.pallas_kernels.ragged_paged_attention import reference, tpu
from jaxinfer.pallas_kernels.ragged_paged_attention.cases import (
    CASES,
    CASES_BY_NAME,
    Case,
    make_inputs,
    without_rows,
)
from jaxinfer.pallas_kernels.ragged_paged_attention.tpu_schedule import LANES, Blocks

SIMULATOR = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan")
SMALLEST_PAGE = {"int8": 32, "int4": 64, "float8_e4m3fn": 32}  # whole tiles
STATIC = ("sm_scale", "max_q_len", "sliding_window", "soft_cap")
FAST = ("smollm2_decode_one", "gemma3_decode_window", "decode_int4")  # the rest simulates for long

# Blocks so small that short rows take several items, tiles, fetches, interior and edge blocks.
SMALL_BLOCKS = {
    "decode_blocks": Blocks(q_block=16, q_tile=2, kv_fetch=256, kv_block=128, kv_edge=128),
    "prefill_blocks": Blocks(q_block=32, q_tile=16, kv_fetch=128, kv_block=128, kv_edge=128),
}
_MULTI = {
    "q_lens": (1, 1, 3, 40),
    "kv_lens": (300, 129, 200, 290),
    "num_q_heads": 6,
    "num_kv_heads": 2,
    "page_size": 64,
    "pad_tokens": 3,
    "pad_rows": 1,
}
BLOCKED_CASES = (
    Case("blocked", head_dim=64, **_MULTI),
    Case(
        "blocked_h128_window_cap_sinks", head_dim=128, **_MULTI, sliding_window=140, soft_cap=5.0, sinks=True
    ),
    Case("blocked_int8", head_dim=64, **_MULTI, kv_dtype="int8", dtype="bfloat16", sliding_window=200),
)


def simulate(inputs, **blocks):
    """out, lse. A data race raises."""
    arrays = {key: value for key, value in inputs.items() if key not in STATIC}
    static = {key: inputs[key] for key in STATIC}
    attend = functools.partial(tpu.ragged_paged_attention, **static, **blocks, return_lse=True)
    with pltpu.force_tpu_interpret_mode(SIMULATOR):
        out, lse = jax.jit(lambda arrays: attend(**arrays))(arrays)
        return np.asarray(out.astype(jnp.float32)), np.asarray(lse)


def assert_matches_reference(case: Case, out, lse, inputs) -> None:
    want, want_lse = jax.jit(
        functools.partial(reference.ragged_paged_attention, return_lse=True), static_argnames=STATIC
    )(**inputs)
    # float32: sums over at most 700 terms of size about 4. bfloat16 results and softmax weights are each rounded
    # by 2**-9 of values under 4. Scores are float32 products of exactly widened inputs everywhere.
    tolerance = 2e-5 + (2 * 4 * 2**-9 if case.dtype == "bfloat16" else 0.0)
    np.testing.assert_allclose(out, np.asarray(want.astype(jnp.float32)), rtol=0, atol=tolerance)
    np.testing.assert_allclose(lse, np.asarray(want_lse), rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow) for case in CASES],
)
def test_matches_reference(case: Case):
    """Every case at its heads, head_dim and dtypes, with the blocks that `tuning` picks, up to 3 pages + 1 token."""
    page_size = max(case.page_size, SMALLEST_PAGE.get(case.kv_dtype, 8))
    case = dataclasses.replace(case, page_size=page_size)
    inputs = make_inputs(case, seed=0, max_pages_per_row=4)
    assert_matches_reference(case, *simulate(inputs), inputs)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name == "blocked" else pytest.mark.slow)
        for case in BLOCKED_CASES
    ],
)
def test_matches_reference_over_many_blocks(case: Case):
    inputs = make_inputs(case, seed=0)
    assert_matches_reference(case, *simulate(inputs, **SMALL_BLOCKS), inputs)


def test_the_same_call_twice_gives_the_same_bits():
    inputs = make_inputs(CASES_BY_NAME["smollm2_decode_one"], seed=1, max_pages_per_row=2)
    (out, lse), (again, lse_again) = simulate(inputs), simulate(inputs)
    np.testing.assert_array_equal(out, again)
    np.testing.assert_array_equal(lse, lse_again)


@pytest.mark.slow
def test_a_batch_without_rows_is_zeros():
    out, lse = simulate(without_rows(BLOCKED_CASES[1]), **SMALL_BLOCKS)
    assert not out.any() and (lse == -np.inf).all()


def test_pages_that_no_row_needs_are_not_fetched():
    """Table entries behind the window and behind kv_lens name pages outside the pool: the simulator raises on them."""
    case = Case("window", 2, 1, 64, 16, (1, 2), (60, 41), pad_rows=1, sliding_window=20)
    inputs = make_inputs(case, seed=0)
    table = np.asarray(inputs["page_table"]).copy()
    want_inputs = inputs | {"page_table": jnp.asarray(table)}
    table[0, :2] = table[1, :1] = 10_000  # positions 0..40 of row 0, 0..19 of row 1 are seen by no query
    table[0, 4:] = table[1, 3:] = table[2:] = 10_000
    out, lse = simulate(inputs | {"page_table": jnp.asarray(table)})
    assert_matches_reference(case, out, lse, want_inputs)


@pytest.mark.parametrize(
    ("change", "rows", "message"),
    [
        (
            {"page_size": 16, "kv_dtype": "int8"},
            1,
            "page_size is 16 but int8 pages on TPU need a multiple of 32",
        ),
        ({"page_size": 48}, 1, f"page_size is 48 .* a divisor or a multiple of {LANES}"),
        ({"dtype": "float16"}, 1, "q is float16.*use bfloat16"),
        ({}, 300_000, "page_table of 300001 rows x .* need .* bytes of scalar memory but 1015808 are free"),
    ],
)
def test_what_the_kernel_lacks_is_refused_with_what_works(change, rows, message):
    case = dataclasses.replace(CASES_BY_NAME["smollm2_decode_one"], **change, pad_rows=rows)
    inputs = make_inputs(case, seed=0)
    with pytest.raises(NotImplementedError, match=message):
        tpu.ragged_paged_attention(**inputs)
