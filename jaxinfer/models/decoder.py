"""The decoder block that model files share, driven by data: a `LayerSpec` per layer, and a table of leaves.

What a family leaves out (a norm, a bias, rotation) is no leaf of its weights, or None in the spec.

Shape letters: T tokens, B rows, D embed_dim, N query heads, K KV heads, H head_dim, F mlp_dim, V vocab.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxinfer.models import hf_config, hf_layers, layers
from jaxinfer.models.rope import RopeConfig, RopeTable, apply_rope, apply_rope_to_query
from jaxinfer.models.spec import LayerSpec, Leaf, Leaves
from jaxinfer.weights import quantization

# The functions of a model file.
__all__ = ["after_attention", "before_attention", "embed", "final", "unembed"]


@dataclass(frozen=True)
class Config:
    """Sizes of a model and what its layers are.

    embed_scale: what embeddings are multiplied by, rounded to `dtype` first as transformers does for Gemma.
    logit_scale: what logits are multiplied by. final_soft_cap: logits become cap * tanh(logits / cap).
    """

    vocab_size: int
    embed_dim: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeConfig, ...]
    tie_word_embeddings: bool
    max_position_embeddings: int
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    final_soft_cap: float | None = None
    dtype: str = "float32"  # of matrices and activations
    kernels: quantization.Kernels = quantization.XLA  # that multiply by plain matrices

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def read(
        cls,
        hf: Mapping[str, Any],
        dtype: str,
        layer: LayerSpec = LayerSpec(),  # noqa: B008 a frozen value
        *,
        keys: Set[str] = frozenset(),
        sm_scale: float | None = None,
        **fields: Any,
    ) -> Self:
        """From a Hugging Face config in which a model file has set its family's defaults.

        Args:
          layer: what all layers have in common; windows, ropes and KV groups are read of the config.
          keys: which the model file understands beside hf_config.DECODER_KEYS.
          sm_scale: of attention; None: 1 / sqrt(head_dim).
          fields: of this class, which the model file has read.

        Raises:
          ValueError: a key is missing, is out of range, or would change the mathematics and is not handled.
        """
        hf_config.check_keys(hf, hf_config.DECODER_KEYS | keys)
        sizes = hf_config.decoder_fields(hf)
        ropes, attention = hf_layers.read(hf, sizes.pop("num_layers"), sizes["head_dim"], keys)
        scale = sizes["head_dim"] ** -0.5 if sm_scale is None else sm_scale
        layer = replace(layer, activation=hf_config.activation(hf))
        specs = tuple(
            replace(
                layer,
                attention=replace(
                    layer.attention, sm_scale=scale, window=its.window, group=its.group, rope=its.rope
                ),
            )
            for its in attention
        )
        sizes["max_position_embeddings"] = hf_layers.longest(ropes, sizes["max_position_embeddings"])
        return cls(**sizes, layers=specs, ropes=ropes, dtype=dtype, **fields)

    def for_context(self, max_model_len: int) -> Self:
        """The config for texts of at most so many tokens: it decides how some kinds of rope are stretched."""
        ropes = tuple(replace(r, context=max_model_len) if r.context else r for r in self.ropes)
        return replace(self, ropes=ropes)

    def with_layers(self, num_layers: int) -> Self:
        """The config of a model of so many layers: the first ones, or all of them again and again."""
        times = -(-num_layers // len(self.layers))
        return replace(self, layers=(self.layers * times)[:num_layers])


def _of_layer(kind: Any, shape: str, hf: str, gguf: str, **fields: Any) -> Leaf:
    return Leaf(kind, shape, f"model.layers.{{layer}}.{hf}", f"blk.{{layer}}.{gguf}", **fields)


def _norm(hf: str, gguf: str, has: str, shape: str = "D") -> Leaf:
    return _of_layer("norm", shape, f"{hf}.weight", f"{gguf}.weight", when=lambda layer: getattr(layer, has))


def _matrix(shape: str, fan_in: str, hf: str, gguf: str, **fields: Any) -> Leaf:
    return _of_layer("matrix", shape, f"{hf}.weight", f"{gguf}.weight", fan_in=fan_in, **fields)


def _bias(shape: str, hf: str, gguf: str, has: str) -> Leaf:
    return _of_layer("bias", shape, f"{hf}.bias", f"{gguf}.bias", when=lambda layer: getattr(layer, has))


LEAVES: Leaves = {
    "embed": Leaf("matrix", "VD", "model.embed_tokens.weight", "token_embd.weight"),
    "attn_norm": _norm("input_layernorm", "attn_norm", "pre_norm"),
    "q_proj": _matrix("NHD", "D", "self_attn.q_proj", "attn_q", reads="attn_norm"),
    "k_proj": _matrix("KHD", "D", "self_attn.k_proj", "attn_k", reads="attn_norm"),
    "v_proj": _matrix("KHD", "D", "self_attn.v_proj", "attn_v", reads="attn_norm"),
    "o_proj": _matrix("DNH", "NH", "self_attn.o_proj", "attn_output"),
    "mlp_norm": _norm("post_attention_layernorm", "ffn_norm", "pre_norm"),
    "gate_proj": _matrix("FD", "D", "mlp.gate_proj", "ffn_gate", reads="mlp_norm"),
    "up_proj": _matrix("FD", "D", "mlp.up_proj", "ffn_up", reads="mlp_norm"),
    "down_proj": _matrix("DF", "F", "mlp.down_proj", "ffn_down", reads="up_proj"),
    "q_bias": _bias("NH", "self_attn.q_proj", "attn_q", "qkv_bias"),
    "k_bias": _bias("KH", "self_attn.k_proj", "attn_k", "qkv_bias"),
    "v_bias": _bias("KH", "self_attn.v_proj", "attn_v", "qkv_bias"),
    "o_bias": _bias("D", "self_attn.o_proj", "attn_output", "o_bias"),
    "gate_bias": _bias("F", "mlp.gate_proj", "ffn_gate", "mlp_bias"),
    "up_bias": _bias("F", "mlp.up_proj", "ffn_up", "mlp_bias"),
    "down_bias": _bias("D", "mlp.down_proj", "ffn_down", "mlp_bias"),
    "q_norm": _norm("self_attn.q_norm", "attn_q_norm", "qk_norm", "H"),
    "k_norm": _norm("self_attn.k_norm", "attn_k_norm", "qk_norm", "H"),
    "attn_out_norm": _norm("post_self_attn_layernorm", "post_attention_norm", "post_norm"),
    "mlp_out_norm": _norm("post_mlp_layernorm", "post_ffw_norm", "post_norm"),
    "final_norm": Leaf("norm", "D", "model.norm.weight", "output_norm.weight"),
    "unembed": Leaf(
        "matrix", "VD", "lm_head.weight", "output.weight", "D", lambda config: not config.tie_word_embeddings
    ),
}


def leaves(names: Mapping[str, str] | None = None, **changes: Mapping[str, Any]) -> Leaves:
    """LEAVES of a family.

    Args:
      names: name of a leaf of a norm -> its name in a layer of a Hugging Face checkpoint.
      changes: name of a leaf -> fields of it that are others.
    """
    fields: dict[str, Mapping[str, Any]] = {name: changes.get(name, {}) for name in LEAVES}
    for name, hf in (names or {}).items():
        fields[name] = {"hf": f"model.layers.{{layer}}.{hf}.weight", **fields[name]}
    return {name: replace(leaf, **fields[name]) for name, leaf in LEAVES.items()}


def interleaved(leaves: Leaves, *kinds: str) -> Leaves:
    """The leaves of a family whose checkpoints of these kinds keep the two numbers of a rotated pair side by side."""
    turned = {
        name: replace(leaves[name], interleaved=kinds) for name in ("q_proj", "k_proj", "q_bias", "k_bias")
    }
    return {**leaves, **turned}


def embed(config: Config, w: Any, token_ids: jax.Array) -> jax.Array:
    """Embeddings [T, D] of token ids i32[T]."""
    x = quantization.take(w.embed, token_ids).astype(config.dtype)
    return x if config.embed_scale == 1 else x * jnp.asarray(config.embed_scale, x.dtype)


def before_attention(config: Config, layer: LayerSpec, w: Any, x: jax.Array, rope: RopeTable | None) -> Any:
    """Queries [T, N, H], keys and values [T, K, H] of x [T, D]."""
    y = _normed(config, x, w.attn_norm)
    q = layers.project_heads(y, w.q_proj, w.q_bias, kernels=config.kernels)
    k = layers.project_heads(y, w.k_proj, w.k_bias, kernels=config.kernels)
    v = layers.project_heads(y, w.v_proj, w.v_bias, kernels=config.kernels)
    q, k = _normed(config, q, w.q_norm), _normed(config, k, w.k_norm)
    if rope is None:
        return q, k, v
    return apply_rope_to_query(q, rope), apply_rope(k, rope), v


def after_attention(config: Config, layer: LayerSpec, w: Any, x: jax.Array, out: jax.Array) -> jax.Array:
    """The layer's output [T, D] of its input x [T, D] and what attention gave, [T, N, H]."""
    y = layers.merge_heads(out, w.o_proj, w.o_bias, kernels=config.kernels)
    x = _add(x, _normed(config, y, w.attn_out_norm), layer.residual_scale)
    y = _mlp(config, layer, w, _normed(config, x, w.mlp_norm))
    return _add(x, _normed(config, y, w.mlp_out_norm), layer.residual_scale)


