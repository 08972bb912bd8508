"""Activations times quantized weights: the contract, its checks, its implementations.

Shape letters: T tokens, D inputs, F outputs of the weight, G groups of `group` = D / G inputs that share a scale.
Weights stay int8 or int4 in memory and are widened on the way into the product. Group-wise 4 bits with offsets are
what GPTQ (arXiv:2210.17323), AWQ (arXiv:2306.00978) and GGUF's Q4_0 and Q4_1 store; int8 activations with one scale
per token are those of ZeroQuant (arXiv:2206.01861). `cases.py` has the named shapes.
"""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.contract import check_array, load
from jaxinfer.pallas_kernels.quantized_matmul.cpu_blocks import BLOCK, BlockedMatrix

# implementation -> the module that holds a function `quantized_matmul` of the signature below, less `implementation`
IMPLEMENTATIONS = {
    "reference": "jaxinfer.pallas_kernels.quantized_matmul.reference",  # the whole weight in float32: the truth
    "xla": "jaxinfer.pallas_kernels.quantized_matmul.xla",  # runs anywhere
    "cpu": "jaxinfer.pallas_kernels.quantized_matmul.cpu",  # the production path on CPU
    "tpu": "jaxinfer.pallas_kernels.quantized_matmul.tpu",  # Pallas Mosaic TPU
    "gpu": "jaxinfer.pallas_kernels.quantized_matmul.gpu",  # Pallas Mosaic GPU
}
GROUPS = (32, 64, 128)  # inputs that may share a scale, besides all D of an output (per channel)
W8A8 = ("int8", "bfloat16")  # what the products of quantized activations are computed in
FLOAT_DTYPES = (jnp.float32, jnp.bfloat16)


def quantized_matmul(
    x: jax.Array,
    qvalue: jax.Array | BlockedMatrix,
    scale: jax.Array,
    offset: jax.Array | None = None,
    *,
    w8a8: str | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str,
) -> jax.Array:
    """x times the transposed weight, whose value is scale * qvalue + offset; accumulated in float32.

    Weights that a group scales may be rounded to x's dtype before the product; those of one scale per output are
    not (their scale multiplies the sum).

    Args:
        x: [T, D], float32 or bfloat16.
        qvalue: int8 or int4 [F, D], stored as published, outputs first. "cpu" also takes a BlockedMatrix, which has a
            group of 32.
        scale: f32[F, G]. G is 1 (per channel) or D / group for a group of 32, 64 or 128. Of a BlockedMatrix [G, F] in
            float16 or float32.
        offset: like scale where G is not 1, or None: no offset.
        w8a8: None, or quantize each row of x to int8 by its largest absolute value / 127 and multiply int8 by int8:
            "int8" accumulates exactly in int32, "bfloat16" widens both to bfloat16 (exactly) and accumulates in
            float32, for chips without int8 products. `tuning.w8a8_products` knows which chip has them; a kernel
            never asks. Weights are then int8 with one scale per output.
        out_dtype: of the result, float32 or bfloat16; None: x's.
        implementation: a key of IMPLEMENTATIONS. There is no default and no falling back.

    Returns:
        [T, F] in out_dtype.

    Raises:
        ValueError: a shape, dtype or option is outside this contract.
        NotImplementedError: the implementation does not have this combination, or is not part of this build.
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if isinstance(qvalue, BlockedMatrix):
        _validate_blocked(qvalue, x, w8a8, implementation)
    else:
        _validate(x, qvalue, scale, offset, out_dtype)
        _validate_w8a8(w8a8, qvalue, scale)
    return load("quantized_matmul", IMPLEMENTATIONS, implementation)(
        x, qvalue, scale, offset, w8a8=w8a8, out_dtype=out_dtype
    )


def _validate(
    x: jax.Array, qvalue: jax.Array, scale: jax.Array, offset: jax.Array | None, out_dtype: jnp.dtype
) -> None:
    if x.ndim != 2 or x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x is {x.dtype}{list(x.shape)} but must be [T, D] in float32 or bfloat16")
    num_tokens, in_dim = x.shape
    if qvalue.ndim != 2 or qvalue.shape[1] != in_dim or qvalue.dtype not in (jnp.int8, jnp.int4):
        raise ValueError(
            f"qvalue is {qvalue.dtype}{list(qvalue.shape)} but must be [F, {in_dim}] in int8 or int4"
        )
    if 0 in (num_tokens, *qvalue.shape):
        raise ValueError(f"x {list(x.shape)} and qvalue {list(qvalue.shape)} must not be empty")
    groups = [1] + [in_dim // group for group in GROUPS if in_dim % group == 0]
    if scale.ndim != 2 or scale.shape[1] not in groups:
        raise ValueError(
            f"scale is {list(scale.shape)} but must be [F, G] with G one of {groups}: one scale per output, or one "
            f"per group of {list(GROUPS)} of the {in_dim} inputs"
        )
    shape = (qvalue.shape[0], scale.shape[1])
    check_array("scale", scale, shape, jnp.float32)
    if offset is not None:
        if scale.shape[1] == 1:
            raise ValueError("offset goes with groups, but scale has one per output: pass offset=None")
        check_array("offset", offset, shape, jnp.float32)
    if out_dtype not in FLOAT_DTYPES:
        raise ValueError(f"out_dtype is {out_dtype} but must be float32 or bfloat16")


def _validate_w8a8(w8a8: str | None, qvalue: jax.Array, scale: jax.Array) -> None:
    if w8a8 is None:
        return
    if w8a8 not in W8A8:
        raise ValueError(f"w8a8 is {w8a8!r} but must be None or one of {list(W8A8)}")
    if qvalue.dtype != jnp.int8 or scale.shape[1] != 1:
        raise ValueError(
            f"w8a8 needs int8 weights with one scale per output, but qvalue is {qvalue.dtype} and scale "
            f"{list(scale.shape)}: quantize the weights so, or pass w8a8=None"
        )


def _validate_blocked(qvalue: BlockedMatrix, x: jax.Array, w8a8: str | None, implementation: str) -> None:
    if implementation != "cpu" or w8a8 is not None:
        raise ValueError(
            f"qvalue is a BlockedMatrix, which implementation 'cpu' multiplies with w8a8=None, not "
            f"{implementation!r} with w8a8={w8a8!r}"
        )
    num_groups, num_tiles, _, size = qvalue.tiles.shape
    if qvalue.matrix.size != num_groups * BLOCK * num_tiles * size:
        raise ValueError(
            f"the matrix {list(qvalue.matrix.shape)} has another number of values than its tiles "
            f"{list(qvalue.tiles.shape)} have codes"
        )
    if x.ndim != 2 or x.shape[1] != num_groups * BLOCK:
        raise ValueError(
            f"x is {list(x.shape)} but must be [T, {num_groups * BLOCK}]: {BLOCK} inputs per block"
        )
