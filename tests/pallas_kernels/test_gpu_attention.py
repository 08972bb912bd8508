"""Ragged paged attention on GPU, by the simulator: values, races, uninitialised memory as NaN.

What this leaves unproven: the simulator has neither mma nor a product that accumulates in place (pl.run_state), so
both are replaced by jnp.dot here, and it does not check that a WGMMA was awaited: what takes its place reads at once.
It has no cp.async either: for compute capability 8.x the copies are replaced by assignments, so that they are awaited
in time is not seen here. That the instructions exist and that the programs fit the chip is the compiler's part:
scripts/aot_kernels_gpu.py. Speed is proven by neither.
The cases' float32 arrays become bfloat16, which is what the GPU kernels take.
"""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.pallas_kernels import mosaic_gpu
from jaxinfer.pallas_kernels.ragged_paged_attention import (
    gpu,
    gpu_prefill,
    gpu_tuning,
    gpu_xla,
    reference,
    xla,
)
from jaxinfer.pallas_kernels.ragged_paged_attention.cases import (
    CASES,
    CASES_BY_NAME,
    Case,
    make_inputs,
    without_rows,
)

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
# Two kv heads, pages of several blocks and blocks of several pages, a split row, an empty one, every option.
QUANTIZED_DECODE = Case(
    "quantized_decode",
    **TINY | {"num_q_heads": 4, "num_kv_heads": 2, "page_size": 32},
    q_lens=(1, 1, 1),
    kv_lens=(65, 0, 300),
    pad_rows=1,
    kv_dtype="int8",
    **OPTIONS,
)
MODEL_CASES = [
    case
    for case in CASES
    if case.kv_dtype != "int4" and (case.kv_dtype in ("float32", "bfloat16") or case.page_size >= 32)
]


@pytest.fixture(autouse=True)
def products_by_dot(monkeypatch):
    def add_dot(acc, a, b):
        return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)

    def add_awaited_dot(out, weights, values_ref):
        values = values_ref[...]
        plgpu.commit_smem()  # WGMMA reads as the copy engine does, and pl.run_state ends when it has read
        return add_dot(out, weights, values)

    wgmma = plgpu.wgmma

    def seen_wgmma(acc_ref, queries_ref, keys_ref):
        """The simulator's own looks for no races in what it reads."""
        keys = keys_ref[...]
        plgpu.commit_smem()  # as above: acc_ref is read next, which awaits the product
        wgmma(acc_ref, queries_ref, keys_ref)
        return keys

    monkeypatch.setattr(plgpu, "mma", add_dot)
    monkeypatch.setattr(plgpu, "wgmma", seen_wgmma)
    monkeypatch.setattr(gpu_prefill, "add_product", add_awaited_dot)

    def assign(source, target):
        target[...] = source[...]

    monkeypatch.setattr(mosaic_gpu, "copy_by_cp_async", assign)
    monkeypatch.setattr(plgpu, "wait_gmem_to_smem", lambda n: None)


def in_bfloat16(case: Case) -> Case:
    kv_dtype = "bfloat16" if case.kv_dtype == "float32" else case.kv_dtype
    return dataclasses.replace(case, dtype="bfloat16", kv_dtype=kv_dtype)


def simulate(inputs, compute_capability=(9, 0)):
    arrays = {name: x for name, x in inputs.items() if name not in STATIC}
    static = {name: inputs[name] for name in STATIC} | {"compute_capability": compute_capability}
    run = jax.jit(lambda arrays: gpu.ragged_paged_attention(**arrays, **static, return_lse=True))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        return [np.asarray(x, np.float32) for x in run(arrays)]


