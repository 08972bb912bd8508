"""The pure step and the programs compiled from it.

    step(config, weights, kv_cache, rows, batch) -> (StepOutput, KVCache, RowState)

`prefill[t,b]` runs it once over t tokens of b rows (decode rows may ride along); `decode[b,k]` runs it k times
over one token per row, inside one program. Both are `run_steps` with other static arguments.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer import sampling
from jaxinfer.batch import StepBatch, last_token_indices, next_decode
from jaxinfer.kv_cache import KVCache
from jaxinfer.sampling import RowState, SampleOutput, SamplingBatch

logger = logging.getLogger(__name__)

NUM_END_IDS = 8  # end ids per row that a multi-step decode can watch for


@struct.dataclass
class DecodeLimits:
    """Where a row ends inside a multi-step decode."""

    end_ids: jax.Array  # i32[B, NUM_END_IDS], padded with V (no token has it)
    end_from: jax.Array  # i32[B], first position at which an end id ends the row (min_tokens)
    last_position: jax.Array  # i32[B], position of the last token the row may draw


@dataclass(frozen=True)
class Program:
    """The static part of one compiled program. num_tokens == num_rows for decode."""

    kind: str  # "prefill" | "decode"
    num_tokens: int  # T
    num_rows: int  # B
    num_steps: int = 1  # k
    variant: str = "greedy"  # of the sampler
    num_logprobs: int | None = None  # alternatives returned per token; None returns no logprobs

    def __str__(self) -> str:
        shape = (
            f"{self.num_tokens},{self.num_rows}"
            if self.kind == "prefill"
            else f"{self.num_rows},{self.num_steps}"
        )
        logprobs = "" if self.num_logprobs is None else f" logprobs={self.num_logprobs}"
        return f"{self.kind}[{shape}] {self.variant}{logprobs}"


def step(
    model: ModuleType,
    config: Any,
    weights: Any,
    kv_cache: KVCache,
    rows: RowState,
    batch: StepBatch,
    sampling_batch: SamplingBatch | None,
    *,
    variant: str = "greedy",
    num_logprobs: int | None = None,
    logprobs_mode: str = "raw",
) -> tuple[SampleOutput, KVCache, RowState]:
    """One forward over the batch and one drawn token per row that samples.

    Returns:
      SampleOutput ([B] arrays; rows that do not sample hold values without meaning), the cache with this step's
      K and V appended, and the row state with the drawn tokens recorded.
    """
    first = jnp.minimum(batch.cu_q_lens[:-1], len(batch.token_ids) - 1)
    # A decode row's input id is what it drew last; it never visits the host.
    drawn = rows.last_token[batch.row_ids]
    token_ids = batch.token_ids.at[first].set(jnp.where(batch.from_row, drawn, batch.token_ids[first]))
    hidden, kv_cache = model.forward(config, weights, kv_cache, replace(batch, token_ids=token_ids))
    last = last_token_indices(batch)
    logits = model.unembed(config, weights, hidden[last])  # f32[B, V]
    output = sampling.sample(
        logits,
        batch.positions[last] + 1,
        rows,
        batch.row_ids,
        sampling_batch,
        variant=variant,
        num_logprobs=num_logprobs,
        logprobs_mode=logprobs_mode,
    )
    rows = sampling.record(rows, batch.row_ids, output.tokens, batch.samples)
    return output, kv_cache, rows


def run_steps(
    model: ModuleType,
    config: Any,
    program: Program,
    logprobs_mode: str,
    weights: Any,
    kv_cache: KVCache,
    rows: RowState,
    batch: StepBatch,
    sampling_batch: SamplingBatch | None,
    limits: DecodeLimits | None,
) -> tuple[SampleOutput, KVCache, RowState]:
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
    )
    if program.num_steps == 1:
        output, kv_cache, rows = one(kv_cache, rows, batch, sampling_batch)
        return jax.tree.map(lambda x: x[None], output), kv_cache, rows
    assert limits is not None

    def body(carry, _):
        kv_cache, rows, batch = carry
        output, kv_cache, rows = one(kv_cache, rows, batch, sampling_batch)
        position = batch.positions + 1  # of the token just drawn
        ended = jnp.any(output.tokens[:, None] == limits.end_ids, axis=1) & (position >= limits.end_from)
        active = batch.samples & ~ended & (position < limits.last_position)
        batch = next_decode(replace(batch, samples=active), active, kv_cache.spec.page_size)
        return (kv_cache, rows, batch), output

    (kv_cache, rows, _), output = jax.lax.scan(body, (kv_cache, rows, batch), length=program.num_steps)
    return output, kv_cache, rows


class Programs:
    """Compiles programs ahead of time, keeps them, counts them, and says when one was missing.

    `arguments(program)` gives the abstract arguments (ShapeDtypeStructs, or arrays) of a program after
    the weights: (kv_cache, rows, batch, sampling_batch, limits).
    """

    def __init__(
        self,
        model: ModuleType,
        config: Any,
        weights: Any,
        arguments: Callable[[Program], tuple],
        *,
        logprobs_mode: str = "raw",
        matmul_precision: str | None = None,
        strict: bool = False,
    ) -> None:
        self._model, self._config, self._weights = model, config, weights
        self._arguments, self._logprobs_mode = arguments, logprobs_mode
        self._precision, self._strict = matmul_precision, strict
        self._compiled: dict[Program, Any] = {}
        self._lock = threading.Lock()
        self.warm = False  # set once all declared programs are compiled
        self.compile_seconds = 0.0

    def __len__(self) -> int:
        return len(self._compiled)

    def __contains__(self, program: Program) -> bool:
        return program in self._compiled

    def compile(self, program: Program) -> Any:
        """The executable of `program`; compiled if it is not there yet.

        Raises:
          RuntimeError: the engine is warm and strict.
        """
        with self._lock:
            if program in self._compiled:
                return self._compiled[program]
            if self.warm:
                message = f"program {program} was not among those compiled at warm-up"
                if self._strict:
                    raise RuntimeError(f"{message}, and strict_compile=True forbids to compile it now")
                logger.warning("%s; compiling it now", message)
            start = time.perf_counter()
            run = partial(run_steps, self._model, self._config, program, self._logprobs_mode)
            with jax.default_matmul_precision(self._precision or "default"):
                lowered = jax.jit(run, donate_argnums=(1, 2)).lower(self._weights, *self._arguments(program))
                self._compiled[program] = lowered.compile()
            seconds = time.perf_counter() - start
            self.compile_seconds += seconds
            logger.info("compiled %s in %.2f s", program, seconds)
            return self._compiled[program]
