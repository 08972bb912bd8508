"""Qwen3, dense (Qwen team, 2025): Llama's block with an RMS norm on each query and key head before RoPE."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from jaxinfer.models import decoder, hf_config, qwen2, spec
from jaxinfer.models.decoder import *  # noqa: F403 the functions of a model file, as they are
from jaxinfer.models.spec import LayerSpec

ARCHITECTURES = ("Qwen3ForCausalLM",)
DEFAULTS = {"head_dim": 128, "max_position_embeddings": 32768}


@dataclass(frozen=True)
class Config(decoder.Config):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], dtype: str = "float32") -> Self:
        """From a Hugging Face config; raises ValueError as `read` does."""
        hf = qwen2.with_windows(hf_config.with_defaults(hf, DEFAULTS))
        bias = bool(hf.get("attention_bias"))
        layer = LayerSpec(qk_norm=True, qkv_bias=bias, o_bias=bias)
        return cls.read(hf, dtype, layer, keys=qwen2.WINDOW_KEYS | {"attention_bias"})


LEAVES = decoder.LEAVES
init, logical_axes = spec.derived(LEAVES)
