"""Sampling: logits of a step in, one token per row out, inside the compiled step.

Order: penalties (see penalties.py), logits processors, temperature, top_k, top_p, min_p (see filters.py),
draw. Every row has its own parameters and its own random numbers: threefry2x32, from all 64 bits of the
seed, folded with the sample index on the host, and with the position of the token and a purpose on the
device. They depend on nothing else, so a request draws the same numbers in any row, batch or chunking, and
after a preemption.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from jaxinfer.sampling.filters import Filters, argmax, best_tokens, draw, find_cut, keep_mask
from jaxinfer.sampling.logits_processors import checked
from jaxinfer.sampling.params import GREEDY_BELOW
from jaxinfer.sampling.penalties import Extras, apply_extras, asks_for_extras, build_extras

Variant = Literal["greedy", "sample", "any", "full"]
LogprobsMode = Literal["raw", "processed"]
# fn(logits f32[B, V], rows: RowState of these B rows, params: pytree with leading B) -> f32[B, V]
LogitsProcessor = Callable[[Array, "RowState", Any], Array]

# Purposes of random numbers: draw a token, accept a draft, draw after a refusal.
SAMPLE, ACCEPT, RESIDUAL = 0, 1, 2

_WORD = 0xFFFFFFFF


class SamplingRow(NamedTuple):
    """What the host knows about one row of a batch."""

    params: Any  # SamplingParams
    seed: int  # any 64-bit value
    sample_index: int  # which of the n samples of a request
    prompt_len: int
    end_ids: Sequence[int] = ()  # all ids that end the output: suppressed until min_tokens
    bad_words: Sequence[Sequence[int]] = ()  # token ids of each bad word


@struct.dataclass
class SamplingBatch:
    """Sampling parameters of the rows of a step. A greedy step has one only for what stands last."""

    temperature: Array  # f32[B]
    top_k: Array  # i32[B], 0 is off
    top_p: Array  # f32[B], 1 is off
    min_p: Array  # f32[B], 0 is off
    key: Array  # u32[B, 2] threefry2x32 key of (seed, sample index)
    extras: Extras | None = None  # for variant "full"
    label_ids: Array | None = None  # i32[B, Q] logprob_token_ids, padded with id 0
    processor_args: dict[str, Array] = struct.field(default_factory=dict)  # [B, ...] of logits processors

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[SamplingRow],
        num_rows: int,
        vocab_size: int,
        processor_args: Mapping[str, np.ndarray] | None = None,
    ) -> "SamplingBatch":
        """A batch of numpy arrays, padded to num_rows with greedy rows; extras if any row asks for them."""
        padding = num_rows - len(rows)
        params = [row.params for row in rows]
        columns: Any = np.array(  # f64[4, B]: a top_k up to 2**53 is exact
            [(p.temperature, p.top_k, p.top_p, p.min_p) for p in params] + [(0.0, 0, 1.0, 0.0)] * padding
        ).T
        keys = [row_key(row.seed, row.sample_index) for row in rows] + [(0, 0)] * padding
        full = any(asks_for_extras(row) for row in rows)
        return cls(
            temperature=columns[0].astype(np.float32),
            top_k=np.clip(columns[1], 0, vocab_size).astype(np.int32),
            top_p=columns[2].astype(np.float32),
            min_p=columns[3].astype(np.float32),
            key=np.array(keys, np.uint32),  # type: ignore[arg-type]  # numpy until the step puts it on the device
            extras=build_extras(rows, num_rows, vocab_size) if full else None,
            label_ids=_label_ids(params, num_rows),  # type: ignore[arg-type]
            processor_args=dict(processor_args or {}),  # type: ignore[arg-type]
        )


def _label_ids(params: Sequence[Any], num_rows: int) -> np.ndarray | None:
    """i32[num_rows, Q], Q a power of two from 8 on; None where no row has labels."""
    labels = [p.logprob_token_ids or () for p in params]
    if not any(labels):
        return None
    ids = np.zeros((num_rows, max(8, 1 << (max(map(len, labels)) - 1).bit_length())), np.int32)
    for b, row in enumerate(labels):
        ids[b, : len(row)] = row
    return ids


@struct.dataclass
class RowState:
    """Device state of running rows between steps: R rows and a spare one that padding reads and writes."""

    last_token: Array  # i32[R + 1]
    token_ids: Array  # i32[R + 1, L] prompt and outputs
    num_tokens: Array  # i32[R + 1]


@struct.dataclass
class SampleOutput:
    """The chosen tokens, and their logprobs where asked for. Alternatives are in the order of filters.py."""

    tokens: Array  # i32[B]
    # f32[B], the largest logit that could be drawn. Not finite: the token has no meaning; `why_no_token` says why.
    peak: Array | None = None  # None where tokens were given
    logprob: Array | None = None  # f32[B] of the chosen token
    rank: Array | None = None  # i32[B] 1 + the number of tokens before the chosen one
    top_ids: Array | None = None  # i32[B, k]
    top_logprobs: Array | None = None  # f32[B, k]; -inf for tokens that a filter removed
    label_logprobs: Array | None = None  # f32[B, Q] of logprob_token_ids


NOT_FINITE = (
    "the logits are not finite (NaN or infinity): the weights, a penalty or a logits processor makes them so"
)


def why_no_token(peak: float) -> str | None:
    """Why a row with this `SampleOutput.peak` has no token, for the user; None: it has one."""
    if math.isfinite(peak):
        return None
    if peak == -math.inf:
        return (
            "no token is left: allowed_token_ids, bad_words, min_tokens, logit_bias and logits processors together "
            "rule out all of the vocabulary"
        )
    return NOT_FINITE


def greedy(logits: Array) -> Array:
    """i32[B]: the best token of each row of f32[B, V]; -1, no token, where a logit is NaN or none is finite."""
    tokens, peak = argmax(logits)
    return jnp.where(jnp.isfinite(peak), tokens, -1)


def variant_of(rows: Sequence[SamplingRow]) -> Variant:
    """The cheapest variant of `sample` that serves all rows."""
    if any(asks_for_extras(row) for row in rows):
        return "full"
    if all(row.params.temperature < GREEDY_BELOW for row in rows):
        return "greedy"
    return "sample"


def init_row_state(num_rows: int, max_len: int) -> RowState:
    """RowState for num_rows sequences of at most max_len tokens; all zero."""
    return RowState(
        last_token=jnp.zeros(num_rows + 1, jnp.int32),
        token_ids=jnp.zeros((num_rows + 1, max_len), jnp.int32),
        num_tokens=jnp.zeros(num_rows + 1, jnp.int32),
    )


def set_row(rows: RowState, row: Array, token_ids: Array, num_tokens: Array) -> RowState:
    """Gives a row to a sequence whose known tokens are the first num_tokens i32[] of token_ids i32[L]."""
    return RowState(
        last_token=rows.last_token.at[row].set(token_ids[jnp.maximum(num_tokens - 1, 0)]),
        token_ids=rows.token_ids.at[row].set(token_ids),
        num_tokens=rows.num_tokens.at[row].set(num_tokens),
    )


def record(rows: RowState, row_ids: Array, tokens: Array, active: Array) -> RowState:
    """Appends tokens i32[B] to rows row_ids i32[B] where active bool[B]; the others write to the spare row.

    A full row overwrites its last token: only surplus tokens, which the host drops, come so far.
    """
    spare, max_len = rows.num_tokens.shape[0] - 1, rows.token_ids.shape[1]
    row = jnp.where(active, row_ids, spare)
    num_tokens = rows.num_tokens[row]
    return RowState(
        last_token=rows.last_token.at[row].set(tokens),
        token_ids=rows.token_ids.at[row, jnp.minimum(num_tokens, max_len - 1)].set(tokens),
        num_tokens=rows.num_tokens.at[row].set(jnp.minimum(num_tokens + 1, max_len)),
    )


def sample(
    logits: Array,
    positions: Array,
    rows: RowState,
    row_ids: Array,
    batch: SamplingBatch | None,
    *,
    variant: Variant,
    num_logprobs: int | None = None,
    logprobs_mode: LogprobsMode = "raw",
    logprob_token_ids: Array | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    processor_params: Any = None,
    rows_at_once: int = 1,
) -> SampleOutput:
    """Draws one token for each row.

    Args:
      logits: f32[B, V].
      positions: i32[B] the index in its sequence of the token to be drawn; tokens before it are in `rows`.
      rows: read where variant is "full" or there are logits processors.
      row_ids: i32[B] the row of `rows` of each row of the batch.
      batch: may be None where variant is "greedy".
      variant: "greedy" is the argmax; "sample" has temperature and filters; "any" is "sample" with a branch on the
        device, which takes the argmax where all rows are greedy; "full" has `batch.extras` too.
        A row gets the same token from each variant that covers its parameters.
      num_logprobs: number of alternatives, 0 for the chosen token alone; None for no logprobs.
      logprobs_mode: "raw" is the log-softmax of `logits`; "processed" that of the distribution which the
        token was drawn from, where a greedy row has all its mass on one token.
      logprob_token_ids: i32[B, Q] further tokens whose logprobs are wanted.
      logits_processors: applied in turn after the penalties, before temperature, with processor_params.
      rows_at_once: see `filters.draw`.
    """
    raw = logits
    if variant == "full":
        if batch is None or batch.extras is None:
            raise ValueError('sample: variant "full" needs batch.extras; use variant_of(rows) to choose.')
        logits = apply_extras(logits, batch.extras, rows.token_ids[row_ids], positions)
    if logits_processors:
        here = RowState(rows.last_token[row_ids], rows.token_ids[row_ids], positions)
        for processor in logits_processors:
            logits = checked(processor, processor(logits, here, processor_params), logits.shape)

    if variant == "greedy":
        tokens, peak = argmax(logits)
        temperature = jnp.zeros(logits.shape[0], jnp.float32)
        filters = Filters(jnp.ones_like(tokens), jnp.ones_like(temperature), jnp.zeros_like(temperature))
    elif batch is None:
        raise ValueError(f'sample: variant "{variant}" needs a SamplingBatch; only "greedy" works without.')
    else:
        temperature, filters = batch.temperature, _filters(batch, logits.shape[1])

        def draw_tokens() -> tuple[Array, Array]:
            keys = purpose_keys(batch.key, positions, SAMPLE)
            return draw(logits, _positive(temperature), filters, keys, rows_at_once)

        if variant == "any":
            is_greedy = jnp.all(temperature < GREEDY_BELOW)
            tokens, peak = lax.cond(is_greedy, lambda: argmax(logits), draw_tokens)
        else:
            tokens, peak = draw_tokens()
    if num_logprobs is None and logprob_token_ids is None:
        return SampleOutput(tokens, peak)

    scores = raw
    if logprobs_mode == "processed":
        keep = keep_mask(logits, find_cut(logits, _positive(temperature), filters, rows_at_once))
        # The draw and the cut sum in another order: at the edge of top_p they may differ by one token.
        keep |= jnp.arange(logits.shape[1]) == tokens[:, None]
        scores = jnp.where(keep, logits / _positive(temperature)[:, None], -jnp.inf)
    return replace(with_logprobs(tokens, scores, num_logprobs or 0, logprob_token_ids), peak=peak)


def _filters(batch: SamplingBatch, vocab_size: int) -> Filters:
    """A greedy row is a row that keeps one token."""
    top_k = jnp.where((batch.top_k <= 0) | (batch.top_k > vocab_size), vocab_size, batch.top_k)
    return Filters(jnp.where(batch.temperature < GREEDY_BELOW, 1, top_k), batch.top_p, batch.min_p)


def _positive(temperature: Array) -> Array:
    """Temperature to divide by: a greedy row is not scaled."""
    return jnp.where(temperature < GREEDY_BELOW, 1.0, temperature)


def with_logprobs(
    tokens: Array, scores: Array, num_logprobs: int, labels: Array | None = None
) -> SampleOutput:
    """Logprobs under the softmax of scores f32[B, V]: of tokens i32[B], the best ones, and labels i32[B, Q].

    All are NaN where a score is NaN or infinite.
    """
    log_total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    log_total = jnp.where(jnp.isfinite(log_total), log_total, jnp.nan)
    chosen = jnp.take_along_axis(scores, tokens[:, None], axis=1)
    ids = jnp.arange(scores.shape[1])
    before = (scores > chosen) | ((scores == chosen) & (ids < tokens[:, None]))
    top_scores, top_ids = best_tokens(scores, num_logprobs)
    return SampleOutput(
        tokens=tokens,
        logprob=(chosen - log_total)[:, 0],
        rank=1 + jnp.sum(before, axis=-1, dtype=jnp.int32),
        top_ids=top_ids,
        top_logprobs=top_scores - log_total,
        label_logprobs=None if labels is None else jnp.take_along_axis(scores, labels, axis=1) - log_total,
    )


def purpose_keys(key: Array, positions: Array, purpose: int) -> Array:
    """Typed keys [B] for the random numbers of one purpose (SAMPLE, ACCEPT, RESIDUAL) at positions i32[B]."""

    def fold(key_data: Array, position: Array) -> Array:
        row_key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(row_key, position), purpose)

    return jax.vmap(fold)(key, positions)


@lru_cache(maxsize=1 << 12)  # of the rows that run; those that have ended are not kept
def row_key(seed: int, sample_index: int) -> tuple[int, int]:
    """Threefry2x32 key: jax.random.fold_in(key of the seed, sample_index), without jax.

    The key of a seed is its high and its low word: all 64 bits count (jax.random.key drops the high ones).
    """
    return threefry2x32((seed >> 32 & _WORD, seed & _WORD), (0, sample_index & _WORD))


def threefry2x32(key: tuple[int, int], count: tuple[int, int]) -> tuple[int, int]:
    """The block cipher of Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), 20 rounds."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    x, y = count[0] + key[0] & _WORD, count[1] + key[1] & _WORD
    for group in range(5):
        for r in rotations[group % 2]:
            x = x + y & _WORD
            y = (y << r | y >> 32 - r) & _WORD ^ x
        x = x + schedule[(group + 1) % 3] & _WORD
        y = y + schedule[(group + 2) % 3] + group + 1 & _WORD
    return x, y
