"""What the planner knows of a model: the sizes of its weights and of its KV cache. Nothing is loaded.

Shape letters: D embed_dim, N query heads, K KV heads, H head_dim, V vocab.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxinfer.checkpoints.loading import weight_leaves
from jaxinfer.kv_cache import ml_dtypes_itemsize
from jaxinfer.models.spec import ModelModule
from jaxinfer.options.model_source import named_facts
from jaxinfer.weights.quantization import is_axes

# Bits of one element of the KV cache; those below 16 have scales beside them.
KV_BITS = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "int4": 4,
}
SCALE_BYTES = 4  # float32
# How matrices of projections and MLPs are kept when quantized: (bits, scales and offsets per output row).
# int8 has one scale per output; int4 a scale and an offset for each group of INT4_GROUP inputs.
QUANTIZED_BITS = {"int8": 8, "int4": 4}
INT4_GROUP = 128


@dataclass(frozen=True)
class Leaf:
    """One array of the weights."""

    group: str  # projections | mlp | embedding | head | norms
    size: int  # elements
    num_outputs: int  # rows of the matrix, as published [out, in]; 0 for norms and biases
    dtype: str
    per_kv_head: bool  # grows with K

    @property
    def nbytes(self) -> int:
        return self.size * ml_dtypes_itemsize(self.dtype)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. Every layer looks at all tokens: model files refuse configs with sliding windows."""

    name: str
    num_layers: int
    embed_dim: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tied: bool  # the head reads the embedding
    dtype: str
    leaves: tuple[Leaf, ...]

    @staticmethod
    def from_config(module: ModelModule, config: Any, name: str = "model") -> "ModelShape":
        """From a model file and its config, by abstract evaluation of its `init`."""
        structs, _ = weight_leaves(module, config)
        axes = _axes(module.logical_axes(config))
        leaves = tuple(_leaf(leaf, struct, axes[leaf]) for leaf, struct in structs.items())
        return ModelShape(
            name=name,
            num_layers=config.num_layers,
            embed_dim=config.embed_dim,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            tied=config.tie_word_embeddings,
            dtype=config.dtype,
            leaves=leaves,
        )

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in self.leaves)

    def params(self, group: str) -> int:
        """Elements of the matrices of a group: each costs two FLOPs per token. Biases and norms are left out."""
        return sum(leaf.size for leaf in self.leaves if leaf.group == group and leaf.num_outputs)

    def weights_bytes(self, group: str | None = None, quantize: str | None = None) -> int:
        """Bytes of a group of weights, or of all. Without `quantize` this is what the engine allocates."""
        return sum(
            _quantized_bytes(leaf, quantize) for leaf in self.leaves if group is None or leaf.group == group
        )

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of K and V (and their scales) of one token in all layers."""
        return self.num_layers * kv_bytes_per_token_and_layer(self.num_kv_heads, self.head_dim, kv_dtype)

    def kv_bytes(self, kv_dtype: str, num_tokens: int) -> int:
        """Bytes of K and V of one sequence of `num_tokens`."""
        return num_tokens * self.kv_bytes_per_token(kv_dtype)

    def with_kv_heads(self, num_kv_heads: int) -> "ModelShape":
        """The same model with K and V for another number of heads.

        Raises:
          ValueError: it does not divide the query heads.
        """
        if num_kv_heads < 1 or self.num_q_heads % num_kv_heads:
            raise ValueError(f"{num_kv_heads} KV heads do not divide {self.num_q_heads} query heads")

        def scaled(n: int) -> int:
            return n // self.num_kv_heads * num_kv_heads

        leaves = tuple(
            replace(leaf, size=scaled(leaf.size), num_outputs=scaled(leaf.num_outputs))
            if leaf.per_kv_head
            else leaf
            for leaf in self.leaves
        )
        return replace(self, num_kv_heads=num_kv_heads, leaves=leaves)


def load(model: str | Path, dtype: str) -> ModelShape:
    """The shape of a folder, a config.json, a .gguf file, a catalog name or org/name of the hub; no weights are read.

    Args:
      model: a folder needs only its config.json (of weights that are there the headers are read, to see whether
        there is a head); of a GGUF file only the header is read; a catalog name is fetched if it is not there
        yet, since its config is in the header of its file; of a hub model only config.json is fetched.
      dtype: of weights and activations: float32, bfloat16 or float16.

    Raises:
      ValueError: nothing is there, or the architecture is not supported; FetchError, CheckpointError likewise.
    """
    facts = named_facts(model)
    return ModelShape.from_config(facts.module, replace(facts.config, dtype=dtype), str(model))


def kv_bytes_per_token_and_layer(num_kv_heads: int, head_dim: int, kv_dtype: str) -> int:
    """2 x heads x head_dim x bytes, plus one float32 scale per head for each of K and V below 16 bits.

    Raises:
      ValueError: the dtype is none that pages can have.
    """
    if kv_dtype not in KV_BITS:
        raise ValueError(f"kv_cache_dtype={kv_dtype!r} must be one of {', '.join(KV_BITS)}")
    bits = KV_BITS[kv_dtype]
    scales = 2 * num_kv_heads * SCALE_BYTES if bits < 16 else 0
    return 2 * num_kv_heads * head_dim * bits // 8 + scales


def _quantized_bytes(leaf: Leaf, quantize: str | None) -> int:
    if quantize is None or leaf.group not in ("projections", "mlp") or leaf.num_outputs == 0:
        return leaf.nbytes
    if quantize not in QUANTIZED_BITS:
        raise ValueError(f"quantize={quantize!r} must be one of {', '.join(QUANTIZED_BITS)}, or left out")
    scales = leaf.num_outputs
    if quantize == "int4":
        scales *= 2 * math.ceil(leaf.size // leaf.num_outputs / INT4_GROUP)
    return leaf.size * QUANTIZED_BITS[quantize] // 8 + scales * SCALE_BYTES


def _axes(tree: Any) -> dict[str, tuple[str, ...]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_axes)
    return {jax.tree_util.keystr(path, simple=True, separator="."): axes for path, axes in flat}


def _leaf(name: str, struct: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> Leaf:
    kv = "kv_heads" in axes
    if "vocab" in axes:
        group = "embedding" if name == "embed" else "head"
    elif "mlp" in axes:
        group = "mlp"
    else:
        group = "projections" if kv or "q_heads" in axes else "norms"
    num_outputs = 0
    if "embed" in axes and len(axes) > 1:  # [out..., D], or [D, in...]
        num_outputs = math.prod(struct.shape[:-1]) if axes[-1] == "embed" else struct.shape[0]
    return Leaf(group, math.prod(struct.shape), num_outputs, str(struct.dtype), kv)
