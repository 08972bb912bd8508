"""Finds stop strings in text that arrives in pieces."""

import copy
from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """Text that may be shown now, and the stop string that ended it (None: none so far)."""

    text: str
    stop: str | None

    @property
    def stopped(self) -> bool:
        return self.stop is not None


class StopStrings:
    """Ends a text at the first place where one of the stop strings is complete.

    When several are complete at the same character the longest one counts. Text that may be the beginning of
    a stop string is held back; `finish` returns it. The result does not depend on how the text was cut into
    pieces. Each character costs O(1) amortised for each stop string (Knuth, Morris and Pratt, 1977).

    stop: non-empty strings; ValueError for an empty one, TypeError for what is no string.
    include: the stop string itself belongs to the text.
    """

    def __init__(self, stop: Sequence[str] = (), *, include: bool = False):
        if isinstance(stop, str):
            raise TypeError("stop must be a list of strings here, not one string")
        for string in stop:
            if not isinstance(string, str):
                raise TypeError(f"a stop string must be a str, not {string!r}")
            if not string:
                raise ValueError("a stop string must not be empty; leave it out instead")
        self._stops = sorted(dict.fromkeys(stop), key=len, reverse=True)
        self._borders = [_borders(string) for string in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._include = include
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> StopMatch:
        """Takes the next text. While not `armed`, a stop string that completes is passed over."""
        if not self._stops:
            return StopMatch(text, None)
        held = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            stop = self._step(char)
            if stop is not None and armed:
                self._held = ""
                return StopMatch(held[: position if self._include else position - len(stop)], stop)
        keep = len(held) - max(self._matched)
        self._held = held[keep:]
        return StopMatch(held[:keep], None)

    def fork(self) -> "StopStrings":
        """A copy with the same state, for text that may be taken back."""
        forked = copy.copy(self)
        forked._matched = list(self._matched)
        return forked

    def finish(self) -> str:
        """The text that was held back; no stop string ended it."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Advances all stop strings by one character; returns the longest one that is complete now."""
        complete = None
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                complete = complete or stop
                matched = borders[-1]
            self._matched[i] = matched
        return complete


def _borders(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = borders[length - 1]
        length += string[i] == string[length]
        borders[i] = length
    return borders
