"""From a model and options of `LLM` to what an engine would be on a chip that is not here."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.options.device_facts import DeviceFacts
from jaxinfer.options.llm_options import SHAPES, LLMOptions
from jaxinfer.options.model_source import named_facts
from jaxinfer.options.resolve import Resolved, resolve


def build(model: str, options: Mapping[str, Any], device: DeviceFacts) -> Resolved:
    """Decides what an engine on `device` would decide; `options` are keyword arguments of `LLM`.

    Where the engine would refuse, the pool is as small as one full sequence of `max_model_len` needs, and
    `plan_problem` has its sentence: the compiler is asked all the same.

    Raises:
      ValueError, TypeError: an option is out of range, or decides nothing about programs.
      FetchError, CheckpointError: the model cannot be found or read.
    """
    settings = LLMOptions.from_keywords(options)
    if other := sorted(set(options) - set(SHAPES)):
        raise TypeError(f"{other[0]} changes no program; options of compile are {', '.join(SHAPES)}")
    return resolve(settings, named_facts(model), device, must_fit=False)
