"""Mistral and Ministral (Mistral AI, 2023): Llama's block, with a window in all layers or in those of `layer_types`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from jaxinfer.models import decoder, hf_config, hf_layers
from jaxinfer.models.decoder import *  # noqa: F403 the functions of a model file, as they are
from jaxinfer.models.llama import LEAVES, init, logical_axes  # noqa: F401 Llama's own

ARCHITECTURES = ("MistralForCausalLM", "MinistralForCausalLM")
DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}


@dataclass(frozen=True)
class Config(decoder.Config):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], dtype: str = "float32") -> Self:
        """From a Hugging Face config; raises ValueError as `read` does."""
        hf = hf_config.with_defaults(hf, DEFAULTS)
        return cls.read(hf, dtype, keys=hf_layers.WINDOW_KEYS)
