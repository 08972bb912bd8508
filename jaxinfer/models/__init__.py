"""One file per family. Adding one touches `MODELS` and a test fixture (docs/adding_a_model.md)."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import llama, mistral, qwen2, qwen3
from jaxinfer.models.spec import ModelModule
from jaxinfer.text.wording import shown

# `model_type` of a config.json -> model file
MODELS: dict[str, ModelModule] = {
    "llama": llama,
    "mistral": mistral,
    "ministral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}


def for_config(hf: Mapping[str, Any]) -> ModelModule:
    """The model file for a Hugging Face config.

    Raises:
      ValueError: there is none for its `model_type`, or it is for other `architectures`.
    """
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in MODELS:
        raise ValueError(
            f"model_type {shown(kind)} is not supported; supported are {', '.join(sorted(MODELS))}"
        )
    model, given = MODELS[kind], hf.get("architectures") or []
    known = {name.lower() for name in model.ARCHITECTURES}  # LLaMAForCausalLM was its first spelling
    if not isinstance(given, list) or any(str(name).lower() not in known for name in given):
        raise ValueError(
            f"architectures {shown(given)} of model_type {shown(kind)} are not supported; supported are "
            f"{', '.join(model.ARCHITECTURES)}"
        )
    return model


def module_of(config: Any) -> ModelModule:
    """The model file whose `Config` this is.

    Raises:
      TypeError: it belongs to none of `MODELS`.
    """
    for module in MODELS.values():
        if type(config) is module.Config:
            return module
    raise TypeError(f"{type(config).__name__} is the Config of no model file; give model_module=...")
