"""What requests hand to logits processors: `SamplingParams.extra_args` as arrays with one entry per row.

A processor is a pure function `fn(logits f32[B, V], rows: RowState, params) -> f32[B, V]`, traced into the step
after the penalties and before the temperature. `params` is a dict of arrays whose first axis is B: a float is
f32[B], an int i32[B], a bool bool[B], a list of n numbers [B, n]. A row whose request does not give a key has
its default there: the declared one, else zeros.

Keys, types and lengths are part of a program. Declare them (`LLM(logits_processor_args={"strength": 0.0})`), and
nothing compiles when a request first gives one; a key that was not declared is known from the first request
on that gives it, and absent from `params` before.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from jaxinfer.text.wording import shown

Signature = tuple[tuple[str, str, tuple[int, ...]], ...]  # (key, dtype, shape of one row)

_DTYPES = {"b": np.bool_, "i": np.int32, "f": np.float32}


class ProcessorArgs:
    """The keys that are known, with their types, shapes and defaults."""

    def __init__(self, declared: Mapping[str, Any] | None = None) -> None:
        self._defaults = {key: _array(key, value) for key, value in (declared or {}).items()}

    @property
    def signature(self) -> Signature:
        return tuple((key, str(value.dtype), value.shape) for key, value in sorted(self._defaults.items()))

    def knows(self, extra_args: Mapping[str, Any]) -> bool:
        """Whether all keys are declared or learnt: no program changes for them."""
        return extra_args.keys() <= self._defaults.keys()

    def check(self, extra_args: Mapping[str, Any]) -> None:
        """Raises ValueError for a value that is no number, or not of the type and length of its key."""
        self._checked(extra_args)

    def learn(self, extra_args: Mapping[str, Any]) -> None:
        """Makes the keys of a request known. Raises as `check`, with nothing learnt."""
        for key, value in self._checked(extra_args).items():
            self._defaults.setdefault(key, np.zeros_like(value))

    def batch(self, rows: Seq[Mapping[str, Any] | None], num_rows: int) -> dict[str, np.ndarray]:
        """Arrays [num_rows, ...]: the values of each row's request, and defaults after the last."""
        arrays = {key: np.repeat(value[None], num_rows, axis=0) for key, value in self._defaults.items()}
        for b, extra_args in enumerate(rows):
            for key, value in (extra_args or {}).items():
                arrays[key][b] = value
        return arrays

    def _checked(self, extra_args: Mapping[str, Any]) -> dict[str, np.ndarray]:
        arrays = {key: _array(key, value) for key, value in extra_args.items()}
        for key, value in arrays.items():
            known = self._defaults.get(key)
            if known is None:
                continue
            if known.shape != value.shape or not np.can_cast(value.dtype, known.dtype, "same_kind"):
                raise ValueError(
                    f"extra_args[{shown(key)}] is {value.dtype}{list(value.shape)}; it was declared or first given as "
                    f"{known.dtype}{list(known.shape)}, and a compiled step has one type and length for it"
                )
        return arrays


def checked(processor: Any, logits: Any, shape: tuple[int, ...]) -> Any:
    """What a processor returned, while a step is traced.

    Raises:
      ValueError: it is not f32 of the shape [B, V] that the processor was given.
    """
    got = f"{getattr(logits, 'dtype', type(logits).__name__)}{list(getattr(logits, 'shape', ()))}"
    if got != f"float32{list(shape)}":
        name = getattr(processor, "__qualname__", None) or type(processor).__name__
        raise ValueError(
            f"the logits processor {name} returned {got}; it was given float32{list(shape)} and must return the same"
        )
    return logits


def _array(key: str, value: Any) -> np.ndarray:
    """A number, or a list of numbers of one length, as bool, int32 or float32."""
    try:
        array = np.asarray(value)
        dtype = _DTYPES[array.dtype.kind]
        small: np.ndarray = array.astype(dtype)
    except (KeyError, ValueError, OverflowError):
        raise ValueError(
            f"extra_args[{shown(key)}]={shown(value)} must be a number or a list of numbers"
        ) from None
    if array.dtype.kind == "i" and not np.array_equal(small, array):
        raise ValueError(f"extra_args[{shown(key)}]={shown(value)} does not fit 32 bits")
    return small
