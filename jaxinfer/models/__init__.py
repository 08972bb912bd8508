"""One file per architecture. Adding one touches `MODELS` and a test fixture."""

from typing import Any

from jaxinfer.models import llama, qwen3
from jaxinfer.models.spec import ModelModule
from jaxinfer.text.wording import shown

# `model_type` of a config.json -> model file
MODELS: dict[str, ModelModule] = {"llama": llama, "qwen3": qwen3}
# `model_type` -> the one of MODELS that computes the same, since what differs (Mistral's window) is refused.
SAME_AS = {"mistral": "llama"}


def for_config(hf: dict[str, Any]) -> ModelModule:
    """The model file for a Hugging Face config.

    Raises:
      ValueError: there is none for its `model_type`.
    """
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in {*MODELS, *SAME_AS}:
        supported = ", ".join(sorted([*MODELS, *SAME_AS]))
        raise ValueError(f"model_type {shown(kind)} is not supported; supported are {supported}")
    return MODELS[SAME_AS.get(kind, kind)]


def module_of(config: Any) -> ModelModule:
    """The model file whose `Config` this is.

    Raises:
      TypeError: it belongs to none of `MODELS`.
    """
    for module in MODELS.values():
        if type(config) is module.Config:
            return module
    raise TypeError(f"{type(config).__name__} is the Config of no model file; give model_module=...")
