"""kv_append on GPU, by the simulator: values, races, uninitialised memory.

In place, accepted and free of spills is the compiler's part: scripts/aot_kernels_gpu.py.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels.kv_append import gpu, gpu_xla, reference
from jaxinfer.pallas_kernels.kv_append.cases import CASES, CASES_BY_NAME, Case, make_inputs

BY_TMA, BY_THREADS = (9, 0), (8, 0)


def simulate(inputs, compute_capability):
    """kv_append by the GPU simulator; a data race raises, shared memory begins as NaN."""
    append = jax.jit(functools.partial(gpu.kv_append, compute_capability=compute_capability))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        return append(**inputs)


def as_numpy(x):
    return np.asarray(x.astype(jnp.float32))


@pytest.mark.parametrize("compute_capability", [BY_TMA, BY_THREADS], ids=["by_tma", "by_threads"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.kv_dtype != "int4"], ids=lambda case: case.name
)
def test_writes_its_slots_and_no_other(case: Case, compute_capability):
    inputs = make_inputs(case, seed=0)
    pages, scales = simulate(inputs, compute_capability)
    want_pages, want_scales = jax.jit(reference.kv_append)(**inputs)
    # The null page holds nothing that anyone reads; everything else is equal bit by bit: one cast, one place.
    np.testing.assert_array_equal(as_numpy(pages[1:]), as_numpy(want_pages[1:]))
    if want_scales is None:
        assert scales is None
    else:
        np.testing.assert_array_equal(as_numpy(scales[1:]), as_numpy(want_scales[1:]))


@pytest.mark.parametrize("compute_capability", [BY_TMA, BY_THREADS], ids=["by_tma", "by_threads"])
def test_nothing_is_written_for_padding(compute_capability):
    inputs = make_inputs(CASES_BY_NAME["smollm2_all_padding"], seed=0)
    pages, _ = simulate(inputs, compute_capability)
    np.testing.assert_array_equal(as_numpy(pages), as_numpy(inputs["kv_pages"]))


ODD = Case("odd", num_kv_heads=1, head_dim=80, page_size=16, num_tokens=3)


@pytest.mark.parametrize(
    ("case", "compute_capability", "message"),
    [
        (CASES_BY_NAME["int4"], BY_TMA, r"int4.*xla"),
        (CASES_BY_NAME["smollm2_one"], (7, 5), r"7\.5 is older than 8\.0.*xla"),
        (ODD, BY_THREADS, r"1 kv heads of head_dim 80.*8\.0.*xla"),
    ],
)
def test_what_has_no_kernel_is_refused_with_what_works(case: Case, compute_capability, message: str):
    with pytest.raises(NotImplementedError, match=message):
        gpu.kv_append(**make_inputs(case, seed=0), compute_capability=compute_capability)


def test_gpu_xla_takes_gpu_where_it_can(monkeypatch):
    calls = []
    monkeypatch.setattr(
        gpu, "kv_append", lambda *arrays, compute_capability: calls.append(compute_capability)
    )
    gpu_xla.kv_append(**make_inputs(CASES_BY_NAME["smollm2_one"], seed=0), compute_capability=BY_THREADS)
    assert calls == [BY_THREADS]
    inputs = make_inputs(ODD, seed=0)
    pages, _ = gpu_xla.kv_append(**inputs, compute_capability=BY_THREADS)
    np.testing.assert_array_equal(as_numpy(pages), as_numpy(reference.kv_append(**inputs)[0]))
    assert calls == [BY_THREADS]
