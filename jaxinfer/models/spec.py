"""What a model file says of itself: its leaves in one table, and the functions that every model file has.

From the table of leaves follow the weights tree, random weights, names of axes, names in checkpoints, and which
matrices read which channels.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxinfer.attention import AttentionOptions
from jaxinfer.models.rope import RopeConfig, RopeTable

# Letter of a leaf's shape -> name of the axis, attribute of the config that has its size.
AXES: dict[str, tuple[str, str]] = {
    "V": ("vocab", "vocab_size"),
    "D": ("embed", "embed_dim"),
    "N": ("q_heads", "num_q_heads"),
    "K": ("kv_heads", "num_kv_heads"),
    "H": ("head", "head_dim"),
    "F": ("mlp", "mlp_dim"),
}


@dataclass(frozen=True)
class LayerSpec:
    """All that is static about a layer but sizes: layers of equal specs are traced and lowered once.

    attention: what its tokens see, and how.
    pre_norm, post_norm: whether there are norms in front of attention and MLP, and behind them before the residual.
    qk_norm: whether queries and keys are normed before they are turned, over the axes of the norm's weight.
    qkv_bias, o_bias, mlp_bias: which products have biases.
    activation: of the gate of the MLP, a key of gated_mlp.ACTIVATIONS.
    residual_scale: what attention and MLP are multiplied by before they are added.
    """

    attention: AttentionOptions = field(default_factory=AttentionOptions)
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    residual_scale: float = 1.0


@dataclass(frozen=True)
class Leaf:
    """One weight of a model, or of each layer where its names hold "{layer}".

    kind: a matrix has the dtype of the config, norms and biases are float32.
    shape: letters of AXES, as published: output axes first.
    hf, gguf: its names in Hugging Face and in GGUF checkpoints.
    fan_in: letters of the axes that a product with the matrix sums over, for random weights; "" for an embedding.
    when: whether a model of this config has it, or a layer of this LayerSpec.
    reads: the leaf of the same layer that alone writes what this matrix is multiplied by (a norm, or a matrix).
    from_hf: what makes the leaf of the published array (a vector); GGUF files hold the result already.
    interleaved: kinds of checkpoints ("gguf", "huggingface") that keep its rows, head by head, with the two numbers of
      a rotated pair side by side; see rope.py.
    beside: where one tensor of the checkpoint holds the rows of several leaves, the output letters of each in the order
      of the tensor; `place` is this leaf's index among them.
    """

    kind: Literal["matrix", "norm", "bias"]
    shape: str
    hf: str
    gguf: str
    fan_in: str = ""
    when: Callable[[Any], bool] = lambda config: True
    reads: str | None = None
    from_hf: Callable[[np.ndarray], np.ndarray] | None = None
    interleaved: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    place: int = 0

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.hf

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of its axes."""
        return tuple(AXES[letter][0] for letter in self.shape)

    def sizes(self, config: Any, letters: str) -> tuple[int, ...]:
        """Sizes of the axes with these letters."""
        return tuple(getattr(config, AXES[letter][1]) for letter in letters)


Leaves = Mapping[str, Leaf]  # by the name of the leaf, in the order of the weights tree


