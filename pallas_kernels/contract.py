"""What the contracts of all kernels check in the same way."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


def load(kernel: str, implementations: Mapping[str, str], implementation: str) -> Callable[..., Any]:
    """The function `kernel` of the module that `implementations` names, imported on first use.

    Raises:
      ValueError: the name is unknown. NotImplementedError: its module is not in this build.
    """
    if implementation not in implementations:
        raise ValueError(
            f"implementation {implementation!r} is unknown: choose one of {list(implementations)}"
        )
    module = implementations[implementation]
    if importlib.util.find_spec(module) is None:
        raise NotImplementedError(
            f"{kernel} has no implementation {implementation!r} in this build: use 'xla' or 'reference'"
        )
    return getattr(importlib.import_module(module), kernel)


def without_gradient(kernel: str, implementation: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays, which says who has a gradient when somebody asks for its own."""
    call = jax.custom_vjp(function)

    def refuse(*arrays: Any) -> Any:
        raise NotImplementedError(
            f"{kernel} has no gradient with implementation {implementation!r}; 'reference' has one: "
            "KVCacheSpec(implementation='reference')"
        )

    call.defvjp(refuse, refuse)
    return call


def check_array(name: str, x: jax.Array, shape: tuple[int, ...], dtype: Any) -> None:
    """Raises ValueError unless `x` has exactly this shape and dtype."""
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(
            f"{name} is {x.dtype}{list(x.shape)} but must be {jnp.dtype(dtype).name}{list(shape)}"
        )
