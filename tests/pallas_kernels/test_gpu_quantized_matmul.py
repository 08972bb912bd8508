"""quantized_matmul on GPU, by the simulator: values, races, uninitialised memory as NaN; and its counts.

What this leaves unproven: the simulator has no product of registers that accumulates in place (pl.run_state), so WGMMA
is replaced by a dot here. That the instructions exist and that the programs fit the chip is the compiler's part:
scripts/aot_kernels_gpu.py. Speed is proven by neither.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels.quantized_matmul import gpu, reference
from jaxinfer.pallas_kernels.quantized_matmul.cases import (
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
from jaxinfer.pallas_kernels.quantized_matmul.gpu_schedule import Blocks, count

# Several tiles of tokens and outputs, splits, more steps than buffers, D and F that end within a step or a tile.
BLOCKS = Blocks(block_t=8, block_d=128, num_stages=2, num_splits=2)
FAST_CASES = {
    Case("int8", 11, 192, 576): BLOCKS,
    Case("q4_1", 11, 192, 640, "int4", 32, True): BLOCKS._replace(block_d=256),
    Case("w8a8", 11, 192, 576, w8a8="int8"): BLOCKS,
    Case("w8a8_without_int8_products", 7, 192, 256, w8a8="bfloat16"): BLOCKS,
}
SLOW_CASES = [
    Case("int4_group128", 40, 128, 1024, "int4", 128, True),
    Case("int4_group64_no_offset", 17, 128, 512, "int4", 64),
    Case("int4_per_channel", 3, 128, 256, "int4"),
    Case("q8_0", 6, 128, 256, "int8", 32),
    Case("q4_1_d_past_a_step", 6, 192, 576, "int4", 32, True),
    Case("into_f32", 2, 128, 256, out_dtype="float32"),
    *(capped(case, out_dim=192, in_dim=640) for case in MODEL_CASES if case.num_tokens in (7, 64)),
]


@pytest.fixture(autouse=True)
def products_by_dot(monkeypatch):
    def add_dot(sums, weights, x_ref):
        weights = weights if isinstance(weights, jax.Array) else weights[...]
        return sums + jnp.dot(weights, x_ref[...], preferred_element_type=sums.dtype)

    monkeypatch.setattr(gpu, "add_product", add_dot)


def simulate(inputs, **options):
    out_dtype = jnp.dtype(inputs["out_dtype"] or inputs["x"].dtype)
    arrays = [inputs[name] for name in ("x", "qvalue", "scale", "offset")]
    multiply = jax.jit(
        lambda *arrays: gpu.quantized_matmul(*arrays, w8a8=inputs["w8a8"], out_dtype=out_dtype, **options)
    )
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        return np.asarray(multiply(*arrays).astype(jnp.float32))


def check(case: Case, **options) -> None:
    inputs = make_inputs(case, seed=0)
    want = reference.quantized_matmul(**inputs | {"out_dtype": jnp.dtype(case.out_dtype or case.dtype)})
    np.testing.assert_allclose(
        simulate(inputs, **options), np.asarray(want.astype(jnp.float32)), rtol=0, atol=tolerance(case)
    )


@pytest.mark.parametrize("case", FAST_CASES, ids=lambda case: case.name)
def test_equals_the_reference_over_tiles_and_splits(case: Case) -> None:
    check(case, blocks=FAST_CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=lambda case: case.name)
def test_equals_the_reference(case: Case) -> None:
    check(case)


@pytest.mark.slow
def test_same_call_twice_gives_the_same_bits() -> None:
    case = next(iter(FAST_CASES))
    inputs = make_inputs(case, seed=1)
    np.testing.assert_array_equal(simulate(inputs, blocks=BLOCKS), simulate(inputs, blocks=BLOCKS))


@pytest.mark.parametrize(
    ("case", "capability", "message"),
    [
        (CASES_BY_NAME["f32"], (9, 0), r"x is float32.*cast x, or use implementation='xla'"),
        (Case("x", 2, 128, 256), (8, 0), r"not \(8, 0\): use implementation='xla'"),
        (Case("x", 2, 128, 256), (10, 0), r"not \(10, 0\): use implementation='xla'"),
        (Case("x", 2, 128, 200), (9, 0), r"D 200 is no multiple of 64.*xla"),
        (CASES_BY_NAME["ragged_out_dim"], (9, 0), r"F 200 is no multiple of 64.*xla"),
    ],
)
def test_what_has_no_kernel_is_refused_with_what_works(case: Case, capability, message: str) -> None:
    inputs = make_inputs(case, seed=0) | {"out_dtype": jnp.dtype(case.dtype)}
    with pytest.raises(NotImplementedError, match=message):
        gpu.quantized_matmul(**inputs, compute_capability=capability)


def schedule(case: Case):
    return gpu.schedule_of(*structs(case), jnp.dtype(case.dtype))


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("form", ["int8", "int4", "q4_1", "w8a8"])
@pytest.mark.parametrize("weight", ["q", "k", "gate", "down", "unembed"])
def test_llama3_8b_decode_moves_at_most_a_tenth_more_than_it_must(weight: str, form: str, rows: int) -> None:
    plan = schedule(model_case(f"llama3_8b_{weight}", form, rows))
    assert count(plan).bytes <= 1.10 * least(plan).bytes


@pytest.mark.parametrize("form", ["int8", "int4", "q4_1", "w8a8"])
@pytest.mark.parametrize("weight", ["q", "k", "gate", "down", "unembed"])
def test_llama3_8b_prefill_computes_no_more_than_it_must(weight: str, form: str) -> None:
    plan = schedule(model_case(f"llama3_8b_{weight}", form, 512))
    assert count(plan).flops == least(plan).flops


def test_counts_by_hand() -> None:
    """3 rows in a tile of 8, F 128, D 2048 in 16 steps: sums of up to 5 splits are 1/16 of the weights' bytes."""
    plan = schedule(Case("x", 3, 128, 2048))
    assert plan.blocks.num_splits == 4 and plan.blocks.block_t == 8  # of 4 steps each; 5 would be uneven
    least_bytes = 128 * 2048 + 3 * (2048 + 128) * 2 + 128 * 4
    assert least(plan).bytes == least_bytes
    assert (
        count(plan).bytes == least_bytes + 2 * 4 * 3 * 128 * 4
    )  # sums [4, T, F] in float32, written and read
    assert count(plan).flops == 2 * 8 * 128 * 2048