def _mlp(config: Config, layer: LayerSpec, w: Any, x: jax.Array) -> jax.Array:
    biases = w.gate_bias, w.up_bias, w.down_bias
    kinds: dict[str, Any] = {"activation": layer.activation, "kernels": config.kernels}
    return layers.gated_mlp(x, w.gate_proj, w.up_proj, w.down_proj, biases, **kinds)


def _normed(config: Config, x: jax.Array, weight: jax.Array | None) -> jax.Array:
    return x if weight is None else layers.rms_norm(x, weight, config.rms_norm_eps)


def _add(x: jax.Array, y: jax.Array, scale: float) -> jax.Array:
    return x + y if scale == 1 else x + (y.astype(jnp.float32) * scale).astype(x.dtype)


def final(config: Config, w: Any, x: jax.Array) -> jax.Array:
    """Hidden states [T, D] after the last norm."""
    return _normed(config, x, w.final_norm)


def unembed(config: Config, w: Any, x: jax.Array) -> jax.Array:
    """Logits f32[B, V] of hidden states x [B, D]."""
    table = w.embed if config.tie_word_embeddings else w.unembed
    logits = quantization.project(x, table, out_dtype=jnp.float32, kernels=config.kernels)
    if config.logit_scale != 1:
        logits = logits * config.logit_scale
    if config.final_soft_cap is not None:
        logits = config.final_soft_cap * jnp.tanh(logits / config.final_soft_cap)
    return logits
