"""Weight leaves and the two operations that read them.

A leaf is a plain array, or a QuantizedTensor (a matrix of a layer in int8), or a PackedMatrix (beside the matrix the
codes of the file it came from). Every product with a weight goes through
`project` and every embedding lookup through `take`, so that a weight form is handled here alone.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.pallas_kernels.quantized_matmul import few_rows, quantized_matmul

FEW_ROWS = ("auto", "full", "packed")  # how few rows are multiplied by the matrices of a file in blocks
FORMS = ("w8a8",)  # what `quantize` can make of the matrices of a model


@struct.dataclass
class QuantizedTensor:
    """A matrix in int8, symmetric, with one scale per output: value = scale * qvalue."""

    qvalue: jax.Array  # int8 [*out, *in]
    scale: jax.Array  # f32[F, 1], F the product of the output axes
    w8a8: str = struct.field(pytree_node=False)  # see quantized_matmul

    @property
    def shape(self) -> tuple[int, ...]:
        return self.qvalue.shape


@struct.dataclass
class PackedMatrix:
    """A matrix, and beside it the blocks of codes that its values come from, for few rows (see few_rows.py)."""

    matrix: jax.Array  # [*out, *in]
    tiles: jax.Array  # int8 [G, F / L, 32, L] or uint8 [G, F / L, 16, L]
    scale: jax.Array  # f16[G, F]
    offset: jax.Array | None  # f16[G, F]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape


@struct.dataclass
class ObservedMatrix:
    """A matrix, and who is told by each product what it was multiplied by: report(number, x [T, D])."""

    matrix: jax.Array  # [*out, *in]
    number: jax.Array  # i32[]
    report: Callable[[jax.Array, jax.Array], None] = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape


def project(
    x: jax.Array,
    weight: jax.Array | QuantizedTensor | PackedMatrix | ObservedMatrix,
    *,
    in_axes: int = 1,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Contract the last `in_axes` axes of x with the last `in_axes` axes of a weight leaf, in float32.

    With a QuantizedTensor each token is quantized to int8 too, by its largest value (arXiv:2206.01861).

    Args:
      x: activations [..., *in].
      weight: a leaf stored as published, output axes first: [*out, *in].
      in_axes: how many axes are contracted.
      out_dtype: of the result; None keeps that of `x`.

    Returns:
      [..., *out].
    """
    leading, out, inner = x.shape[:-in_axes], weight.shape[:-in_axes], weight.shape[-in_axes:]
    # One plain matrix product: XLA's CPU backend copies a weight of three axes into another layout at each call.
    size = math.prod(inner)
    x, out_dtype = x.reshape(-1, size), out_dtype or x.dtype
    if isinstance(weight, ObservedMatrix):
        jax.debug.callback(weight.report, weight.number, x)
        weight = weight.matrix
    if isinstance(weight, PackedMatrix):
        if x.shape[0] <= few_rows.MAX_ROWS:
            packed = few_rows.few_rows_matmul(x, weight.tiles, weight.scale, weight.offset)
            return packed.astype(out_dtype).reshape(*leading, *out)
        weight = weight.matrix
    if isinstance(weight, QuantizedTensor):
        result = quantized_matmul(
            x,
            weight.qvalue.reshape(-1, size),
            weight.scale,
            w8a8=weight.w8a8,
            out_dtype=out_dtype,
            implementation="xla",
        )
    else:
        weight = weight.reshape(-1, size).astype(x.dtype)
        if x.shape[0] == 1 and x.dtype == jnp.bfloat16:
            result = jax.lax.platform_dependent(x, weight, cpu=few_rows.one_row_matmul, default=_dot)
        else:
            result = _dot(x, weight)
        result = result.astype(out_dtype)
    return result.reshape(*leading, *out)


def plain_matrix(weight: Any, num_rows: int) -> jax.Array | None:
    """The array that `project` multiplies so many rows by as it is, or None: it multiplies in another way."""
    if isinstance(weight, PackedMatrix) and num_rows > few_rows.MAX_ROWS:
        return weight.matrix
    return None if isinstance(weight, (QuantizedTensor, PackedMatrix, ObservedMatrix)) else weight


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, D] times the transposed weight [F, D]: f32[T, F]."""
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def take(weight: jax.Array | PackedMatrix, ids: jax.Array) -> jax.Array:
    """Rows `ids` i32[T] of an embedding `[V, D]`: [T, D]."""
    if isinstance(weight, PackedMatrix):
        weight = weight.matrix
    return jnp.take(weight, ids, axis=0, mode="clip")


def quantize(weights: Any, logical_axes: Any, w8a8: str) -> Any:
    """The weights tree with a QuantizedTensor for each matrix of a layer.

    Args:
      weights: a tree of arrays, or of their shapes under jax.eval_shape.
      logical_axes: the model file's, of the same structure.
      w8a8: see `quantize_leaf`.
    """
    return jax.tree.map(
        lambda axes, weight: quantize_leaf(axes, weight, w8a8), logical_axes, weights, is_leaf=is_axes
    )


def quantize_leaf(
    axes: tuple[str, ...],
    weight: jax.Array,
    w8a8: str,
    in_factor: jax.Array | None = None,
    out_factor: jax.Array | None = None,
) -> jax.Array | QuantizedTensor:
    """A matrix times its factors, rounded to the nearest of 255 codes per output; other leaves only times theirs.

    Args:
      axes: the names of its axes. A matrix of a layer has two or more, one of them "embed"; the tables of the
        vocabulary stay too, which is half of the loss without factors (log/w8a8-quality.md).
      weight: the leaf, output axes first.
      w8a8: what products are computed in, "int8" or "bfloat16" (see quantized_matmul).
      in_factor: f32[D], of the inputs of a matrix (see smoothing.py); None: 1.
      out_factor: f32[F], of the outputs of a matrix, or of a vector; None: 1.
    """
    if len(axes) < 2 or "embed" not in axes or "vocab" in axes:
        return weight if out_factor is None else weight * out_factor
    qvalue, scale = _int8_codes(weight, in_factor, len(axes) - 1 if axes[0] == "embed" else 1)
    if out_factor is not None:
        scale = scale * out_factor[:, None]
    return QuantizedTensor(qvalue=qvalue, scale=scale, w8a8=w8a8)


def pack(matrix: jax.Array, codes: jax.Array, scale: jax.Array, offset: jax.Array | None) -> PackedMatrix:
    """A PackedMatrix from blocks as a file has them: codes [F, G, 32 or 16], scale and offset [F, G]."""
    return PackedMatrix(matrix, few_rows.pack(codes), scale.T, None if offset is None else offset.T)


def is_axes(node: Any) -> bool:
    """Whether a node of a tree of logical axes is a leaf: the names of one weight's axes."""
    return isinstance(node, tuple) and bool(node) and all(isinstance(name, str) for name in node)


@partial(jax.jit, static_argnums=2)
def _int8_codes(weight: jax.Array, in_factor: jax.Array | None, in_axes: int) -> tuple[jax.Array, jax.Array]:
    """int8 codes of the weight's shape, and f32[F, 1]."""
    matrix = weight.reshape(-1, math.prod(weight.shape[-in_axes:])).astype(jnp.float32)
    if in_factor is not None:
        matrix = matrix * in_factor
    peak = jnp.max(jnp.abs(matrix), axis=1, keepdims=True)
    scale = jnp.where(peak > 0, peak / 127, 1.0)
    return jnp.round(matrix / scale).astype(jnp.int8).reshape(weight.shape), scale