class ModelConfig(Protocol):
    """What the runtime reads of a model's config: frozen and hashable."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def embed_dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...
    @property
    def ropes(self) -> tuple[RopeConfig, ...]: ...  # tables that `AttentionOptions.rope` chooses of
    @property
    def num_q_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    def for_context(self, max_model_len: int) -> Any: ...  # the config for texts of at most so many tokens


class ModelModule(Protocol):
    """A model file: plain functions of arrays, which know no batch, no cache and no tiles. T tokens, D embed_dim.

    A file that takes all of `decoder`'s functions is a Config and LEAVES.
    """

    __name__: str

    def __hash__(self) -> int: ...

    @property
    def ARCHITECTURES(self) -> tuple[str, ...]: ...  # names in a config.json that the file is for

    Config: Any  # the class; `Config.from_hf(dict, dtype)` refuses what it does not understand
    LEAVES: Leaves

    def init(self, config: Any, key: jax.Array) -> Any: ...
    def logical_axes(self, config: Any) -> Any: ...
    def embed(self, config: Any, w: Any, token_ids: jax.Array) -> jax.Array: ...  # i32[T] -> [T, D]
    def before_attention(
        self, config: Any, layer: LayerSpec, w: Any, x: jax.Array, rope: RopeTable | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...  # q [T, N, H], k [T, K, H], v [T, K, H]
    def after_attention(
        self, config: Any, layer: LayerSpec, w: Any, x: jax.Array, out: jax.Array
    ) -> jax.Array: ...  # [T, D]
    def final(self, config: Any, w: Any, x: jax.Array) -> jax.Array: ...  # [T, D]
    def unembed(self, config: Any, w: Any, x: jax.Array) -> jax.Array: ...  # [T, D] -> f32[T, V]


@cache
def _weight_classes(names: tuple[str, ...], layer_names: tuple[str, ...]) -> tuple[Any, Any]:
    def pytree(name: str, fields: tuple[str, ...]) -> Any:
        return struct.dataclass(
            type(name, (), {"__annotations__": dict.fromkeys(fields, Any)} | dict.fromkeys(fields))
        )

    return pytree("Weights", names), pytree("LayerWeights", layer_names)


def tree(leaves: Leaves, config: ModelConfig, make: Callable[[Leaf], Any]) -> Any:
    """The weights tree with make(leaf) for each leaf that the config has; None stands for the others.

    A leaf of the model is an attribute of the tree; one of a layer is an attribute of `tree.layers[layer]`.
    """
    names = tuple(dict.fromkeys("layers" if leaf.per_layer else name for name, leaf in leaves.items()))
    layer_names = tuple(name for name, leaf in leaves.items() if leaf.per_layer)
    weights, layer_weights = _weight_classes(names, layer_names)

    def made(names: tuple[str, ...], owner: ModelConfig | LayerSpec) -> dict[str, Any]:
        return {name: make(leaves[name]) for name in names if name in leaves and leaves[name].when(owner)}

    layers = tuple(layer_weights(**made(layer_names, layer)) for layer in config.layers)
    return weights(layers=layers, **made(names, config))


def logical_axes(leaves: Leaves, config: ModelConfig) -> Any:
    """The weights tree with the names of each leaf's axes: a tuple of strings."""
    return tree(leaves, config, lambda leaf: leaf.axes)


def init(leaves: Leaves, config: ModelConfig, key: jax.Array) -> Any:
    """Random weights: normal with variance 1 / fan_in, norms one, biases zero."""
    matrices = sum(leaf.kind == "matrix" for leaf in leaves.values())
    keys = iter(jax.random.split(key, matrices * config.num_layers))

    def make(leaf: Leaf) -> jax.Array:
        shape = leaf.sizes(config, leaf.shape)
        if leaf.kind != "matrix":
            return jnp.full(shape, leaf.kind == "norm", jnp.float32)
        scale = math.prod(leaf.sizes(config, leaf.fan_in)) ** -0.5
        return (jax.random.normal(next(keys), shape, jnp.float32) * scale).astype(config.dtype)

    return tree(leaves, config, make)


def derived(leaves: Leaves) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(`init`, `logical_axes`) of a model file with these leaves."""
    return partial(init, leaves), partial(logical_axes, leaves)


def hf_names(leaves: Leaves) -> dict[str, str]:
    """Path of a leaf in the weights tree -> its Hugging Face name, both with "{layer}"."""
    return {f"layers.{{layer}}.{name}" if leaf.per_layer else name: leaf.hf for name, leaf in leaves.items()}


def smoothing_groups(leaves: Leaves) -> dict[str, tuple[str, ...]]:
    """Leaf of a layer that writes channels of activations -> the matrices that read them; nothing else does."""
    groups: dict[str, tuple[str, ...]] = {}
    for name, leaf in leaves.items():
        if leaf.reads is not None:
            groups[leaf.reads] = (*groups.get(leaf.reads, ()), name)
    return groups
