"""One file per architecture. Adding one touches `MODELS` and a test fixture."""

from types import ModuleType
from typing import Any

from jaxinfer.models import llama, qwen3

# `model_type` of a config.json -> model file
MODELS: dict[str, ModuleType] = {"llama": llama, "qwen3": qwen3}


def for_config(hf: dict[str, Any]) -> ModuleType:
    """The model file for a Hugging Face config.

    Raises:
      ValueError: there is none for its `model_type`.
    """
    kind = hf.get("model_type")
    if kind not in MODELS:
        raise ValueError(f"model_type {kind!r} is not supported; supported are {', '.join(sorted(MODELS))}")
    return MODELS[kind]
