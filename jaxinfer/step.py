"""The pure step, and what a program runs of it.

    step(config, weights, kv_cache, rows, batch) -> (StepOutput, KVCache, RowState)

`prefill[t,b]` runs it once over t tokens of b rows (decode rows may ride along); `decode[b,k]` runs it k times
over one token per row, inside one program. Both are `run_steps` with other static arguments. `score[t,s]`
finds logprobs of prompt tokens: it unembeds s of the t hidden states of a prefill, so that the logits of a
whole prompt never exist at once.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.batch import StepBatch, last_token_indices, next_decode
from jaxinfer.forward import forward
from jaxinfer.kv_cache import KVCache
from jaxinfer.models.spec import ModelConfig, ModelModule
from jaxinfer.programs.buckets import Program
from jaxinfer.programs.tiles import map_tiles
from jaxinfer.sampling import sample
from jaxinfer.sampling.sample import (
    LogitsProcessor,
    LogprobsMode,
    RowState,
    SampleOutput,
    SamplingBatch,
    Variant,
)

NUM_END_IDS = 8  # end ids per row that a multi-step decode can watch for


@struct.dataclass
class DecodeLimits:
    """Where a row ends inside a multi-step decode."""

    end_ids: jax.Array  # i32[B, NUM_END_IDS], padded with V (no token has it)
    end_from: jax.Array  # i32[B], first position at which an end id ends the row (min_tokens)
    last_position: jax.Array  # i32[B], position of the last token the row may draw


@struct.dataclass
class StepOutput:
    sampled: SampleOutput  # [k, B] arrays
    hidden: jax.Array | None  # [T, D] of a prefill: what `score` reads; None after a decode


def step(
    model: ModelModule,
    config: ModelConfig,
    weights: Any,
    kv_cache: KVCache,
    rows: RowState,
    batch: StepBatch,
    sampling_batch: SamplingBatch | None,
    *,
    variant: Variant = "greedy",
    num_logprobs: int | None = None,
    logprobs_mode: LogprobsMode = "raw",
    logits_processors: tuple[LogitsProcessor, ...] = (),
) -> tuple[StepOutput, KVCache, RowState]:
    """One forward over the batch and one drawn token per row that samples.

    Returns:
      StepOutput ([B] arrays; rows that do not sample hold values without meaning; hidden [T, D]), the cache
      with this step's K and V appended, and the row state with the drawn tokens recorded.
    """
    # A decode row's input id is what it drew last; it never visits the host. Other rows write nowhere.
    first = jnp.where(batch.from_row, batch.cu_q_lens[:-1], len(batch.token_ids))
    token_ids = batch.token_ids.at[first].set(rows.last_token[batch.row_ids], mode="drop")
    hidden, kv_cache = forward(model, config, weights, kv_cache, replace(batch, token_ids=token_ids))
    last = last_token_indices(batch)

    def draw(hidden, positions, row_ids, sampling_batch):
        return sample.sample(
            model.unembed(config, weights, hidden),  # f32[B, V]
            positions,
            rows,
            row_ids,
            sampling_batch,
            variant=variant,
            num_logprobs=num_logprobs,
            logprobs_mode=logprobs_mode,
            logprob_token_ids=None if sampling_batch is None else sampling_batch.label_ids,
            logits_processors=logits_processors,
            processor_params={} if sampling_batch is None else sampling_batch.processor_args,
        )

    arguments = hidden[last], batch.positions[last] + 1, batch.row_ids, sampling_batch
    output = map_tiles(draw, arguments, batch.tile, batch.distribution[2])
    rows = sample.record(rows, batch.row_ids, output.tokens, batch.samples)
    return StepOutput(output, hidden), kv_cache, rows


def score(
    model: ModelModule,
    config: ModelConfig,
    num_logprobs: int,
    tile: int | None,
    weights: Any,
    hidden: jax.Array,
    index: jax.Array,
    targets: jax.Array,
) -> SampleOutput:
    """How probable the model found prompt tokens: log-softmax of its logits in float32, no filter, no penalty.

    Args:
      num_logprobs: alternatives returned beside each token.
      tile: positions that are worked on together (see tiles.py); None for all.
      hidden: [T, D] of a prefill.
      index: i32[S], which of them to unembed.
      targets: i32[S], the prompt token after each.
    """

    def of(hidden, targets):
        logits = model.unembed(config, weights, hidden)  # f32[S, V]
        return sample.with_logprobs(targets, logits, num_logprobs)

    return map_tiles(of, (hidden[index], targets), tile, jnp.int32(len(index)))


def run_steps(
    model: ModelModule,
    config: ModelConfig,
    program: Program,
    logprobs_mode: LogprobsMode,
    logits_processors: tuple[LogitsProcessor, ...],
    weights: Any,
    kv_cache: KVCache,
    rows: RowState,
    batch: StepBatch,
    sampling_batch: SamplingBatch | None,
    limits: DecodeLimits | None,
) -> tuple[StepOutput, KVCache, RowState]:
    """`program.num_steps` steps; every array of the SampleOutput gains a leading axis k.

    A row that ends on the way draws on, but writes to the null page: what follows its end has no meaning.
    """
    one = partial(
        step,
        model,
        config,
        weights,
        variant=program.variant,
        num_logprobs=program.num_logprobs,
        logprobs_mode=logprobs_mode,
        logits_processors=logits_processors,
    )
    if program.num_steps == 1:
        output, kv_cache, rows = one(kv_cache, rows, batch, sampling_batch)
        sampled = jax.tree.map(lambda x: x[None], output.sampled)
        return StepOutput(sampled, output.hidden if program.kind == "prefill" else None), kv_cache, rows
    assert limits is not None

    def body(carry, _):
        kv_cache, rows, batch = carry
        output, kv_cache, rows = one(kv_cache, rows, batch, sampling_batch)
        sampled = output.sampled
        position = batch.positions + 1  # of the token just drawn
        ended = jnp.any(sampled.tokens[:, None] == limits.end_ids, axis=1) & (position >= limits.end_from)
        active = batch.samples & ~ended & (position < limits.last_position)
        batch = next_decode(replace(batch, samples=active), active, kv_cache.spec.page_size)
        return (kv_cache, rows, batch), sampled

    (kv_cache, rows, _), sampled = jax.lax.scan(body, (kv_cache, rows, batch), length=program.num_steps)
    return StepOutput(sampled, None), kv_cache, rows
