"""kv_append on TPU, by the simulator: values, races, uninitialised memory.

In place and accepted by the chip's compiler is scripts/aot_kernels.py's part.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.pallas_kernels.kv_append import reference, tpu
from jaxinfer.pallas_kernels.kv_append.cases import CASES, CASES_BY_NAME, Case, make_inputs

SIMULATOR = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan")
FAST = ("smollm2_one", "smollm2_decode_bf16", "smollm2_prefill", "int4")  # the rest simulates for long


def with_whole_tiles(case: Case) -> Case:
    """The case at the smallest page size from its own on that is whole tiles of its pages' dtype."""
    tile = tpu.tile_tokens(case.kv_dtype)
    return dataclasses.replace(case, page_size=max(case.page_size, tile))


def simulate(inputs):
    with pltpu.force_tpu_interpret_mode(SIMULATOR):
        return jax.jit(tpu.kv_append)(**inputs)


def as_numpy(x):
    return np.asarray(x.astype(jnp.float32))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow) for case in CASES],
)
def test_writes_its_slots_and_no_other(case: Case):
    inputs = make_inputs(with_whole_tiles(case), seed=0)
    pages, scales = simulate(inputs)
    want_pages, want_scales = jax.jit(reference.kv_append)(**inputs)
    # Equal bit by bit: one cast, one place. Padding is not written, so that the null page is as it was.
    np.testing.assert_array_equal(as_numpy(pages[1:]), as_numpy(want_pages[1:]))
    np.testing.assert_array_equal(as_numpy(pages[0]), as_numpy(inputs["kv_pages"][0]))
    if want_scales is None:
        assert scales is None
    else:
        np.testing.assert_array_equal(as_numpy(scales[1:]), as_numpy(want_scales[1:]))


def test_tokens_of_one_tile_that_are_no_neighbours_all_arrive():
    """Each goes out and back with the whole tile: a batch that held the tile twice would lose a token."""
    inputs = make_inputs(dataclasses.replace(CASES_BY_NAME["smollm2_one"], num_tokens=4), seed=0)
    inputs["slot_mapping"] = jnp.asarray([17, 40, 19, 18], jnp.int32)  # pages of 16, tiles of 8
    pages, _ = simulate(inputs)
    want, _ = reference.kv_append(**inputs)
    np.testing.assert_array_equal(as_numpy(pages), as_numpy(want))


@pytest.mark.parametrize(
    ("kv_dtype", "num_tokens", "message"),
    [
        ("int8", 1, "page_size is 16 but int8 pages on TPU need a multiple of 32"),
        ("float16", 1, "kv_pages is float16.*use bfloat16"),
        ("float32", 130_000, "130000 tokens need 1040000 bytes of scalar memory but 1032192"),
    ],
)
def test_what_the_kernel_lacks_is_refused_with_what_works(kv_dtype, num_tokens, message):
    kv = jax.ShapeDtypeStruct((num_tokens, 3, 64), jnp.float32)
    pages = jax.ShapeDtypeStruct((9, 3, 16, 128), jnp.dtype(kv_dtype))
    scales = jax.ShapeDtypeStruct((9, 3, 2, 16), jnp.float32) if kv_dtype == "int8" else None
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(tpu.kv_append, kv, kv, pages, scales, slots)
