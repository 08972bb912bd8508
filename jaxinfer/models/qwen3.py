"""Qwen3, dense (Qwen team, 2025): Llama's block with an RMS norm on each query and key head before RoPE.

Shape letters: T tokens, B rows, D embed_dim, N query heads, K KV heads, H head_dim, F mlp_dim, V vocab.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer import attention, quantization
from jaxinfer.batch import StepBatch
from jaxinfer.kv_cache import KVCache
from jaxinfer.models import hf_config, layers
from jaxinfer.models.layers import RopeConfig

HANDLED_KEYS = frozenset(
    {
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "intermediate_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
        "tie_word_embeddings", "attention_bias", "max_position_embeddings",
    }
)  # fmt: skip


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

    @staticmethod
    def from_hf(hf: dict[str, Any], dtype: str = "float32") -> "Config":
        """From a Hugging Face config.

        Raises:
          ValueError: a key is missing, or would change the mathematics and is not handled.
        """
        hf_config.check_keys(hf, HANDLED_KEYS)
        vocab, dim, depth, heads, mlp = hf_config.require(
            hf, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
        )
        head_dim = hf.get("head_dim") or 128
        return Config(
            vocab_size=vocab,
            embed_dim=dim,
            num_layers=depth,
            num_q_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            mlp_dim=mlp,
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope=hf_config.rope_from_hf(hf, head_dim),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            attention_bias=bool(hf.get("attention_bias", False)),
            max_position_embeddings=hf.get("max_position_embeddings", 32768),
            dtype=dtype,
        )


@struct.dataclass
class LayerWeights:
    attn_norm: Any  # f32[D]
    q_proj: Any  # [N, H, D]
    k_proj: Any  # [K, H, D]
    v_proj: Any  # [K, H, D]
    o_proj: Any  # [D, N, H]
    mlp_norm: Any  # f32[D]
    gate_proj: Any  # [F, D]
    up_proj: Any  # [F, D]
    down_proj: Any  # [D, F]
    q_norm: Any  # f32[H]
    k_norm: Any  # f32[H]
    q_bias: Any = None  # f32[N, H]; the four biases stand or fall with attention_bias
    k_bias: Any = None  # f32[K, H]
    v_bias: Any = None  # f32[K, H]
    o_bias: Any = None  # f32[D]


@struct.dataclass
class Weights:
    embed: Any  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Any  # f32[D]
    unembed: Any = None  # [V, D]; None when tied to embed


HF_NAMES = {
    "model.embed_tokens.weight": "embed",
    "model.layers.{layer}.input_layernorm.weight": "layers.{layer}.attn_norm",
    "model.layers.{layer}.self_attn.q_proj.weight": "layers.{layer}.q_proj",
    "model.layers.{layer}.self_attn.k_proj.weight": "layers.{layer}.k_proj",
    "model.layers.{layer}.self_attn.v_proj.weight": "layers.{layer}.v_proj",
    "model.layers.{layer}.self_attn.o_proj.weight": "layers.{layer}.o_proj",
    "model.layers.{layer}.self_attn.q_proj.bias": "layers.{layer}.q_bias",
    "model.layers.{layer}.self_attn.k_proj.bias": "layers.{layer}.k_bias",
    "model.layers.{layer}.self_attn.v_proj.bias": "layers.{layer}.v_bias",
    "model.layers.{layer}.self_attn.o_proj.bias": "layers.{layer}.o_bias",
    "model.layers.{layer}.self_attn.q_norm.weight": "layers.{layer}.q_norm",
    "model.layers.{layer}.self_attn.k_norm.weight": "layers.{layer}.k_norm",
    "model.layers.{layer}.post_attention_layernorm.weight": "layers.{layer}.mlp_norm",
    "model.layers.{layer}.mlp.gate_proj.weight": "layers.{layer}.gate_proj",
    "model.layers.{layer}.mlp.up_proj.weight": "layers.{layer}.up_proj",
    "model.layers.{layer}.mlp.down_proj.weight": "layers.{layer}.down_proj",
    "model.norm.weight": "final_norm",
    "lm_head.weight": "unembed",
}

# What writes channels of activations in a layer -> the matrices that read them; nothing else does (smoothing.py).
SMOOTHED = {
    "attn_norm": ("q_proj", "k_proj", "v_proj"),
    "mlp_norm": ("gate_proj", "up_proj"),
    "up_proj": ("down_proj",),
}


def logical_axes(config: Config) -> Weights:
    """The name of every axis of every leaf, a tuple of names per leaf."""
    bias = config.attention_bias
    layer = LayerWeights(
        attn_norm=("embed",),
        q_proj=("q_heads", "head", "embed"),
        k_proj=("kv_heads", "head", "embed"),
        v_proj=("kv_heads", "head", "embed"),
        o_proj=("embed", "q_heads", "head"),
        mlp_norm=("embed",),
        gate_proj=("mlp", "embed"),
        up_proj=("mlp", "embed"),
        down_proj=("embed", "mlp"),
        q_norm=("head",),
        k_norm=("head",),
        q_bias=("q_heads", "head") if bias else None,
        k_bias=("kv_heads", "head") if bias else None,
        v_bias=("kv_heads", "head") if bias else None,
        o_bias=("embed",) if bias else None,
    )
    return Weights(
        embed=("vocab", "embed"),
        layers=(layer,) * config.num_layers,
        final_norm=("embed",),
        unembed=None if config.tie_word_embeddings else ("vocab", "embed"),
    )


def init(config: Config, key: jax.Array) -> Weights:
    """Random weights: normal with variance 1 / fan_in, norms one, biases zero."""
    c = config
    keys = iter(jax.random.split(key, 2 + 7 * c.num_layers))

    def matrix(shape, fan_in):
        return (jax.random.normal(next(keys), shape, jnp.float32) * fan_in**-0.5).astype(c.dtype)

    def bias(*shape):
        return jnp.zeros(shape, jnp.float32) if c.attention_bias else None

    def layer():
        return LayerWeights(
            attn_norm=jnp.ones(c.embed_dim, jnp.float32),
            q_proj=matrix((c.num_q_heads, c.head_dim, c.embed_dim), c.embed_dim),
            k_proj=matrix((c.num_kv_heads, c.head_dim, c.embed_dim), c.embed_dim),
            v_proj=matrix((c.num_kv_heads, c.head_dim, c.embed_dim), c.embed_dim),
            o_proj=matrix((c.embed_dim, c.num_q_heads, c.head_dim), c.num_q_heads * c.head_dim),
            mlp_norm=jnp.ones(c.embed_dim, jnp.float32),
            gate_proj=matrix((c.mlp_dim, c.embed_dim), c.embed_dim),
            up_proj=matrix((c.mlp_dim, c.embed_dim), c.embed_dim),
            down_proj=matrix((c.embed_dim, c.mlp_dim), c.mlp_dim),
            q_norm=jnp.ones(c.head_dim, jnp.float32),
            k_norm=jnp.ones(c.head_dim, jnp.float32),
            q_bias=bias(c.num_q_heads, c.head_dim),
            k_bias=bias(c.num_kv_heads, c.head_dim),
            v_bias=bias(c.num_kv_heads, c.head_dim),
            o_bias=bias(c.embed_dim),
        )

    return Weights(
        embed=matrix((c.vocab_size, c.embed_dim), 1),
        layers=tuple(layer() for _ in range(c.num_layers)),
        final_norm=jnp.ones(c.embed_dim, jnp.float32),
        unembed=None if c.tie_word_embeddings else matrix((c.vocab_size, c.embed_dim), c.embed_dim),
    )


def forward(
    config: Config, weights: Weights, kv_cache: KVCache, batch: StepBatch
) -> tuple[jax.Array, KVCache]:
    """Hidden states [T, D] of the batch's tokens after the final norm, and the cache with them appended."""

    def embed(token_ids, positions):
        x = quantization.take(weights.embed, token_ids).astype(config.dtype)
        return x, layers.rope_table(config.rope, positions)

    x, rope = batch.per_token(embed, batch.token_ids, batch.positions)
    x, kv_cache = attention.over_layers(
        weights.layers,
        x,
        kv_cache,
        rope,
        batch,
        partial(_before_attention, config),
        partial(_after_attention, config),
        sm_scale=config.head_dim**-0.5,
    )
    x = batch.per_token(lambda x: layers.rms_norm(x, weights.final_norm, config.rms_norm_eps), x)
    return x, kv_cache


