"""Qwen3, dense (Qwen team, 2025): Llama's block with an RMS norm on each query and key head before RoPE."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import jax

from jaxinfer.attention import AttentionOptions
from jaxinfer.models import layers, llama, spec
from jaxinfer.models.llama import after_attention, attention_options, embed, final, ropes, unembed  # noqa: F401 as they are
from jaxinfer.models.spec import Leaf, Leaves

DEFAULTS = {"head_dim": 128, "max_position_embeddings": 32768}


@dataclass(frozen=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: dict[str, Any], dtype: str = "float32") -> Self:
        """From a Hugging Face config; raises ValueError as llama's."""
        given = {key: value for key, value in hf.items() if value is not None or key not in DEFAULTS}
        return super().from_hf(DEFAULTS | given, dtype)


def _norm(name: str) -> Leaf:
    return Leaf(
        "norm",
        "H",
        f"model.layers.{{layer}}.self_attn.{name}_norm.weight",
        f"blk.{{layer}}.attn_{name}_norm.weight",
    )


# GGUF files of qwen3 keep rows in the published order.
LEAVES: Leaves = {
    **{name: replace(leaf, gguf_interleaved=False) for name, leaf in llama.LEAVES.items()},
    "q_norm": _norm("q"),
    "k_norm": _norm("k"),
}
init, logical_axes = partial(spec.init, LEAVES), partial(spec.logical_axes, LEAVES)


def before_attention(config: Config, layer: AttentionOptions, w: Any, x: jax.Array, rope: Any) -> Any:
    y = layers.rms_norm(x, w.attn_norm, config.rms_norm_eps)
    q = layers.project_heads(y, w.q_proj, w.q_bias, kernels=config.kernels)  # [T, N, H]
    k = layers.project_heads(y, w.k_proj, w.k_bias, kernels=config.kernels)  # [T, K, H]
    v = layers.project_heads(y, w.v_proj, w.v_bias, kernels=config.kernels)
    q, k = (layers.rms_norm(x, norm, config.rms_norm_eps) for x, norm in ((q, w.q_norm), (k, w.k_norm)))
    return layers.apply_rope(q, rope), layers.apply_rope(k, rope), v
