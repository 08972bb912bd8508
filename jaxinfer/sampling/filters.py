"""Which tokens survive top_k, top_p and min_p, and the draw of one of them.

Tokens of a row are ordered by logit, the larger first, and by id among equal logits, the lower first. Each
filter keeps a prefix of that order, never an empty one. So `top_k=k` keeps exactly k tokens, ties included,
`top_k=1` is the argmax, and the survivors of a row are named by the last of them: its `Cut`.

The vocabulary is never sorted. Almost every row ends within its `HEAD` best tokens, which are found exactly
from the maxima of blocks. Rows that keep more are drawn from the whole vocabulary and checked against top_p
(rejection, as in FlashInfer's sampling kernels, https://flashinfer.ai/2025/03/10/sampling.html); a top_k
larger than `HEAD`, and whoever asks for the cut itself, searches the values of the logits bit by bit. A
row's way depends on that row alone, so a token does not depend on what else is in the batch.

A draw also returns the row's peak: its largest logit, or infinity if one is NaN. A row whose peak is not finite has no
token to draw; what is returned for it is some id, without meaning.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

BLOCK = 128  # tokens of the vocabulary that are summed together
FAN = 16  # tokens, or blocks, under one maximum in the search for the best tokens
HEAD = 64  # best tokens that are looked at before the whole vocabulary is


@struct.dataclass
class Filters:
    """The filters of each row, after `temperature` became part of the weights."""

    top_k: Array  # i32[B], 1..V
    top_p: Array  # f32[B], 1 is off; measured on what top_k left
    min_p: Array  # f32[B], 0 is off; relative to the best token


@struct.dataclass
class Cut:
    """The last token that a row keeps."""

    value: Array  # f32[B] its logit
    id: Array  # i32[B] its id


def argmax(logits: Array) -> tuple[Array, Array]:
    """The best token i32[B] of each row of f32[B, V], the lowest id among equals, and the peak f32[B].

    Equal to jnp.argmax, about four times as fast on CPU at V = 49,152: a plain maximum is vectorised.
    """
    blocks = _blocks(logits, BLOCK)
    maxima = jnp.max(blocks, axis=-1)
    best = jnp.argmax(maxima, axis=-1)  # i32[B]
    inside = jnp.take_along_axis(blocks, best[:, None, None], axis=1)[:, 0]  # f32[B, BLOCK]
    tokens = best * BLOCK + jnp.argmax(inside, axis=-1)
    return tokens.astype(jnp.int32), _peak(logits, jnp.max(maxima, axis=-1))


def scaled_weights(logits: Array, temperature: Array) -> Array:
    """f32[B, V]: exp((logits - max) / temperature): the best token weighs 1. No NaN where all are -inf."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.exp((logits - jnp.where(best == -jnp.inf, 0.0, best)) / temperature[:, None])


def keep_mask(logits: Array, cut: Cut) -> Array:
    """bool[B, V]: the tokens up to and including the cut."""
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    value = cut.value[:, None]
    return (logits > value) | ((logits == value) & (ids <= cut.id[:, None]))


def best_tokens(logits: Array, count: int) -> tuple[Array, Array]:
    """The `count` <= V best tokens of each row of f32[B, V], in order: f32[B, count] logits, i32[B, count] ids.

    Exact. They lie in the `count` blocks with the largest maxima (the lower block among equals): otherwise
    each of those blocks would hold a token that stands before one of them. And so on for the blocks.
    """
    rows, vocab = logits.shape
    if vocab <= max(count, 1) * FAN:
        return lax.top_k(_positive_zero(logits), count)
    blocks = _blocks(logits, FAN)
    _, best = best_tokens(jnp.max(blocks, axis=-1), count)
    best = lax.sort(best)  # so that equal logits stand in the order of their ids
    candidates = jnp.take_along_axis(blocks, best[:, :, None], axis=1).reshape(rows, -1)
    ids = (best[:, :, None] * FAN + jnp.arange(FAN, dtype=jnp.int32)).reshape(rows, -1)
    values, order = lax.top_k(_positive_zero(candidates), count)
    return values, jnp.take_along_axis(ids, order, axis=1)


