"""Puts values into a sentence: those of files and users however large or strange they are, sizes, errors."""

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


def named(name: str, length: int = 200) -> str:
    """A name as it is, or its short repr where it would break the sentence (a new line, thousands of letters)."""
    return name if name.isprintable() and len(name) <= length else shown(name, length)


def listed(names: Sequence[str], most: int = 12, separator: str = ", ") -> str:
    """Names for a sentence; of very many the first `most` and how many more there are."""
    rest = len(names) - most
    return separator.join(map(named, names[:most])) + (f"{separator}and {rest:,} more" if rest > 0 else "")


def size(num_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes:.0f} B"


def first_line(error: BaseException, length: int = 300) -> str:
    """The first line of an error's message, without its full stop; the error's type where there is none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:length] if lines else type(error).__name__