def check(case: Case, max_pages_per_row: int | None = None, compute_capability: tuple[int, int] = (9, 0)):
    inputs = make_inputs(in_bfloat16(case), seed=0, max_pages_per_row=max_pages_per_row)
    if case.kv_dtype == "float8_e4m3fn":
        # XLA flushes subnormal numbers on a CPU and would here, where a GPU does not: test_8_bit_numbers has them all.
        pages = np.asarray(inputs["kv_pages"])
        inputs["kv_pages"] = jnp.asarray(np.where(np.abs(pages) < 2.0**-6, np.zeros_like(pages), pages))
    out, lse = simulate(inputs, compute_capability)
    want, want_lse = (
        np.asarray(x, np.float32) for x in reference.ragged_paged_attention(**inputs, return_lse=True)
    )
    pages = np.asarray(inputs["kv_pages"], np.float32)
    if inputs["kv_scales"] is not None:
        head_dim = inputs["q"].shape[-1]
        pages = np.where(np.isnan(pages), 0, pages) * np.repeat(
            np.asarray(inputs["kv_scales"]).swapaxes(2, 3), head_dim, axis=3
        )
    largest = np.nanmax(np.abs(pages))
    # Weights (that sum to 1) and the output are each rounded to bfloat16: 2^-9 of the largest |V| twice. The prefill
    # kernel also rounds K and V of 8-bit pages once they are scaled: |V| by 2^-9, and a score by the sum of H products
    # of N(0, 1) queries with errors of up to 2^-9 |K|, uniform, which 5 sigma bound; the score's error is the lse's.
    lse_error = (
        inputs["q"].shape[-1] * 2.0**-21
    )  # H exact products in float32, |score| at most 8: H 2^-24 x 8
    out_error = 2.0**-8 * largest
    if inputs["kv_scales"] is not None and inputs["max_q_len"] > gpu.MAX_DECODE_Q_LEN:
        lse_error += 5 * 2.0**-9 / np.sqrt(3) * largest
        out_error += (2.0**-9 + lse_error) * largest
    np.testing.assert_allclose(out, want, rtol=0, atol=out_error)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=lse_error)


def test_mixed_batch_with_every_option_equals_the_reference():
    check(MIXED)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_8_bit_pages_decode_with_every_option_equals_the_reference(kv_dtype: str):
    check(dataclasses.replace(QUANTIZED_DECODE, kv_dtype=kv_dtype))


def test_decode_by_cp_async_equals_the_reference():
    case = dataclasses.replace(QUANTIZED_DECODE, kv_dtype="bfloat16", page_size=16)
    check(case, compute_capability=(8, 0))


@pytest.fixture
def two_buffers(monkeypatch):
    """Blocks that arrive in two buffers alone, so that rows of a few blocks use each of them again and again."""
    monkeypatch.setattr(gpu_tuning, "MAX_STAGES", 2)


LONGER = Case("longer", **TINY | {"page_size": 64}, q_lens=(1, 40), kv_lens=(330, 330))


@pytest.mark.usefixtures("two_buffers")
@pytest.mark.parametrize("kv_dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_buffer_is_filled_again_only_after_all_have_read_it(kv_dtype: str):
    """By races: every read of a buffer is ordered before the copy engine's next write into it."""
    check(dataclasses.replace(LONGER, kv_dtype=kv_dtype))


def test_8_bit_numbers_are_widened_exactly():
    """Every code of both formats, in both dtypes, against ml_dtypes. XLA on a CPU flushes subnormal numbers, so
    float8 is looked at before its product with the unit, a power of two."""
    codes = np.arange(256, dtype=np.uint8)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        integers = codes.view(np.int8)
        got = mosaic_gpu.widen(jnp.asarray(integers), jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(got, np.float32), integers.astype(np.float32))
        floats = codes[(codes & 0x7F) != 0x7F].view(ml_dtypes.float8_e4m3fn)  # all but the two NaN
        bits = np.asarray(mosaic_gpu.float8_bits(jnp.asarray(floats), jnp.dtype(dtype)))
        got = bits.view(dtype).astype(np.float64) * float(mosaic_gpu.float8_unit(jnp.dtype(dtype)))
        np.testing.assert_array_equal(got, floats.astype(np.float64))


@pytest.mark.slow
@pytest.mark.parametrize("case", TINY_CASES, ids=lambda case: case.name)
def test_equals_the_reference(case: Case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MODEL_CASES, ids=lambda case: case.name)
def test_equals_the_reference_at_the_heads_of_real_models(case: Case):
    check(case, max_pages_per_row=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case for case in MODEL_CASES if (case.max_q_len or max(case.q_lens)) <= gpu.MAX_DECODE_Q_LEN],
    ids=lambda case: case.name,
)
def test_decode_by_cp_async_equals_the_reference_at_the_heads_of_real_models(case: Case):
    check(case, max_pages_per_row=4, compute_capability=(8, 0))


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_8_bit_pages_prefill_with_every_option_equals_the_reference(kv_dtype: str):
    check(dataclasses.replace(MIXED, kv_dtype=kv_dtype))