def find_cut(logits: Array, temperature: Array, filters: Filters, rows_at_once: int = 1) -> Cut:
    """The cut of each row of f32[B, V] logits. Arguments as in `draw`."""
    head = _head(logits, temperature)
    keep = _head_keep(head, filters, _head_mass(head, filters))
    last = jnp.sum(keep, axis=-1)[:, None] - 1
    cut = Cut(*(jnp.take_along_axis(x, last, axis=1)[:, 0] for x in (head.values, head.ids)))

    def search(logits: Array, temperature: Array, filters: Filters) -> Cut:
        weights = scaled_weights(logits, temperature)
        cut = _search(logits, jnp.ones_like(weights), filters.top_k.astype(jnp.float32))
        kept = jnp.where(keep_mask(logits, cut), weights, 0)
        nucleus = _search(logits, kept, filters.top_p * jnp.sum(kept, axis=-1))
        cut = jax.tree.map(lambda a, b: jnp.where(filters.top_p < 1, a, b), nucleus, cut)
        alive = keep_mask(logits, cut) & (weights >= filters.min_p[:, None])
        floor = jnp.min(jnp.where(alive, logits, jnp.inf), axis=-1)  # +inf: no weight, all logits are -inf
        raised = (floor > cut.value) & (floor < jnp.inf)
        return Cut(jnp.where(raised, floor, cut.value), jnp.where(raised, logits.shape[1], cut.id))

    is_open = filters.top_k > head.values.shape[1]
    return _for_open_rows(is_open, rows_at_once, cut, search, (logits, temperature, filters))


def draw(
    logits: Array, temperature: Array, filters: Filters, keys: Array, rows_at_once: int = 1
) -> tuple[Array, Array]:
    """One token i32[B] of each row's survivors, with probability proportional to its weight (inverse CDF), and
    the peak f32[B].

    Args:
      logits: f32[B, V].
      temperature: f32[B], above 0.
      filters: of [B].
      keys: typed threefry keys [B], used for nothing else.
      rows_at_once: how many rows that do not end within the head are treated together: 1 stays in the
        cache of a CPU core, B makes the fewest launches on an accelerator. It does not change the result.
    """
    head = _head(logits, temperature)
    # Rows that need the head alone: it has the total that top_p refers to, and the end.
    ends_by_min_p = (filters.top_p >= 1) & (head.weights[:, -1] < filters.min_p)
    is_open = (filters.top_k > head.values.shape[1]) & ~ends_by_min_p

    def draw_head(head: _Head, keep: Array, keys: Array) -> Array:
        chosen = _pick(jnp.where(keep, head.weights, 0), _uniforms(keys)[:, 0])
        return jnp.take_along_axis(head.ids, chosen[:, None], axis=1)[:, 0]

    def draw_open(logits: Array, temperature: Array, filters: Filters, keys: Array, head: _Head) -> Array:
        weights = scaled_weights(logits, temperature)

        def apply_top_k() -> Array:
            cut = _search(logits, jnp.ones_like(weights), filters.top_k.astype(jnp.float32))
            return jnp.where(keep_mask(logits, cut), weights, 0)

        weights = lax.cond(jnp.any(filters.top_k < logits.shape[1]), apply_top_k, lambda: weights)
        total = jnp.sum(weights, axis=-1)
        keep = _head_keep(head, filters, total)
        tokens = draw_head(head, keep, keys)
        return _draw_by_rejection(logits, weights, filters, total, keys, tokens, pending=keep[:, -1])

    tokens = draw_head(head, _head_keep(head, filters, _head_mass(head, filters)), keys)
    arguments = (logits, temperature, filters, keys, head)
    tokens = _for_open_rows(is_open, rows_at_once, tokens, draw_open, arguments)
    # A maximum of what is sorted: with its first entry XLA:CPU sees no top_k any more, and sorts (5 ms for 64 rows).
    return tokens, _peak(logits, jnp.max(head.values, axis=-1))


@struct.dataclass
class _Head:
    """The best tokens of each row, in order; W = min(HEAD, V)."""

    values: Array  # f32[B, W]
    ids: Array  # i32[B, W]
    weights: Array  # f32[B, W]


