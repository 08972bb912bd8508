"""Logprobs of many tokens as arrays: what a dump takes, where one dict per token would be slow and large."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.outputs import Logprob


class TokenLogprobs(NamedTuple):
    """Of T consecutive tokens, with k alternatives each, the best first."""

    token_ids: np.ndarray  # i32[T] the tokens that are there
    logprobs: np.ndarray  # f32[T] theirs
    ranks: np.ndarray  # i32[T] 1 + the number of tokens that are more probable
    top_ids: np.ndarray  # i32[T, k]
    top_logprobs: np.ndarray  # f32[T, k]


class LogprobArrays(Sequence[Any]):
    """The logprobs of a sequence, in arrays that grow piece by piece.

    As a sequence it holds one dict per token, as where no arrays are asked for; None for the first `start` tokens,
    which have no logprobs.
    """

    def __init__(self, start: int, num_top: int) -> None:
        self.start, self.num_top = start, num_top
        self._pieces: list[TokenLogprobs] = []
        self._count = 0

    def extend(self, piece: TokenLogprobs) -> None:
        self._pieces.append(piece)
        self._count += len(piece.token_ids)

    def __copy__(self) -> "LogprobArrays":
        """What is there now: it does not grow with the original."""
        copied = LogprobArrays(self.start, self.num_top)
        copied._pieces, copied._count = list(self._pieces), self._count
        return copied

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, `start` included."""
        count = max(0, length - self.start)
        if count < self._count:
            self._pieces = [TokenLogprobs(*(array[:count] for array in self.arrays()))]
            self._count = count

    def narrow(self, num_top: int) -> "LogprobArrays":
        """The same with fewer alternatives; -1: with all."""
        if num_top in (-1, self.num_top):
            return self
        narrow = LogprobArrays(self.start, num_top)
        token_ids, logprobs, ranks, top_ids, top_logprobs = self.arrays()
        narrow.extend(
            TokenLogprobs(token_ids, logprobs, ranks, top_ids[:, :num_top], top_logprobs[:, :num_top])
        )
        return narrow

    def arrays(self) -> TokenLogprobs:
        """All tokens from `start` on."""
        if not self._pieces:
            top = (0, self.num_top)
            return TokenLogprobs(
                np.zeros(0, np.int32),
                np.zeros(0, np.float32),
                np.zeros(0, np.int32),
                np.zeros(top, np.int32),
                np.zeros(top, np.float32),
            )
        if len(self._pieces) > 1:
            self._pieces = [TokenLogprobs(*map(np.concatenate, zip(*self._pieces, strict=True)))]
        return self._pieces[0]

    def __len__(self) -> int:
        return self.start + self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index] - self.start
        if at < 0:
            return None
        arrays = self.arrays()
        entries = {
            int(arrays.token_ids[at]): Logprob(float(arrays.logprobs[at]), int(arrays.ranks[at])),
        }
        for rank, (token, logprob) in enumerate(
            zip(arrays.top_ids[at].tolist(), arrays.top_logprobs[at].tolist(), strict=True), 1
        ):
            entries.setdefault(token, Logprob(logprob, rank))
        return entries
