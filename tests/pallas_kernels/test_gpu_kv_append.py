"""kv_append on GPU, by the simulator: values, races, uninitialised memory.

In place, accepted and free of spills is the compiler's part: scripts/aot_kernels_gpu.py.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_append import gpu, reference
from pallas_kernels.kv_append.cases import CASES, CASES_BY_NAME, Case, make_inputs


def simulate(inputs):
    """kv_append by the GPU simulator; a data race raises, shared memory begins as NaN."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        return jax.jit(functools.partial(gpu.kv_append, compute_capability=(9, 0)))(**inputs)


def as_numpy(x):
    return np.asarray(x.astype(jnp.float32))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.kv_dtype != "int4"], ids=lambda case: case.name
)
def test_writes_its_slots_and_no_other(case: Case):
    inputs = make_inputs(case, seed=0)
    pages, scales = simulate(inputs)
    want_pages, want_scales = jax.jit(reference.kv_append)(**inputs)
    # The null page holds nothing that anyone reads; everything else is equal bit by bit: one cast, one place.
    np.testing.assert_array_equal(as_numpy(pages[1:]), as_numpy(want_pages[1:]))
    if want_scales is None:
        assert scales is None
    else:
        np.testing.assert_array_equal(as_numpy(scales[1:]), as_numpy(want_scales[1:]))


def test_nothing_is_written_for_padding():
    inputs = make_inputs(CASES_BY_NAME["smollm2_all_padding"], seed=0)
    pages, _ = simulate(inputs)
    np.testing.assert_array_equal(as_numpy(pages), as_numpy(inputs["kv_pages"]))


def test_int4_pages_are_refused_with_what_works():
    with pytest.raises(NotImplementedError, match=r"int4.*xla"):
        gpu.kv_append(**make_inputs(CASES_BY_NAME["int4"], seed=0), compute_capability=(9, 0))


def test_gpus_before_hopper_are_refused_with_what_works():
    inputs = make_inputs(CASES_BY_NAME["smollm2_one"], seed=0)
    with pytest.raises(NotImplementedError, match=r"8\.0.*xla"):
        gpu.kv_append(**inputs, compute_capability=(8, 0))