def _head(logits: Array, temperature: Array) -> _Head:
    values, ids = best_tokens(logits, min(HEAD, logits.shape[1]))
    return _Head(values, ids, scaled_weights(values, temperature))


def _head_mass(head: _Head, filters: Filters) -> Array:
    """f32[B]: the weight that top_k leaves, if it ends within the head."""
    in_k = jnp.arange(head.weights.shape[1]) < filters.top_k[:, None]
    return jnp.sum(jnp.where(in_k, head.weights, 0), axis=-1)


def _head_keep(head: _Head, filters: Filters, total: Array) -> Array:
    """bool[B, W]: which tokens of the head survive, given the weight f32[B] that top_k left."""
    order = jnp.arange(head.weights.shape[1])
    before = _running_sum(head.weights) - head.weights
    in_p = (before < (filters.top_p * total)[:, None]) | (filters.top_p >= 1)[:, None]
    keep = (order < filters.top_k[:, None]) & in_p & (head.weights >= filters.min_p[:, None])
    first_out = jnp.where(jnp.all(keep, axis=-1), keep.shape[1], jnp.argmin(keep, axis=-1))
    return order < jnp.maximum(first_out, 1)[:, None]


def _draw_by_rejection(
    logits: Array, weights: Array, filters: Filters, total: Array, keys: Array, tokens: Array, pending: Array
) -> Array:
    """Replaces tokens i32[B] where pending bool[B] by draws from the whole vocabulary that top_p accepts.

    A draw outside the nucleus proves that all after it are outside too, so the next draw stands before it.
    """
    eligible = jnp.where(weights >= filters.min_p[:, None], weights, 0)

    def body(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        tokens, pending, left, i = state
        uniforms = _uniforms(jax.vmap(jax.random.fold_in, (0, None))(keys, i))
        blocks = _blocks(left, BLOCK, padding=0)
        block = _pick(jnp.sum(blocks, axis=-1), uniforms[:, 0])
        inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
        drawn = block * BLOCK + _pick(inside, uniforms[:, 1])

        def test() -> tuple[Array, Array]:
            value = jnp.take_along_axis(logits, drawn[:, None], axis=1)[:, 0]
            before = keep_mask(logits, Cut(value, drawn - 1))
            mass_before = jnp.sum(jnp.where(before, weights, 0), axis=-1)
            # Written so that a row of NaN is accepted: it must not keep the loop going.
            outside = (mass_before >= filters.top_p * total) & (mass_before > 0) & (filters.top_p < 1)
            return ~outside, jnp.where(before, left, 0)

        to_test = jnp.any(pending & (filters.top_p < 1))
        accepted, left = lax.cond(to_test, test, lambda: (jnp.ones_like(pending), left))
        tokens = jnp.where(pending & accepted, drawn, tokens)
        return tokens, pending & ~accepted, left, i + 1

    first = (tokens, pending, eligible, jnp.int32(1))
    return lax.while_loop(lambda state: jnp.any(state[1]), body, first)[0]


def _for_open_rows(
    is_open: Array, at_once: int, results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Replaces the results (a tree of [B, ...]) of rows where is_open bool[B] by function(*arguments of the rows)."""
    at_once = min(at_once, is_open.shape[0])
    order = jnp.argsort(~is_open, stable=True)

    def body(state: tuple[Array, Any]) -> tuple[Array, Any]:
        i, results = state
        index = lax.dynamic_slice_in_dim(order, i, at_once)  # i32[at_once]; near the end some rows come twice

        def update(old: Array, new: Array) -> Array:
            return old.at[index].set(jnp.where(is_open[index], new, old[index]))

        new = function(*jax.tree.map(lambda x: x[index], arguments))
        return i + at_once, jax.tree.map(update, results, new)

    count = jnp.sum(is_open, dtype=jnp.int32)
    return lax.while_loop(lambda state: state[0] < count, body, (jnp.int32(0), results))[1]


def _pick(mass: Array, uniform: Array) -> Array:
    """i32[B]: where the running sum of mass f32[B, N] first exceeds uniform * total; its mass is not 0.

    Rounding of the sums can neither reach an index without mass nor run past the end.
    """
    n = mass.shape[1]
    running = _running_sum(mass)
    index = jnp.arange(n)
    reached = running > (uniform * running[:, -1])[:, None]
    # The first reached index with mass, else the last index with mass.
    rank = jnp.where(mass > 0, jnp.where(reached, 2 * n - index, index), -1)
    return jnp.argmax(rank, axis=-1).astype(jnp.int32)


def _running_sum(x: Array) -> Array:
    """f32[B, N]: inclusive sums along a row. jnp.cumsum took most of the time to compile a sampled step."""
    rows, n = x.shape
    groups = _blocks(x, FAN, padding=0)  # [B, ceil(N / FAN), FAN]
    inside = jnp.sum(jnp.where(jnp.tri(FAN, dtype=bool), groups[:, :, None, :], 0), axis=-1)
    earlier = jnp.tri(groups.shape[1], k=-1, dtype=bool)
    before = jnp.sum(jnp.where(earlier, inside[:, None, :, -1], 0), axis=-1)
    return (inside + before[:, :, None]).reshape(rows, -1)[:, :n]


def _uniforms(keys: Array) -> Array:
    """f32[B, 2] in [0, 1), 24 bits each: the two words of each key."""
    return (jax.random.key_data(keys) >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _blocks(x: Array, size: int, padding: float = -jnp.inf) -> Array:
    """f32[B, V] -> f32[B, ceil(V / size), size]."""
    rows, vocab = x.shape
    return jnp.pad(x, ((0, 0), (0, -vocab % size)), constant_values=padding).reshape(rows, -1, size)


def _peak(logits: Array, largest: Array) -> Array:
    """f32[B]: the largest logit of each row, infinity where one is NaN.

    XLA:CPU's maximum ignores NaN. A sum does not, and is vectorised over blocks: it takes a fraction of what a
    comparison of each logit does. Infinities of both signs make it NaN too; there the peak is infinite anyway.
    """
    total = jnp.sum(jnp.sum(_blocks(logits, BLOCK, padding=0), axis=-1), axis=-1)
    return jnp.where(jnp.isnan(total), jnp.inf, largest)


def _positive_zero(x: Array) -> Array:
    """-0.0 as 0.0: a comparison sees them equal, a sort does not."""
    return jnp.where(x == 0, 0.0, x)


def _search(logits: Array, mass: Array, needed: Array) -> Cut:
    """The first token, in order, at which the running sum of mass f32[B, V] reaches needed f32[B].

    Tokens with equal logits must have equal mass. If the sum stays below, the last token.
    """
    vocab = logits.shape[1]
    bits = lax.bitcast_convert_type(_positive_zero(logits), jnp.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # i32 that order as the floats do

    def body(i: Array, low: Array) -> Array:
        candidate = low ^ (jnp.int32(1) << (31 - i))  # upwards from the smallest i32
        reached = jnp.sum(jnp.where(keys >= candidate[:, None], mass, 0), axis=-1) >= needed
        return jnp.where(reached, candidate, low)

    key = lax.fori_loop(0, 32, body, jnp.full(logits.shape[:1], jnp.iinfo(jnp.int32).min, jnp.int32))
    key = jnp.maximum(key, jnp.min(keys, axis=-1))
    tied = keys == key[:, None]
    above = jnp.sum(jnp.where(keys > key[:, None], mass, 0), axis=-1)
    each = jnp.max(jnp.where(tied, mass, 0), axis=-1)
    n = jnp.clip(jnp.ceil((needed - above) / jnp.where(each > 0, each, 1)), 1, vocab)
    ids = jnp.arange(vocab, dtype=jnp.int32)

    def before_nth(i: Array, low: Array) -> Array:
        candidate = low + (jnp.int32(1) << (id_bits - 1 - i))
        count = jnp.sum(tied & (ids < candidate[:, None]), axis=-1)
        return jnp.where(count < n, candidate, low)

    id_bits = vocab.bit_length()
    last = lax.fori_loop(0, id_bits, before_nth, jnp.zeros(logits.shape[:1], jnp.int32))
    last = jnp.minimum(last, vocab - 1)
    return Cut(jnp.max(jnp.where(tied, logits, -jnp.inf), axis=-1), last)
