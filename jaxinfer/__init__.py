"""jaxinfer: a functional LLM inference runtime in JAX."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.outputs import RequestOutput
    from jaxinfer.sampling.params import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "jaxinfer.llm",
    "RequestOutput": "jaxinfer.outputs",
    "SamplingParams": "jaxinfer.sampling.params",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `jaxinfer --help` and the host-only modules start without jax.
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
