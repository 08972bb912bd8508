"""Changes of the logits before the filters: bias, bans, penalties. For rows that ask for any of them.

Order: logit_bias, token mask (allowed_token_ids), min_tokens, bad_words, repetition_penalty, then presence
and frequency penalty. As in vLLM, bad words and presence and frequency penalties look at the output alone;
as in transformers, the repetition penalty looks at the prompt and the output.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

# Least `Extras.list_lengths`. A longer list is padded to the next power of two: one more program.
LEAST_LENGTHS = (32, 8, 8, 8)


@struct.dataclass
class Extras:
    """What rows ask for beyond temperature and filters; a row that asks for nothing is unchanged."""

    presence_penalty: Array  # f32[B], 0 is off
    frequency_penalty: Array  # f32[B], 0 is off
    repetition_penalty: Array  # f32[B], 1 is off
    prompt_len: Array  # i32[B]
    bias_ids: Array  # i32[B, M], padded with id 0 and value 0
    bias_values: Array  # f32[B, M]
    token_mask: Array  # u32[B, ceil(V / 32)], bit v % 32 of word v // 32: token v is allowed
    bad_words: Array  # i32[B, W, L], each word at the right end
    bad_word_lens: Array  # i32[B, W], 0 is padding
    min_tokens: Array  # i32[B]
    stop_ids: Array  # i32[B, S] not allowed before min_tokens outputs exist; padded by repetition

    @property
    def list_lengths(self) -> tuple[int, int, int, int]:
        """(M, W, L, S): what a program with extras is compiled for, beside B and V."""
        num_words, word_len = self.bad_words.shape[1:]
        return self.bias_ids.shape[1], num_words, word_len, self.stop_ids.shape[1]


def asks_for_extras(row: Any) -> bool:
    """Whether a `SamplingRow` needs `Extras`. min_tokens alone does not, if no token could end the row."""
    params = row.params
    return bool(
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
        or params.logit_bias
        or params.allowed_token_ids is not None
        or (params.min_tokens > 0 and row.end_ids)
        or row.bad_words
    )


def build_extras(
    rows: Sequence[Any],
    num_rows: int,
    vocab_size: int,
    least: tuple[int, int, int, int] = LEAST_LENGTHS,
) -> Extras:
    """Extras of numpy arrays from `SamplingRow`s, padded to num_rows with rows that ask for nothing.

    least: no list is shorter (`Extras.list_lengths`).
    """

    def length(wanted: list[int], least: int) -> int:
        return max(least, 1 << (max(wanted, default=0) - 1).bit_length()) if max(wanted, default=0) else least

    num_biases = length([len(r.params.logit_bias or ()) for r in rows], least[0])
    num_words = length([len(r.bad_words) for r in rows], least[1])
    word_len = length([len(word) for r in rows for word in r.bad_words], least[2])
    num_stops = length([len(r.end_ids) for r in rows], least[3])

    arrays: dict[str, Any] = dict(
        presence_penalty=np.zeros(num_rows, np.float32),
        frequency_penalty=np.zeros(num_rows, np.float32),
        repetition_penalty=np.ones(num_rows, np.float32),
        prompt_len=np.zeros(num_rows, np.int32),
        bias_ids=np.zeros((num_rows, num_biases), np.int32),
        bias_values=np.zeros((num_rows, num_biases), np.float32),
        token_mask=np.full((num_rows, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32),
        bad_words=np.zeros((num_rows, num_words, word_len), np.int32),
        bad_word_lens=np.zeros((num_rows, num_words), np.int32),
        min_tokens=np.zeros(num_rows, np.int32),
        stop_ids=np.zeros((num_rows, num_stops), np.int32),
    )
    for b, row in enumerate(rows):
        params = row.params
        arrays["presence_penalty"][b] = params.presence_penalty
        arrays["frequency_penalty"][b] = params.frequency_penalty
        arrays["repetition_penalty"][b] = params.repetition_penalty
        arrays["prompt_len"][b] = row.prompt_len
        if params.logit_bias:
            arrays["bias_ids"][b, : len(params.logit_bias)] = list(params.logit_bias.keys())
            arrays["bias_values"][b, : len(params.logit_bias)] = list(params.logit_bias.values())
        if params.allowed_token_ids is not None:
            arrays["token_mask"][b] = pack_token_mask(params.allowed_token_ids, vocab_size)
        for w, word in enumerate(row.bad_words):
            arrays["bad_words"][b, w, word_len - len(word) :] = word
            arrays["bad_word_lens"][b, w] = len(word)
        if params.min_tokens > 0 and row.end_ids:
            arrays["min_tokens"][b] = params.min_tokens
            arrays["stop_ids"][b] = row.end_ids[0]
            arrays["stop_ids"][b, : len(row.end_ids)] = row.end_ids
    return Extras(**arrays)


def pack_token_mask(allowed: Sequence[int], vocab_size: int) -> np.ndarray:
    """u32[ceil(V / 32)] with the bits of the allowed token ids set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.asarray(allowed, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def apply_extras(logits: Array, extras: Extras, token_ids: Array, positions: Array) -> Array:
    """The changed logits.

    Args:
      logits: f32[B, V].
      token_ids: i32[B, L] the tokens of each sequence; those before `positions` are known.
      positions: i32[B] the index in the sequence of the token to be drawn.
    """
    vocab = logits.shape[1]
    row = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[row, extras.bias_ids].add(extras.bias_values)

    bits = extras.token_mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1  # u32[B, ceil(V / 32), 32]
    allowed = bits.reshape(logits.shape[0], -1)[:, :vocab] == 1
    logits = jnp.where(allowed, logits, -jnp.inf)

    outputs = jnp.maximum(positions - extras.prompt_len, 0)  # i32[B], 0 while a prompt is prefilled too
    too_early = (outputs < extras.min_tokens)[:, None]
    logits = logits.at[row, extras.stop_ids].min(jnp.where(too_early, -jnp.inf, jnp.inf))

    ban = _bad_word_completed_next(extras, token_ids, positions)
    logits = logits.at[row, extras.bad_words[:, :, -1]].min(jnp.where(ban, -jnp.inf, jnp.inf))

    index = jnp.arange(token_ids.shape[1])
    known = index < positions[:, None]  # bool[B, L]
    output = known & (index >= extras.prompt_len[:, None])
    seen = jnp.zeros(logits.shape, bool).at[row, token_ids].max(known)
    counts = jnp.zeros(logits.shape, jnp.int32).at[row, token_ids].add(output.astype(jnp.int32))
    penalty = extras.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    return (
        logits - extras.frequency_penalty[:, None] * counts - extras.presence_penalty[:, None] * (counts > 0)
    )


def _bad_word_completed_next(extras: Extras, token_ids: Array, positions: Array) -> Array:
    """bool[B, W]: the output ends with all tokens of the word but its last."""
    max_prefix = extras.bad_words.shape[2] - 1
    index = positions[:, None] + jnp.arange(-max_prefix, 0)  # i32[B, L - 1] of the newest tokens
    recent = jnp.take_along_axis(token_ids, jnp.clip(index, 0, token_ids.shape[1] - 1), axis=1)
    in_output = index >= extras.prompt_len[:, None]
    equal = (extras.bad_words[:, :, :-1] == recent[:, None]) & in_output[:, None]
    not_in_word = jnp.arange(max_prefix) < max_prefix + 1 - extras.bad_word_lens[:, :, None]
    return jnp.all(equal | not_in_word, axis=-1) & (extras.bad_word_lens > 0)
