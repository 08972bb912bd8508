"""Ragged paged attention on GPU, by the simulator: values, races, uninitialised memory as NaN.

What this leaves unproven: the simulator has neither mma nor a product that accumulates in place (pl.run_state), so
both are replaced by jnp.dot here, and it does not check that a WGMMA was awaited. That the instructions exist and
that the programs fit the chip is the compiler's part: scripts/aot_kernels_gpu.py. Speed is proven by neither.
The cases' float32 arrays become bfloat16, which is what the GPU kernels take.
"""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import gpu, gpu_prefill, reference
from pallas_kernels.ragged_paged_attention.cases import CASES, CASES_BY_NAME, Case, make_inputs

STATIC = ("sm_scale", "max_q_len", "sliding_window", "soft_cap")
TINY = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 64, "page_size": 16}
OPTIONS = {"sliding_window": 20, "soft_cap": 5.0, "sinks": True}
# Split decode rows, more blocks than buffers, chunk and whole prefill, tiles that end early, every option: one program,
# since the simulator takes some ten seconds to compile one, whatever its shapes.
MIXED = Case(
    "mixed",
    **TINY | {"page_size": 64},
    q_lens=(1, 40, 70),
    kv_lens=(300, 150, 70),
    pad_tokens=3,
    pad_rows=1,
    **OPTIONS,
)
TINY_CASES = (
    Case("splits", **TINY, q_lens=(1, 1, 1), kv_lens=(3, 0, 700), pad_rows=1, pad_tokens=1),
    Case("splits_with_options", **TINY, q_lens=(1,), kv_lens=(700,), soft_cap=5.0, sinks=True),
    Case("drafts_with_options", **TINY, q_lens=(1, 5, 3), kv_lens=(40, 47, 3), **OPTIONS),
    Case("prefill", **TINY, q_lens=(1, 40, 70), kv_lens=(9, 150, 70), pad_tokens=3, pad_rows=1),
)
MODEL_CASES = [case for case in CASES if case.kv_dtype in ("float32", "bfloat16")]


@pytest.fixture(autouse=True)
def products_by_dot(monkeypatch):
    def add_dot(acc, a, b):
        return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)

    monkeypatch.setattr(plgpu, "mma", add_dot)
    monkeypatch.setattr(gpu_prefill, "add_product", lambda out, weights, ref: add_dot(out, weights, ref[...]))


def in_bfloat16(case: Case) -> Case:
    return dataclasses.replace(case, dtype="bfloat16", kv_dtype="bfloat16")


def simulate(inputs):
    arrays = {name: x for name, x in inputs.items() if name not in STATIC}
    static = {name: inputs[name] for name in STATIC}
    run = jax.jit(lambda arrays: gpu.ragged_paged_attention(**arrays, **static, return_lse=True))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        return [np.asarray(x, np.float32) for x in run(arrays)]


def check(case: Case, max_pages_per_row: int | None = None):
    inputs = make_inputs(in_bfloat16(case), seed=0, max_pages_per_row=max_pages_per_row)
    out, lse = simulate(inputs)
    want, want_lse = (
        np.asarray(x, np.float32) for x in reference.ragged_paged_attention(**inputs, return_lse=True)
    )
    # Weights (that sum to 1) and the output are each rounded to bfloat16: 2^-9 of the largest |V| twice.
    largest = np.nanmax(np.abs(np.asarray(inputs["kv_pages"], np.float32)))
    np.testing.assert_allclose(out, want, rtol=0, atol=2.0**-8 * largest)
    # Scores are float32 sums of H exact products, of which |score| is at most some 8: H 2^-24 x 8.
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=inputs["q"].shape[-1] * 2.0**-21)


def test_mixed_batch_with_every_option_equals_the_reference():
    check(MIXED)


@pytest.mark.slow
@pytest.mark.parametrize("case", TINY_CASES, ids=lambda case: case.name)
def test_equals_the_reference(case: Case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MODEL_CASES, ids=lambda case: case.name)
def test_equals_the_reference_at_the_heads_of_real_models(case: Case):
    check(case, max_pages_per_row=4)


@pytest.mark.slow
def test_same_call_twice_gives_the_same_bits():
    first, second = (simulate(make_inputs(in_bfloat16(MIXED), seed=0)) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.parametrize(
    ("case", "capability", "message"),
    [
        (CASES_BY_NAME["smollm2_decode"], (9, 0), r"kv_pages float32.*xla"),
        (CASES_BY_NAME["decode_int8"], (9, 0), r"kv_pages int8.*xla"),
        (in_bfloat16(CASES_BY_NAME["smollm2_decode"]), (8, 0), r"\(8, 0\) has no TMA.*xla"),
        (in_bfloat16(CASES_BY_NAME["smollm2_mixed"]), (10, 0), r"max_q_len 33.*WGMMA.*\(10, 0\).*xla"),
        (in_bfloat16(Case("x", 2, 1, 72, 16, (1,), (1,))), (9, 0), r"head_dim 72.*xla"),
        (in_bfloat16(Case("x", 2, 1, 64, 24, (1,), (1,))), (9, 0), r"page_size 24.*xla"),
        (in_bfloat16(Case("x", 65, 1, 64, 16, (1,), (1,))), (9, 0), r"65 query heads.*xla"),
    ],
)
def test_what_has_no_kernel_is_refused_with_what_works(case, capability, message):
    with pytest.raises(NotImplementedError, match=message):
        gpu.ragged_paged_attention(**make_inputs(case, seed=0), compute_capability=capability)
