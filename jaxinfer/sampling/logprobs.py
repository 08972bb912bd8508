"""Logprobs on their way from the device to a sequence: those of output tokens, and those of the prompt.

A prompt is scored from the hidden states of its prefill steps, `SCORE_POSITIONS` at a time. Position p tells
about the token at p + 1, so the first token of a chunk is scored by the last of the chunk before.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.outputs import Logprob
from jaxinfer.programs.buckets import Program, score_program
from jaxinfer.request import Sequence
from jaxinfer.sampling.logprob_arrays import LogprobArrays, TokenLogprobs
from jaxinfer.sampling.params import MAX_LOGPROBS
from jaxinfer.sampling.sample import NOT_FINITE, SampleOutput
from jaxinfer.scheduler import ScheduledRow, ScheduledStep


@dataclass(frozen=True)
class PromptPiece:
    """Positions that one score program works on."""

    places: list[tuple[Sequence, int]]  # (sequence, index of the prompt token that is scored)
    output: SampleOutput  # [S] arrays on the device; the first len(places) count


def width(wanted: Iterable[int], vocab_size: int) -> int:
    """How many alternatives a program returns for rows that want so many (-1: all). Few values, few programs."""

    def one(k: int) -> int:
        return vocab_size if k == -1 else min(vocab_size, max(k, MAX_LOGPROBS)) if k else 0

    return max(map(one, wanted), default=0)


def begin(seq: Sequence) -> None:
    """Makes the places that the logprobs of a new sequence will be put in."""
    arrays, start = seq.request.arrays, min(seq.request.score_from, seq.num_prompt_tokens)
    if arrays is not None and arrays.output is not None:
        seq.logprobs = LogprobArrays(0, arrays.output)
    if seq.scores_prompt:
        seq.prompt_logprobs = [None] * start
        if arrays is not None and arrays.prompt is not None:
            seq.prompt_logprobs = LogprobArrays(start, arrays.prompt)


def truncate(seq: Sequence, num_output_tokens: int) -> None:
    """Keeps the logprobs of the first tokens of the output."""
    if isinstance(seq.logprobs, LogprobArrays):
        seq.logprobs.truncate(num_output_tokens)
        seq.cumulative_logprob = float(seq.logprobs.arrays().logprobs.sum(dtype=float))
    else:
        del seq.logprobs[num_output_tokens:]
        # The chosen token is the first entry of its place.
        seq.cumulative_logprob = sum((next(iter(e.values())).logprob for e in seq.logprobs), 0.0)


def scores_prompt(scheduled: ScheduledStep) -> bool:
    return any(_scored(row) for row in scheduled.rows)


def _scored(row: ScheduledRow) -> range:
    """Indices of the prompt tokens that the row's part of a step tells about."""
    seq = row.seq
    if not seq.scores_prompt:
        return range(0)
    return range(
        max(row.start + 1, seq.request.score_from),
        min(row.start + row.num_tokens + 1, seq.num_prompt_tokens),
    )


def dispatch_prompt_scores(
    scheduled: ScheduledStep,
    hidden: jax.Array,
    weights: Any,
    vocab_size: int,
    tile: int | None,
    compiled: Callable[[Program], Callable[..., SampleOutput]],
) -> list[PromptPiece]:
    """Starts the scoring of what a step computed of prompts: hidden [T, D] of its rows, in their order."""
    wanted: dict[
        int, list[tuple[Sequence, int, int]]
    ] = {}  # by width: (sequence, prompt index, hidden index)
    begin = 0
    for row in scheduled.rows:
        for index in _scored(row):
            places = wanted.setdefault(width([row.seq.request.num_prompt_logprobs or 0], vocab_size), [])
            places.append((row.seq, index, begin + index - 1 - row.start))
        begin += row.num_tokens
    pieces = []
    for num_logprobs, places in wanted.items():
        program = score_program(hidden.shape[0], num_logprobs, tile)
        for i in range(0, len(places), program.num_rows):
            part = places[i : i + program.num_rows]
            padded = np.zeros((2, program.num_rows), np.int32)
            padded[0, : len(part)] = [place for _, _, place in part]
            padded[1, : len(part)] = [seq.token_ids[at] for seq, at, _ in part]
            output = compiled(program)(weights, hidden, padded[0], padded[1])
            pieces.append(PromptPiece([(seq, at) for seq, at, _ in part], output))
    return pieces


