"""Weight leaves and the two operations that read them.

A leaf is a plain array or a QuantizedTensor. Every product with a weight goes through `project` (in the gated MLP
through `factor`) and every embedding lookup through `take`, so that a weight form is handled here alone.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding, SingleDeviceSharding

from jaxinfer.pallas_kernels.dense_matmul import dense_matmul
from jaxinfer.pallas_kernels.gated_mlp import Matrix
from jaxinfer.pallas_kernels.quantized_matmul import cpu, cpu_blocks, quantized_matmul
from jaxinfer.pallas_kernels.quantized_matmul.reference import widen


@dataclass(frozen=True)
class Kernels:
    """The kernels that multiply by plain matrices, by name. Those of a QuantizedTensor are its own."""

    matmul: str = "xla"  # a key of dense_matmul.IMPLEMENTATIONS
    gated_mlp: str = "xla"  # a key of gated_mlp.IMPLEMENTATIONS


XLA = Kernels()  # run anywhere


@struct.dataclass
class QuantizedTensor:
    """A matrix of F outputs and D inputs in codes: value = scale * qvalue + offset.

    Its arrays lie as `quantized_matmul` reads them, whatever the axes of the value: a product copies nothing.
    """

    qvalue: Any  # int8 or int4 [F, D]; or a cpu_blocks.BlockedMatrix, which keeps scale and offset as f16[D / group, F]
    scale: jax.Array  # f32[F, D / group]
    offset: jax.Array | None  # like scale, or None: 0
    perm: (
        jax.Array | None
    )  # i32[D], the input that column i of the codes belongs to (GPTQ's act order); None: i
    shape: tuple[int, ...] = struct.field(pytree_node=False)  # of the value: [*out, *in]
    group: int = struct.field(pytree_node=False)  # inputs that share a scale; D: one scale per output
    # What x is rounded to for a product, and that is computed in, as `w8a8` of quantized_matmul: None for x's own
    # dtype, "int8", or "bfloat16" for products of int8 numbers on chips that have no int8 products.
    activations: str | None = struct.field(pytree_node=False)
    implementation: str = struct.field(pytree_node=False)  # a key of quantized_matmul.IMPLEMENTATIONS

    def matmul(self, x: jax.Array, out_dtype: jax.typing.DTypeLike) -> jax.Array:
        """x [T, D] times the transposed matrix: [T, F]."""
        return quantized_matmul(
            x if self.perm is None else x[:, self.perm],
            self.qvalue,
            self.scale,
            self.offset,
            w8a8=self.activations,
            out_dtype=out_dtype,
            implementation=self.implementation,
        )

    def formats(self, sharding: Sharding | None) -> "QuantizedTensor | None":
        """How its arrays lie in memory where that must be said, each as a Format; None: the default is right for all.

        The TPU kernel reads codes by rows, and scales of groups by columns. The TPU's compiler stores arrays of other
        than whole registers of lanes (D 576) in another order, and would copy them in every call.
        """
        if self.implementation != "tpu":
            return None
        place = sharding or SingleDeviceSharding(jax.devices()[0])
        groups: Any = Format(Layout((1, 0)), place) if self.scale.shape[1] > 1 else None
        offset = None if self.offset is None else groups
        codes: Any = Format(Layout((0, 1)), place)
        return replace(self, qvalue=codes, scale=groups, offset=offset, perm=None)

    def plain(self, num_rows: int) -> jax.Array | None:
        """The matrix of values, where so many rows are multiplied by it and not by the codes; else None."""
        return cpu.matrix_for(self.qvalue, num_rows)

    def rows(self, ids: jax.Array) -> jax.Array:
        """Rows `ids` i32[T] of a value [V, D]: [T, D], in float32 where codes are widened."""
        matrix = cpu.matrix_for(self.qvalue)
        if matrix is not None:
            return _rows(matrix, ids)
        arrays = [None if a is None else _rows(a, ids) for a in (self.qvalue, self.scale, self.offset)]
        value = widen(*arrays)  # type: ignore[arg-type]
        return value if self.perm is None else value[:, jnp.argsort(self.perm)]


def project(
    x: jax.Array,
    weight: Any,
    *,
    kernels: Kernels,
    in_axes: int = 1,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Contract the last `in_axes` axes of x with the last `in_axes` axes of a weight leaf, accumulated in float32.

    Args:
      x: activations [..., *in].
      weight: a leaf [*out, *in], stored as published, output axes first: an array, which is cast to x's dtype, or
        what multiplies x itself, as a QuantizedTensor does.
      kernels: of products with arrays.
      in_axes: how many axes are contracted.
      out_dtype: of the result; None keeps that of `x`.

    Returns:
      [..., *out].
    """
    leading, out, inner = x.shape[:-in_axes], weight.shape[:-in_axes], weight.shape[-in_axes:]
    # One plain matrix product: XLA's CPU backend copies a weight of three axes into another layout at each call.
    x, out_dtype = x.reshape(-1, math.prod(inner)), out_dtype or x.dtype
    matrix = _plain(weight, x.shape[0])
    if matrix is None:
        result = weight.matmul(x, out_dtype)
    else:
        matrix = matrix.reshape(-1, x.shape[1]).astype(x.dtype)
        result = dense_matmul(x, matrix, out_dtype=out_dtype, implementation=kernels.matmul)
    return result.reshape(*leading, *out)


def factor(weight: Any, x: jax.Array) -> Matrix:
    """A weight leaf [F, D] as the kernel of the gated MLP takes it for x [T, D]: an array, or what multiplies."""
    matrix = _plain(weight, x.shape[0])
    return weight.matmul if matrix is None else matrix.astype(x.dtype)


