"""quantized_matmul on TPU, by the simulator: values, races, uninitialised memory (NaN); and its counts.

What lies past an array's end is NaN in the simulator, so every ragged T and F below also says that none of it
reaches a result. Accepted by the chip's compiler is scripts/aot_kernels.py's part; speed is nobody's here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.pallas_kernels.quantized_matmul import reference, tpu, tuning
from jaxinfer.pallas_kernels.quantized_matmul.cases import (
    AWKWARD_CASES,
    CASES_BY_NAME,
    MODEL_CASES,
    Case,
    capped,
    make_inputs,
    model_case,
    structs,
    tolerance,
)
from jaxinfer.pallas_kernels.quantized_matmul.costs import least
from jaxinfer.pallas_kernels.quantized_matmul.tpu_schedule import Blocks, count

SIMULATOR = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan")
# Blocks so small that F, D and T take several steps, the last of F and T cut short.
SMALL_BLOCKS = {
    "channel": Blocks(block_t=16, block_f=256, block_d=128, tile_f=128, chunk=128),
    "groups": Blocks(block_t=32, block_f=256, block_d=256, tile_f=128, chunk=128),
}
# The rest simulates for long.
FAST = (
    "f32",
    "q8_0",
    "int4_group128_many_rows",
    "w8a8_many_rows",
    "ragged_out_dim",
    "blocked_q4_1",
    "blocked_int8",
)
BLOCKED_CASES = {
    Case("blocked_int8", 39, 320, 256): SMALL_BLOCKS["channel"],
    Case("blocked_w8a8", 39, 320, 256, w8a8="int8"): SMALL_BLOCKS["channel"],
    Case("blocked_q4_1", 39, 320, 512, "int4", 32, True): SMALL_BLOCKS["groups"],
    Case("blocked_q4_1_many_rows", 70, 320, 512, "int4", 32, True): SMALL_BLOCKS["groups"],
}


def simulate(inputs, **options):
    """A data race raises."""
    out_dtype = jnp.dtype(inputs["out_dtype"] or inputs["x"].dtype)
    arrays = [inputs[name] for name in ("x", "qvalue", "scale", "offset")]
    with pltpu.force_tpu_interpret_mode(SIMULATOR):
        multiply = jax.jit(
            lambda *arrays: tpu.quantized_matmul(*arrays, w8a8=inputs["w8a8"], out_dtype=out_dtype, **options)
        )
        return np.asarray(multiply(*arrays).astype(jnp.float32))


def check(case: Case, **options) -> None:
    inputs = make_inputs(case, seed=0)
    out_dtype = jnp.dtype(case.out_dtype or case.dtype)
    want = reference.quantized_matmul(**inputs | {"out_dtype": out_dtype})
    np.testing.assert_allclose(
        simulate(inputs, **options), np.asarray(want.astype(jnp.float32)), rtol=0, atol=tolerance(case)
    )


def marked(cases) -> list:
    return [
        pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
        for case in cases
    ]


@pytest.mark.parametrize("case", marked(AWKWARD_CASES))
def test_equals_the_reference(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", marked(BLOCKED_CASES))
def test_equals_the_reference_over_many_blocks(case: Case) -> None:
    check(case, blocks=BLOCKED_CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", MODEL_CASES, ids=lambda case: case.name)
def test_equals_the_reference_at_the_shapes_of_real_models(case: Case) -> None:
    """F up to 640, D up to 1,536, T up to 80: their last digits are what they are in the models."""
    check(capped(case, out_dim=640, in_dim=1536))


@pytest.mark.slow
def test_the_depth_of_the_matrix_unit_changes_no_value() -> None:
    """v6e's unit is 256 deep, so a chunk holds 8 groups of 32."""
    check(Case("deep", 5, 128, 512, "int4", 32, True), device_kind="TPU v6 lite")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4_group64_no_offset", "w8a8_many_rows"])
def test_same_call_twice_gives_the_same_bits(name: str) -> None:
    inputs = make_inputs(CASES_BY_NAME[name], seed=1)
    np.testing.assert_array_equal(simulate(inputs), simulate(inputs))


def test_what_does_not_fit_is_refused_with_what_works() -> None:
    """D of which no block is whole lanes must be fetched whole."""
    x, qvalue = (
        jax.ShapeDtypeStruct((512, 100_003), jnp.bfloat16),
        jax.ShapeDtypeStruct((512, 100_003), jnp.int8),
    )
    scale = jax.ShapeDtypeStruct((512, 1), jnp.float32)
    with pytest.raises(
        NotImplementedError, match=r"need .* bytes of vector memory but .* use implementation 'xla'"
    ):
        tpu.schedule_of(x, qvalue, scale, None, jnp.dtype(jnp.bfloat16))


def schedule(case: Case):
    return tpu.schedule_of(*structs(case), jnp.dtype(case.dtype))


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("form", ["int8", "int4", "q4_1", "w8a8"])
@pytest.mark.parametrize("weight", ["q", "k", "gate", "down", "unembed"])
def test_llama3_8b_decode_moves_at_most_a_tenth_more_than_it_must(weight: str, form: str, rows: int) -> None:
    plan = schedule(model_case(f"llama3_8b_{weight}", form, rows))
    assert count(plan).bytes <= 1.10 * least(plan).bytes


@pytest.mark.parametrize("form", ["int8", "int4", "q4_1", "w8a8"])
@pytest.mark.parametrize("weight", ["q", "k", "gate", "down", "unembed"])
def test_llama3_8b_prefill_computes_hardly_more_than_it_must(weight: str, form: str) -> None:
    """512 rows: only the outputs that fill the last block up are computed besides."""
    plan = schedule(model_case(f"llama3_8b_{weight}", form, 512))
    assert count(plan).flops <= 1.01 * least(plan).flops


def test_counts_by_hand() -> None:
    """F 128, D 256 in one block; 3 rows of bfloat16; scales and offsets f32[128, 8] in sublanes."""
    plan = schedule(Case("x", 3, 128, 256, "int4", 32, True))
    moved = 128 * 256 // 2 + 3 * (256 + 128) * 2 + 2 * 128 * 8 * 4
    assert count(plan).bytes == least(plan).bytes == moved
    assert least(plan).flops == 2 * 3 * 128 * 256
    assert count(plan).flops == 2 * (16 * 4) * 128 * 256  # a tile of 16 rows, once per group of a chunk


def test_which_chips_multiply_int8() -> None:
    """By device_kind as jax names them; what has no row in the table has int8 products."""
    assert tuning.w8a8_products("TPU7x") == "bfloat16"
    assert tuning.w8a8_products("TPU v6 lite") == tuning.w8a8_products("NVIDIA H200") == "int8"