def _before_attention(config: Config, w: LayerWeights, x, rope, batch: StepBatch):
    def of(x, rope):
        y = layers.rms_norm(x, w.attn_norm, config.rms_norm_eps)
        q = layers.project_heads(y, w.q_proj, w.q_bias, kernels=config.kernels)  # [T, N, H]
        k = layers.project_heads(y, w.k_proj, w.k_bias, kernels=config.kernels)  # [T, K, H]
        v = layers.project_heads(y, w.v_proj, w.v_bias, kernels=config.kernels)
        q = layers.apply_rope(layers.rms_norm(q, w.q_norm, config.rms_norm_eps), rope)
        k = layers.apply_rope(layers.rms_norm(k, w.k_norm, config.rms_norm_eps), rope)
        return q, k, v

    return batch.per_token(of, x, rope)


def _after_attention(config: Config, w: LayerWeights, x, out, batch: StepBatch):
    def of(x, out):
        x = x + layers.merge_heads(out, w.o_proj, w.o_bias, kernels=config.kernels)
        y = layers.rms_norm(x, w.mlp_norm, config.rms_norm_eps)
        return x + layers.gated_mlp(y, w.gate_proj, w.up_proj, w.down_proj, kernels=config.kernels)

    return batch.per_token(of, x, out)


def unembed(config: Config, weights: Weights, x: jax.Array) -> jax.Array:
    """Logits f32[B, V] of hidden states x [B, D]."""
    table = weights.embed if config.tie_word_embeddings else weights.unembed
    return quantization.project(x, table, out_dtype=jnp.float32, kernels=config.kernels)
