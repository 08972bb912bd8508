"""Token ids that files name: kind and range are checked when a checkpoint is opened, not at the first request."""

from typing import Any

from jaxinfer.checkpoints.files import CheckpointError
from jaxinfer.text.wording import shown

NONE = (-1, 0xFFFFFFFF)  # how files say "none" without null: -1, also as a 32 bit number without a sign


def valid_ids(value: Any, where: str, vocab_size: int | None) -> tuple[int, ...]:
    """The ids of `value`: one, a list of them, or none (null or -1, in a list too).

    Args:
      where: file and key, for the message.
      vocab_size: ids must be under it; None where it is not known.

    Raises CheckpointError for what is no id, or outside the vocabulary.
    """
    entries = value if isinstance(value, list | tuple) else [value]
    ids = [entry for entry in entries if entry is not None and not (_is_int(entry) and entry in NONE)]
    for entry in ids:
        if not _is_int(entry):
            raise CheckpointError(
                f"{where} is {shown(value)}; an id is a whole number, and null or -1 is none"
            )
        if entry < 0 or (vocab_size is not None and entry >= vocab_size):
            end = "" if vocab_size is None else f", whose ids end at {vocab_size - 1:,}"
            raise CheckpointError(f"{where} is {shown(value)}: {shown(entry)} is not in the vocabulary{end}")
    return tuple(dict.fromkeys(ids))


def valid_id(value: Any, where: str, vocab_size: int | None) -> int | None:
    """The one id of `value`, or None. Raises CheckpointError as `valid_ids`, and for a list."""
    if isinstance(value, list | tuple):
        raise CheckpointError(f"{where} is {shown(value)}, and must be one id")
    return next(iter(valid_ids(value, where, vocab_size)), None)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
