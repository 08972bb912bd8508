"""kv_append against numpy, in place on a donated pool, and the contract's refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.pallas_kernels import cpu_pages
from jaxinfer.pallas_kernels.kv_append import QUANTIZED_MAX, kv_append
from jaxinfer.pallas_kernels.kv_append.cases import CASES, CASES_BY_NAME, Case, make_inputs


def numpy_append(inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """Slot by slot: float32 pages as the contract words them, and the scales."""
    pages = np.array(inputs["kv_pages"].astype(jnp.float32))
    dtype = inputs["kv_pages"].dtype
    scales = None if inputs["kv_scales"] is None else np.array(inputs["kv_scales"])
    page_size, head_dim = pages.shape[2], pages.shape[3] // 2
    for token, slot in enumerate(np.asarray(inputs["slot_mapping"])):
        page, offset = divmod(int(slot), page_size)
        for half, name in enumerate(("k", "v")):
            x = np.asarray(inputs[name][token].astype(jnp.float32))  # [K, H]
            if scales is not None:
                top = np.float32(QUANTIZED_MAX[dtype.name])
                amax = np.abs(x).max(axis=-1, keepdims=True)
                with np.errstate(divide="ignore"):
                    x = np.clip(x * np.where(amax > 0, top / amax, np.float32(0)), -top, top)
                x = x.astype(ml_dtypes.float8_e4m3fn) if "float8" in dtype.name else np.rint(x)
                scales[page, :, half, offset] = amax[:, 0] / top
            elif dtype == jnp.bfloat16:
                x = x.astype(ml_dtypes.bfloat16)
            pages[page, :, offset, half * head_dim : (half + 1) * head_dim] = x
    return pages, scales


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_writes_its_slots_and_no_other(case: Case, implementation: str) -> None:
    inputs = make_inputs(case, seed=0)
    expected, expected_scales = numpy_append(inputs)
    inputs["kv_pages"] = cpu_pages.of_layout(inputs["kv_pages"], implementation)
    pages, scales = kv_append(**inputs, implementation=implementation)
    assert pages.dtype == inputs["kv_pages"].dtype
    if implementation == "cpu":
        pages = cpu_pages.to_contract(pages, inputs["k"].shape[2])
    # page 0 takes colliding writes. Live pages are equal to the last bit: casting and rounding are exact operations
    np.testing.assert_array_equal(np.asarray(pages[1:].astype(jnp.float32)), expected[1:])
    if expected_scales is not None:
        np.testing.assert_allclose(
            np.asarray(scales)[1:], expected_scales[1:], rtol=2e-7
        )  # one division, float32


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
@pytest.mark.parametrize("name", ["smollm2_one", "smollm2_decode", "llama3_8b_prefill_bf16", "int8"])
def test_a_donated_pool_is_written_in_place(name: str, implementation: str) -> None:
    inputs = make_inputs(CASES_BY_NAME[name], seed=0)
    big = {
        k: None if inputs[k] is None else jnp.tile(inputs[k], (50, 1, 1, 1))
        for k in ("kv_pages", "kv_scales")
    }
    big["kv_pages"] = cpu_pages.of_layout(big["kv_pages"], implementation)
    inputs |= big

    def append(pages: jax.Array, scales: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        return kv_append(
            inputs["k"], inputs["v"], pages, scales, inputs["slot_mapping"], implementation=implementation
        )

    compiled = jax.jit(append, donate_argnums=(0, 1)).lower(big["kv_pages"], big["kv_scales"]).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= big["kv_pages"].nbytes
    assert memory.temp_size_in_bytes < big["kv_pages"].nbytes // 4
    compiled(big["kv_pages"], big["kv_scales"])
    assert big["kv_pages"].is_deleted()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": jnp.zeros((2, 3, 64), jnp.bfloat16)}, "v is bfloat16"),
        ({"slot_mapping": jnp.zeros(3, jnp.int32)}, "slot_mapping"),
        ({"kv_scales": jnp.zeros((4, 3, 2, 16))}, "pass kv_scales=None"),
        ({"kv_pages": jnp.zeros((4, 3, 16, 128), jnp.int8)}, "kv_scales f32"),
        ({"kv_pages": jnp.zeros((4, 3, 16, 64))}, r"needs \[num_pages, 3, page_size, 128\]"),
        ({"implementation": "fast"}, "choose one of"),
    ],
)
def test_refuses_by_name(change: dict[str, Any], message: str) -> None:
    good = {
        "k": jnp.zeros((2, 3, 64)),
        "v": jnp.zeros((2, 3, 64)),
        "kv_pages": jnp.zeros((4, 3, 16, 128)),
        "kv_scales": None,
        "slot_mapping": jnp.zeros(2, jnp.int32),
        "implementation": "xla",
    }
    with pytest.raises(ValueError, match=message):
        kv_append(**(good | change))
