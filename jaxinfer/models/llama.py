"""Llama (Touvron et al., 2023) and what shares its block: SmolLM2, TinyLlama."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from jaxinfer.models import decoder, spec
from jaxinfer.models.decoder import *  # noqa: F403 the functions of a model file, as they are
from jaxinfer.models.spec import LayerSpec

ARCHITECTURES = ("LlamaForCausalLM",)
KEYS = frozenset({"attention_bias", "mlp_bias"})


@dataclass(frozen=True)
class Config(decoder.Config):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], dtype: str = "float32") -> Self:
        """From a Hugging Face config; raises ValueError as `read` does."""
        bias, mlp_bias = bool(hf.get("attention_bias")), bool(hf.get("mlp_bias"))
        layer = LayerSpec(qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
        return cls.read(hf, dtype, layer, keys=KEYS)


# GGUF files of llama keep pairs that turn side by side.
LEAVES = decoder.interleaved(decoder.LEAVES, "gguf")
init, logical_axes = spec.derived(LEAVES)
