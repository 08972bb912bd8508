"""Puts values of files and users into one sentence of an error, however large or strange they are."""

from collections.abc import Sequence
from typing import Any


def shown(value: Any, length: int = 80) -> str:
    """`value` as a sentence can hold it: a short repr, whatever a file put there."""
    if isinstance(value, list | tuple | dict):
        entries = list(value)
        if len(entries) > 4 or isinstance(value, dict) or any(isinstance(x, list | dict) for x in entries):
            return f"a {type(value).__name__} of {len(entries):,} entries"
        return f"[{', '.join(shown(entry, length) for entry in entries)}]"
    if isinstance(value, int) and value.bit_length() > 256:  # str() of over 4300 digits is an error
        return f"a number of {value.bit_length():,} bits"
    cut = isinstance(value, str | bytes) and len(value) > length
    return repr(value[:length]) + "..." if cut else repr(value)


def listed(names: Sequence[str], most: int = 12, separator: str = ", ") -> str:
    """Names for a sentence; of very many the first `most` and how many more there are."""
    rest = len(names) - most
    return separator.join(names[:most]) + (f"{separator}and {rest:,} more" if rest > 0 else "")