def take(weight: Any, ids: jax.Array) -> jax.Array:
    """Rows `ids` i32[T] of an embedding leaf `[V, D]`: [T, D]."""
    return _rows(weight, ids) if _is_array(weight) else weight.rows(ids)


def _plain(weight: Any, num_rows: int) -> jax.Array | None:
    """The array by which a leaf multiplies so many rows, or None: it has its own way."""
    return weight if _is_array(weight) else weight.plain(num_rows)


def _is_array(weight: Any) -> bool:
    return isinstance(weight, (jax.Array, np.ndarray))


def _rows(matrix: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(matrix, ids, axis=0, mode="clip")


def formats(weights: Any) -> Any:
    """A tree like that of weights (arrays or shapes) with a Format for each that must lie so; None where none must."""

    def of_leaf(leaf: Any) -> Any:
        return leaf.formats(leaf.scale.sharding) if isinstance(leaf, QuantizedTensor) else None

    found = jax.tree.map(of_leaf, weights, is_leaf=lambda node: isinstance(node, QuantizedTensor))
    return found if jax.tree.leaves(found) else None


def placed(weights: Any) -> Any:
    """The weights with each array in memory as `formats` says."""
    wanted = formats(weights)
    if wanted is None:
        return weights
    structure: Any
    arrays, structure = jax.tree.flatten(weights)
    layouts = structure.flatten_up_to(wanted)
    put = [
        x if layout is None else jax.device_put(x, layout) for x, layout in zip(arrays, layouts, strict=True)
    ]
    return jax.tree.unflatten(structure, put)


def quantize(weights: Any, logical_axes: Any, activations: str | None, implementation: str) -> Any:
    """The weights tree with a QuantizedTensor for each matrix of a layer.

    Args:
      weights: a tree of arrays, or of their shapes under jax.eval_shape.
      logical_axes: the model file's, of the same structure.
      activations, implementation: of the QuantizedTensors.
    """

    def in_form(axes: tuple[str, ...], weight: jax.Array) -> jax.Array | QuantizedTensor:
        return quantize_leaf(axes, weight, activations, implementation)

    return jax.tree.map(in_form, logical_axes, weights, is_leaf=is_axes)


def quantize_leaf(
    axes: tuple[str, ...],
    weight: jax.Array,
    activations: str | None,
    implementation: str,
    in_factor: jax.Array | None = None,
    out_factor: jax.Array | None = None,
) -> jax.Array | QuantizedTensor:
    """A matrix times its factors, rounded to the nearest of 255 codes per output; other leaves only times theirs.

    Args:
      axes: the names of its axes.
      weight: the leaf, output axes first.
      activations, implementation: of the QuantizedTensor.
      in_factor: f32[D], of the inputs of a matrix (see smoothing.py); None: 1.
      out_factor: f32[F], of the outputs of a matrix, or of a vector; None: 1.
    """
    in_axes = num_in_axes(axes)
    if in_axes is None:
        return weight if out_factor is None else weight * out_factor
    qvalue, scale = _int8_codes(weight, in_factor, in_axes)
    if out_factor is not None:
        scale = scale * out_factor[:, None]
    return QuantizedTensor(
        qvalue=qvalue,
        scale=scale,
        offset=None,
        perm=None,
        shape=weight.shape,
        group=qvalue.shape[1],
        activations=activations,
        implementation=implementation,
    )


def num_in_axes(axes: tuple[str, ...]) -> int | None:
    """How many of a leaf's last axes a product contracts, where it is a matrix that `quantize` changes; else None.

    A matrix of a layer has two axes or more, one of them "embed". The tables of the vocabulary stay as they are, which
    is half of the loss without factors (log/w8a8-quality.md).
    """
    if len(axes) < 2 or "embed" not in axes or "vocab" in axes:
        return None
    return len(axes) - 1 if axes[0] == "embed" else 1


def matrix_shape(axes: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(F, D), outputs and inputs, of a leaf that `quantize` changes; None of all others."""
    in_axes = num_in_axes(axes)
    return None if in_axes is None else (math.prod(shape[:-in_axes]), math.prod(shape[-in_axes:]))


def pack(matrix: jax.Array, codes: jax.Array, scale: jax.Array, offset: jax.Array | None) -> QuantizedTensor:
    """A matrix beside the blocks of codes that a file has it in, for a CPU.

    Args:
      matrix: the values [*out, *in].
      codes: int8 [F, G, 32] or uint8 [F, G, 16], see cpu_blocks.
      scale, offset: f16[F, G]; offset may be None.
    """
    return QuantizedTensor(
        qvalue=cpu_blocks.BlockedMatrix(matrix, cpu_blocks.in_tiles(codes)),
        scale=scale.T,
        offset=None if offset is None else offset.T,
        perm=None,
        shape=matrix.shape,
        group=cpu_blocks.BLOCK,
        activations=None,
        implementation="cpu",
    )


def is_axes(node: Any) -> bool:
    """Whether a node of a tree of logical axes is a leaf: the names of one weight's axes."""
    return isinstance(node, tuple) and bool(node) and all(isinstance(name, str) for name in node)


@partial(jax.jit, static_argnums=2)
def _int8_codes(weight: jax.Array, in_factor: jax.Array | None, in_axes: int) -> tuple[jax.Array, jax.Array]:
    """int8[F, D] codes, and f32[F, 1]."""
    matrix = weight.reshape(-1, math.prod(weight.shape[-in_axes:])).astype(jnp.float32)
    if in_factor is not None:
        matrix = matrix * in_factor
    peak = jnp.max(jnp.abs(matrix), axis=1, keepdims=True)
    scale = jnp.where(peak > 0, peak / 127, 1.0)
    return jnp.round(matrix / scale).astype(jnp.int8), scale
