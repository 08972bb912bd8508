"""Qwen2 and Qwen2.5 (Qwen team, 2024): Llama's block with biases of queries, keys and values alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from jaxinfer.models import decoder, hf_config, hf_layers, spec
from jaxinfer.models.decoder import *  # noqa: F403 the functions of a model file, as they are
from jaxinfer.models.spec import LayerSpec

ARCHITECTURES = ("Qwen2ForCausalLM",)
DEFAULTS = {"max_position_embeddings": 32768}
WINDOW_KEYS = hf_layers.WINDOW_KEYS | {"use_sliding_window", "max_window_layers"}


def with_windows(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `layer_types`: a window that stands in it is off unless said, and in the first layers."""
    if not hf.get("use_sliding_window"):
        return {**hf, "sliding_window": None, "layer_types": hf.get("layer_types")}
    depth, first = hf.get("num_hidden_layers") or 0, hf.get("max_window_layers", 28)
    types = [hf_layers.SLIDING if i >= first else hf_layers.FULL for i in range(depth)]
    return hf_config.with_defaults(hf, {"sliding_window": 4096, "layer_types": types})


@dataclass(frozen=True)
class Config(decoder.Config):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], dtype: str = "float32") -> Self:
        """From a Hugging Face config; raises ValueError as `read` does."""
        hf = with_windows(hf_config.with_defaults(hf, DEFAULTS))
        return cls.read(hf, dtype, LayerSpec(qkv_bias=True), keys=WINDOW_KEYS)


LEAVES = decoder.LEAVES
init, logical_axes = spec.derived(LEAVES)
