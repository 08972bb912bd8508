"""The form in which an engine keeps the weights of a model: as published, in int8, or with a file's codes beside them.

`resolve` decides the form; here are the shapes that weights have in it, and what makes them so while they are read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxinfer.checkpoints.loading import TensorSource, Transform, named_leaves, weight_leaves
from jaxinfer.models.spec import ModelModule
from jaxinfer.weights import quantization, smoothing


@dataclass(frozen=True)
class WeightForm:
    """How the matrices of a model lie in memory, and which kernels multiply by them."""

    quantize: str | None = None  # None, or as the option of `LLM`
    activations: str | None = (
        None  # of quantized matrices: what products are computed in (see QuantizedTensor)
    )
    smooth: bool = False  # of w8a8: channels of activations are made alike first (see smoothing.py)
    packed: bool = False  # codes of the file beside the matrices that it has in blocks, for few rows
    matmul: str = (
        "xla"  # of quantized matrices: kernels of products, a key of quantized_matmul.IMPLEMENTATIONS
    )

    @property
    def is_plain(self) -> bool:
        return self.quantize is None and not self.packed


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before weights are read: all that `resolve` asks of it."""

    module: ModelModule  # its model file
    config: Any  # its Config; where weights are still to be read, the dtype is decided later
    weights_given: bool = False  # whether they are on the device already, in the config's dtype
    # By leaf of the weights, the shapes of the blocks of codes that its file has (gguf_blocks.Blocks).
    blocks: Mapping[str, Any] = field(default_factory=dict)


def shapes(model: ModelFacts, config: Any, form: WeightForm) -> Any:
    """The tree of jax.ShapeDtypeStruct of weights in a form. Nothing is allocated.

    Args:
      config: of the model, its dtype decided.
    """
    leaves, structure = weight_leaves(model.module, config)
    plain = jax.tree.unflatten(structure, leaves.values())
    if form.quantize is not None:
        return jax.eval_shape(lambda weights: _quantized(model.module, config, weights, form, {}), plain)
    if not form.packed:
        return plain
    pack = jax.jit(quantization.pack)  # layers of equal shapes are traced once

    def packed(name: str, leaf: Any) -> Any:
        blocks = model.blocks.get(name)
        return (
            leaf if blocks is None else jax.eval_shape(pack, leaf, blocks.codes, blocks.scale, blocks.offset)
        )

    return jax.tree.unflatten(structure, [packed(name, leaf) for name, leaf in leaves.items()])


def matrix_shapes(model: ModelFacts, config: Any) -> list[tuple[int, int]]:
    """(F, D), outputs and inputs, of each matrix that `quantize` would change."""
    axes = dict(named_leaves(model.module.logical_axes(config), is_leaf=quantization.is_axes))
    leaves, _ = weight_leaves(model.module, config)
    found = (quantization.matrix_shape(axes[name], leaf.shape) for name, leaf in leaves.items())
    return [shape for shape in found if shape is not None]


def num_bytes(shapes: Any) -> int:
    """Bytes of all leaves of a tree of arrays or shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def read(model: ModelFacts, config: Any, form: WeightForm, read_weights: Callable[[Transform], Any]) -> Any:
    """The weights in a form, leaf by leaf as they are read where that is possible: all of them may not fit as they are.

    Args:
      read_weights: reads all leaves, each through a transform (checkpoints.loading.Transform).
    """
    if form.smooth:  # the model itself is run first
        return in_form(model, config, form, read_weights(lambda name, leaf, source: leaf))
    return read_weights(_transform(model, config, form))


def in_form(model: ModelFacts, config: Any, form: WeightForm, weights: Any) -> Any:
    """Weights as published -> weights in a form.

    Raises:
      ValueError: they have no codes, which this form reads.
    """
    if form.packed:
        raise ValueError(
            "these weights have no blocks of codes, which few_rows='packed' reads: give LLM few_rows='full' to go on "
            "with other weights"
        )
    if form.quantize is None:
        return weights
    factors = smoothing.factors(model.module, config, weights) if form.smooth else {}
    return quantization.placed(_quantized(model.module, config, weights, form, factors))


def _quantized(
    module: ModelModule, config: Any, weights: Any, form: WeightForm, factors: Mapping[str, Any]
) -> Any:
    if form.smooth:
        return smoothing.apply(module, config, weights, form.activations, form.matmul, factors)
    return quantization.quantize(weights, module.logical_axes(config), form.activations, form.matmul)


def _transform(model: ModelFacts, config: Any, form: WeightForm) -> Transform:
    """What is done to each leaf as it comes."""
    axes = dict(named_leaves(model.module.logical_axes(config), is_leaf=quantization.is_axes))

    def transform(name: str, leaf: jax.Array, source: TensorSource | None) -> Any:
        if form.quantize is not None:
            return quantization.placed(
                quantization.quantize_leaf(axes[name], leaf, form.activations, form.matmul)
            )
        if not form.packed or source is None or source.read_blocks is None:
            return leaf
        blocks = source.read_blocks()
        # numpy's views: they are put in order on the way to the device, and nothing is traced or compiled.
        return jax.device_put(quantization.pack(leaf, blocks.codes, blocks.scale, blocks.offset))

    return transform