@pytest.mark.slow
def test_a_batch_without_rows_is_zeros():
    out, lse = simulate(without_rows(in_bfloat16(MIXED)))
    assert not out.any() and (lse == -np.inf).all()


@pytest.mark.slow
def test_same_call_twice_gives_the_same_bits():
    first, second = (simulate(make_inputs(in_bfloat16(MIXED), seed=0)) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.parametrize(
    ("case", "capability", "message"),
    [
        (CASES_BY_NAME["smollm2_decode"], (9, 0), r"kv_pages float32.*xla"),
        (CASES_BY_NAME["decode_int4"], (9, 0), r"kv_pages int4.*xla"),
        (CASES_BY_NAME["decode_int8"], (9, 0), r"q float32.*xla"),
        (in_bfloat16(CASES_BY_NAME["decode_int8"]), (9, 0), r"page_size 16.*int8.*xla"),
        (in_bfloat16(CASES_BY_NAME["smollm2_decode"]), (7, 5), r"7\.5 is none of 8\.0.*xla"),
        (in_bfloat16(CASES_BY_NAME["smollm2_mixed"]), (10, 0), r"max_q_len 33.*WGMMA.*10\.0.*gpu_xla"),
        (in_bfloat16(CASES_BY_NAME["smollm2_mixed"]), (8, 0), r"max_q_len 33.*WGMMA.*8\.0.*gpu_xla"),
        (in_bfloat16(Case("x", 2, 1, 64, 8, (1,), (1,))), (8, 0), r"page_size 8.*cp\.async.*xla"),
        (in_bfloat16(Case("x", 2, 1, 72, 16, (1,), (1,))), (9, 0), r"head_dim 72.*xla"),
        (
            in_bfloat16(Case("x", 8, 8, 80, 64, (1,), (1,), kv_dtype="int8")),
            (8, 0),
            r"head_dim 80.*int8.*8\.0.*multiple of 32.*bfloat16.*xla",
        ),
        (in_bfloat16(Case("x", 2, 1, 64, 24, (1,), (1,))), (9, 0), r"page_size 24.*xla"),
        (in_bfloat16(Case("x", 65, 1, 64, 16, (1,), (1,))), (9, 0), r"65 query heads.*xla"),
        (
            in_bfloat16(Case("x", 32, 1, 256, 16, (1,), (1,))),
            (8, 9),
            r"32 query heads.*shared memory.*8\.9.*xla",
        ),
    ],
)
def test_what_has_no_kernel_is_refused_with_what_works(case, capability, message):
    with pytest.raises(NotImplementedError, match=message):
        gpu.ragged_paged_attention(**make_inputs(case, seed=0), compute_capability=capability)


def test_gpu_xla_decodes_on_gpu_and_prefills_in_xla(monkeypatch):
    """Which of the two a call takes is in its shapes; a GPU without a decode kernel is refused for both."""
    calls = []
    monkeypatch.setattr(gpu, "ragged_paged_attention", lambda *_, **options: calls.append(options))
    decode = make_inputs(in_bfloat16(CASES_BY_NAME["smollm2_decode"]), seed=0)
    assert gpu_xla.ragged_paged_attention(**decode, compute_capability=(8, 0)) is None
    assert [options["compute_capability"] for options in calls] == [(8, 0)]
    prefill = make_inputs(in_bfloat16(CASES_BY_NAME["smollm2_prefill_one"]), seed=0)
    out = gpu_xla.ragged_paged_attention(**prefill, compute_capability=(8, 0))
    np.testing.assert_array_equal(out, xla.ragged_paged_attention(**prefill))
    assert len(calls) == 1
    for inputs in (decode, prefill):
        with pytest.raises(NotImplementedError, match=r"gpu_xla.*7\.5 is none of 8\.0.*xla"):
            gpu_xla.ragged_paged_attention(**inputs, compute_capability=(7, 5))