def take_prompt_scores(piece: PromptPiece, host: SampleOutput) -> None:
    """Appends to `seq.prompt_logprobs`: `host` is the output of `piece`, read from the device.

    Sets `seq.error` where a logprob is NaN.
    """
    for seq, places in itertools.groupby(enumerate(piece.places), key=lambda place: place[1][0]):
        taken = seq.prompt_logprobs
        # Those before the end of what is there were scored before a preemption.
        new = [(b, index) for b, (_, index) in places if index >= len(taken)]
        assert host.logprob is not None
        for b, index in new:
            if np.isnan(host.logprob[b]) and seq.error is None:
                seq.error = f"prompt token {index + 1} cannot be scored: {NOT_FINITE}"
        if isinstance(taken, LogprobArrays):
            if new:
                tokens = [seq.token_ids[index] for _, index in new]
                taken.extend(_arrays(host, slice(new[0][0], new[-1][0] + 1), tokens, taken.num_top))
        else:
            wanted = seq.request.num_prompt_logprobs or 0
            taken.extend(_entries(host, (b,), seq.token_ids[index], wanted) for b, index in new)


def take_logprobs(seq: Sequence, host: SampleOutput, b: int, count: int) -> None:
    """Appends to `seq.logprobs` what row `b` of a step drew: arrays [k, B, ...], its last `count` tokens.

    Sets `seq.error` where a logprob is NaN.
    """
    tokens = seq.token_ids[len(seq.token_ids) - count :]
    assert host.logprob is not None
    without = np.flatnonzero(np.isnan(host.logprob[:count, b]))
    if len(without):
        number = seq.num_output_tokens - count + int(without[0]) + 1
        seq.error = f"output token {number} has no logprob: {NOT_FINITE}"
    if isinstance(seq.logprobs, LogprobArrays):
        piece = _arrays(host, (slice(count), b), tokens, seq.logprobs.num_top)
        seq.logprobs.extend(piece)
        seq.cumulative_logprob += float(piece.logprobs.sum(dtype=float))
        return
    for i, token in enumerate(tokens):
        entries = _entries(host, (i, b), token, seq.params.logprobs or 0)
        seq.cumulative_logprob += entries[token].logprob
        labels = seq.params.logprob_token_ids or ()
        if labels:
            assert host.label_logprobs is not None
            for label, logprob in zip(labels, host.label_logprobs[i, b], strict=False):
                entries.setdefault(label, Logprob(float(logprob)))
        seq.logprobs.append(entries)


def _arrays(host: SampleOutput, at: Any, tokens: list[int], num_top: int) -> TokenLogprobs:
    """Copies, so that the rest of a step's arrays can go."""
    assert host.logprob is not None and host.rank is not None
    assert host.top_ids is not None and host.top_logprobs is not None
    return TokenLogprobs(
        np.array(tokens, np.int32),
        np.array(host.logprob[at]),
        np.array(host.rank[at]),
        np.array(host.top_ids[at][:, :num_top]),
        np.array(host.top_logprobs[at][:, :num_top]),
    )


def _entries(host: SampleOutput, at: tuple[int, ...], token: int, wanted: int) -> dict[int, Logprob]:
    """The chosen token first, then the `wanted` best (-1: all)."""
    assert host.logprob is not None and host.rank is not None
    assert host.top_ids is not None and host.top_logprobs is not None
    entries = {token: Logprob(float(host.logprob[at]), int(host.rank[at]))}
    ids, values = host.top_ids[at], host.top_logprobs[at]
    if wanted >= 0:
        ids, values = ids[:wanted], values[:wanted]
    for rank, (i, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True), 1):
        entries.setdefault(i, Logprob(value, rank))
    return entries
