"""Llama (Touvron et al., 2023) and what shares its block: SmolLM2, TinyLlama, Mistral without a window.

Shape letters: T tokens, B rows, D embed_dim, N query heads, K KV heads, H head_dim, F mlp_dim, V vocab.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxinfer.attention import AttentionOptions
from jaxinfer.models import hf_config, layers, spec
from jaxinfer.models.layers import RopeConfig
from jaxinfer.models.spec import Leaf, Leaves
from jaxinfer.weights import quantization

HANDLED_KEYS = hf_config.DECODER_KEYS | {"attention_bias", "mlp_bias"}


@dataclass(frozen=True)
class Config:
    vocab_size: int
    embed_dim: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    max_position_embeddings: int
    dtype: str = "float32"  # of matrices and activations
    kernels: quantization.Kernels = quantization.XLA  # that multiply by plain matrices

    @classmethod
    def from_hf(cls, hf: dict[str, Any], dtype: str = "float32") -> Self:
        """From a Hugging Face config.

        Raises:
          ValueError: a key is missing, or would change the mathematics and is not handled.
        """
        hf_config.check_keys(hf, HANDLED_KEYS)
        if hf.get("mlp_bias"):
            raise ValueError(f"mlp_bias=True is not supported for model_type {hf.get('model_type')!r}")
        bias = bool(hf.get("attention_bias", False))
        return cls(**hf_config.decoder_fields(hf), attention_bias=bias, dtype=dtype)


def _of_layer(kind: Any, shape: str, hf: str, gguf: str, **fields: Any) -> Leaf:
    return Leaf(kind, shape, f"model.layers.{{layer}}.{hf}", f"blk.{{layer}}.{gguf}", **fields)


def _matrix(shape: str, fan_in: str, hf: str, gguf: str, **fields: Any) -> Leaf:
    return _of_layer("matrix", shape, f"{hf}.weight", f"{gguf}.weight", fan_in=fan_in, **fields)


def _bias(shape: str, hf: str, gguf: str, **fields: Any) -> Leaf:
    has_biases = lambda config: config.attention_bias  # noqa: E731
    return _of_layer("bias", shape, f"{hf}.bias", f"{gguf}.bias", when=has_biases, **fields)


LEAVES: Leaves = {
    "embed": Leaf("matrix", "VD", "model.embed_tokens.weight", "token_embd.weight"),
    "attn_norm": _of_layer("norm", "D", "input_layernorm.weight", "attn_norm.weight"),
    "q_proj": _matrix("NHD", "D", "self_attn.q_proj", "attn_q", reads="attn_norm", gguf_interleaved=True),
    "k_proj": _matrix("KHD", "D", "self_attn.k_proj", "attn_k", reads="attn_norm", gguf_interleaved=True),
    "v_proj": _matrix("KHD", "D", "self_attn.v_proj", "attn_v", reads="attn_norm"),
    "o_proj": _matrix("DNH", "NH", "self_attn.o_proj", "attn_output"),
    "mlp_norm": _of_layer("norm", "D", "post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate_proj": _matrix("FD", "D", "mlp.gate_proj", "ffn_gate", reads="mlp_norm"),
    "up_proj": _matrix("FD", "D", "mlp.up_proj", "ffn_up", reads="mlp_norm"),
    "down_proj": _matrix("DF", "F", "mlp.down_proj", "ffn_down", reads="up_proj"),
    "q_bias": _bias("NH", "self_attn.q_proj", "attn_q", gguf_interleaved=True),
    "k_bias": _bias("KH", "self_attn.k_proj", "attn_k", gguf_interleaved=True),
    "v_bias": _bias("KH", "self_attn.v_proj", "attn_v"),
    "o_bias": _bias("D", "self_attn.o_proj", "attn_output"),
    "final_norm": Leaf("norm", "D", "model.norm.weight", "output_norm.weight"),
    "unembed": Leaf(
        "matrix", "VD", "lm_head.weight", "output.weight", "D", lambda config: not config.tie_word_embeddings
    ),
}
init, logical_axes = partial(spec.init, LEAVES), partial(spec.logical_axes, LEAVES)


def ropes(config: Config) -> tuple[RopeConfig, ...]:
    return (config.rope,)


def attention_options(config: Config, layer: int) -> AttentionOptions:
    return AttentionOptions(sm_scale=config.head_dim**-0.5)


def embed(config: Config, w: Any, token_ids: jax.Array) -> jax.Array:
    return quantization.take(w.embed, token_ids).astype(config.dtype)


def before_attention(config: Config, layer: AttentionOptions, w: Any, x: jax.Array, rope: Any) -> Any:
    y = layers.rms_norm(x, w.attn_norm, config.rms_norm_eps)
    q = layers.project_heads(y, w.q_proj, w.q_bias, kernels=config.kernels)  # [T, N, H]
    k = layers.project_heads(y, w.k_proj, w.k_bias, kernels=config.kernels)  # [T, K, H]
    v = layers.project_heads(y, w.v_proj, w.v_bias, kernels=config.kernels)
    return layers.apply_rope(q, rope), layers.apply_rope(k, rope), v


def after_attention(config: Config, layer: AttentionOptions, w: Any, x: jax.Array, out: jax.Array) -> Any:
    x = x + layers.merge_heads(out, w.o_proj, w.o_bias, kernels=config.kernels)
    y = layers.rms_norm(x, w.mlp_norm, config.rms_norm_eps)
    return x + layers.gated_mlp(y, w.gate_proj, w.up_proj, w.down_proj, kernels=config.kernels)


def final(config: Config, w: Any, x: jax.Array) -> jax.Array:
    return layers.rms_norm(x, w.final_norm, config.rms_norm_eps)


def unembed(config: Config, w: Any, x: jax.Array) -> jax.Array:
    """Logits f32[B, V] of hidden states x [B, D]."""
    table = w.embed if config.tie_word_embeddings else w.unembed
    return quantization.project(x, table, out_dtype=jnp.float32, kernels=config.kernels)
