"""Writes this step's K and V into their pages: the contract, its checks, its implementations.

The field's reshape_and_cache. Shape letters: T tokens, K kv heads, H head_dim. `cases.py` has the named
shapes.
"""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels import cpu_pages
from jaxinfer.pallas_kernels.contract import check_array, load

# implementation -> the module that holds a function `kv_append` of the signature below, less `implementation`
IMPLEMENTATIONS = {
    "reference": "jaxinfer.pallas_kernels.kv_append.reference",
    "xla": "jaxinfer.pallas_kernels.kv_append.xla",
    "cpu": "jaxinfer.pallas_kernels.kv_append.cpu",  # into pages of the CPU layout
    "tpu": "jaxinfer.pallas_kernels.kv_append.tpu",
    "gpu": "jaxinfer.pallas_kernels.kv_append.gpu",
    "gpu_xla": "jaxinfer.pallas_kernels.kv_append.gpu_xla",  # gpu where it has the combination, else xla
}
# page dtypes that need kv_scales, and the largest value that a quantized number takes in them
QUANTIZED_MAX = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0}
FLOAT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def kv_append(
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array,
    kv_scales: jax.Array | None,
    slot_mapping: jax.Array,
    *,
    implementation: str,
    compute_capability: tuple[int, int] = (9, 0),
) -> tuple[jax.Array, jax.Array | None]:
    """Writes token t's K and V into slot slot_mapping[t] and leaves every other slot as it was.

    In place when kv_pages (and kv_scales) are donated. Into quantized pages each vector [H] gets one scale:
    scale = amax / QUANTIZED_MAX[dtype], qvalue = round-to-nearest-even(x * (QUANTIZED_MAX[dtype] / amax)),
    clipped to +-QUANTIZED_MAX[dtype]; a vector of zeros gets scale 0 and qvalues 0. So value = scale *
    qvalue.

    Args:
        k, v: [T, K, H], float32, bfloat16 or float16, both of one dtype; cast to the page's dtype.
        kv_pages: [num_pages, K, page_size, 2H]; K in lanes [0, H), V in [H, 2H); for cpu in the layout of
            `cpu_pages`. Page 0 is the null page.
        kv_scales: f32[num_pages, K, 2, page_size] (K scale, V scale) with int8, int4 or float8_e4m3fn pages,
            else None.
        slot_mapping: i32[T] = page * page_size + offset. Padded tokens have slots in the null page, where
            writes may collide (any of them wins); no two tokens may share a slot elsewhere.
        implementation: a key of IMPLEMENTATIONS. There is no default and no falling back.
        compute_capability: of the GPU that the program is compiled for; only gpu and gpu_xla look at it.

    Returns:
        kv_pages, kv_scales (None if None).

    Raises:
        ValueError: a shape or dtype is outside this contract.
        NotImplementedError: the implementation does not have this combination, or is not part of this build.
    """
    _validate(k, v, kv_pages, kv_scales, slot_mapping, implementation)
    options = {"compute_capability": compute_capability} if implementation in ("gpu", "gpu_xla") else {}
    return load("kv_append", IMPLEMENTATIONS, implementation)(
        k, v, kv_pages, kv_scales, slot_mapping, **options
    )


def _validate(
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array,
    kv_scales: jax.Array | None,
    slot_mapping: jax.Array,
    implementation: str,
) -> None:
    if k.ndim != 3 or k.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"k is {k.dtype}{list(k.shape)} but must be [T, K, H] in float32, bfloat16 or float16"
        )
    check_array("v", v, k.shape, k.dtype)
    num_tokens, num_kv_heads, head_dim = k.shape
    num_pages, _, page_size = cpu_pages.check_shape(kv_pages, implementation, num_kv_heads, head_dim)
    if kv_pages.dtype.name in QUANTIZED_MAX:
        if kv_scales is None:
            raise ValueError(
                f"kv_pages is {kv_pages.dtype}: kv_scales f32[num_pages, K, 2, page_size] is required"
            )
        check_array("kv_scales", kv_scales, (num_pages, num_kv_heads, 2, page_size), jnp.float32)
    elif kv_pages.dtype in FLOAT_DTYPES:
        if kv_scales is not None:
            raise ValueError(f"kv_pages is {kv_pages.dtype}, which has no scales: pass kv_scales=None")
    else:
        names = [jnp.dtype(dtype).name for dtype in FLOAT_DTYPES] + list(QUANTIZED_MAX)
        raise ValueError(f"kv_pages is {kv_pages.dtype} but must be one of {names}")
    check_array("slot_mapping", slot_mapping, (num_tokens,), jnp.int32)
