"""The pure step and the programs compiled from it.

    step(config, weights, kv_cache, rows, batch) -> (StepOutput, KVCache, RowState)

`prefill[t,b]` runs it once over t tokens of b rows (decode rows may ride along); `decode[b,k]` runs it k times
over one token per row, inside one program. Both are `run_steps` with other static arguments. `score[t,s]`
finds logprobs of prompt tokens: it unembeds s of the t hidden states of a prefill, so that the logits of a
whole prompt never exist at once.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxinfer import batch as batches
from jaxinfer import kv_cache as kv
from jaxinfer.batch import StepBatch, last_token_indices, next_decode
from jaxinfer.kv_cache import KVCache
from jaxinfer.programs import saved_programs
from jaxinfer.programs.saved_programs import SavedPrograms
from jaxinfer.sampling import sample
from jaxinfer.sampling.logits_processors import Signature
from jaxinfer.sampling.sample import (
    LogitsProcessor,
    LogprobsMode,
    RowState,
    SampleOutput,
    SamplingBatch,
    Variant,
)
from jaxinfer.scheduler import SchedulerConfig
from jaxinfer.tiles import map_tiles

logger = logging.getLogger(__name__)

SCORE_POSITIONS = 64  # prompt positions that one score program unembeds
MAX_SHAPES = 8  # of the default buckets
SINGLE_PROMPT = 128  # tokens of a prompt that has a program of one row, on CPU
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

    kind: str  # "prefill" | "decode" | "score"
    num_tokens: int  # T
    num_rows: int  # B; positions at once of "score"
    num_steps: int = 1  # k
    variant: Variant = "greedy"  # of the sampler
    num_logprobs: int | None = None  # alternatives returned per token; None returns no logprobs
    extras_shape: tuple[int, int, int, int] | None = (
        None  # lengths of the lists in Extras, for variant "full"
    )
    num_labels: int = 0  # logprob_token_ids per row
    processor_args: Signature = ()  # what requests hand to logits processors
    tile: int | None = None  # tokens worked on together, for batch invariance (see tiles.py); None: all

    def __str__(self) -> str:
        shape = (self.num_rows, self.num_steps) if self.kind == "decode" else (self.num_tokens, self.num_rows)
        logprobs = "" if self.num_logprobs is None else f" logprobs={self.num_logprobs}"
        logprobs += f" labels={self.num_labels}" if self.num_labels else ""
        variant = "" if self.kind == "score" else f" {self.variant}"
        tile = "" if self.tile is None else f" tile={self.tile}"
        return f"{self.kind}[{shape[0]},{shape[1]}]{variant}{logprobs}{tile}"


@dataclass(frozen=True)
class Buckets:
    """The shapes that programs are compiled for; a step takes the smallest that holds it."""

    prefill: tuple[tuple[int, int], ...]  # (T, B), cheapest first
    decode: tuple[int, ...]  # B of the programs that take one step, ascending
    decode_steps: int  # k
    multi_step: tuple[int, ...]  # B of those that take k steps, ascending; unused if k is 1
    variants: tuple[Variant, ...] = ("greedy", "sample")  # compiled at warm-up
    prompt_logprobs: tuple[
        int, ...
    ] = ()  # their score programs, likewise: 0, or MAX_LOGPROBS for all up to it
    tile: int | None = None  # of the programs

    @staticmethod
    def default(
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_steps: int,
        platform: str,
        tile: int | None = None,
    ) -> "Buckets":
        """A lattice of at most 8 shapes, each for greedy and for sampled rows: at most 16 programs.

        With R = max_num_seqs and T = max_num_batched_tokens:
          CPU: decode 8, 3R/8, 5R/8 and R rows, and k steps at once for 1 row alone: it rarely takes one. A step's
            time grows with its rows, so row counts are close; the host costs little beside a step of many rows. One
            program serves greedy and sampled rows: a branch costs nothing, and a loaded program costs time and memory.
            A prompt of up to 128 tokens that comes alone has a program of one row: it is loaded in half the time of
            one with R rows, and unembeds one row.
          elsewhere: decode 8, 64 (256 if R is over 256) and R rows, each with k steps at once: rows are nearly
            free. A branch makes a device wait for the host, so greedy rows have their own programs.
          prefill T, T/4, T/16 ... tokens (at least 32) of up to R rows, as many as there is room for.
        So R = 64, T = 512, k = 8 has decode[8,1] [24,1] [40,1] [64,1] [1,8] and prefill[128,1] [128,64] [512,64] on
        CPU: 8 programs; elsewhere decode[8,1] [64,1] [8,8] [64,8] and prefill[32,32] [128,64] [512,64].
        With a tile: decode R, k steps for 1 row, prefill T. The work of a step is its live tiles, whatever its bucket.
        """
        most = max_num_seqs
        variants: tuple[Variant, ...] = ("any",) if platform == "cpu" else ("greedy", "sample")
        if tile is not None:
            widest = (max_num_batched_tokens, min(max_num_batched_tokens, most))
            return Buckets((widest,), (most,), decode_steps, multi_step=(1,), variants=variants, tile=tile)
        if platform == "cpu":
            rows = [1] * (decode_steps == 1) + [8, 3 * most // 8, 5 * most // 8]
        else:
            rows = [8, 64 if most <= 256 else 256]
        decode = tuple(sorted({b for b in rows if 0 < b < most} | {most}))
        multi_step = (1,) if platform == "cpu" else decode
        num_decode = len(decode) + (decode_steps > 1) * len(multi_step)
        single = platform == "cpu"  # one more prefill
        widths = [max_num_batched_tokens // 4**i for i in range(MAX_SHAPES - num_decode - single)]
        prefill = {(t, min(t, most)) for t in widths if t >= 32 or t == widths[0]}
        if single:
            prefill.add((min(SINGLE_PROMPT, max_num_batched_tokens), 1))
        return Buckets(
            prefill=tuple(sorted(prefill)),
            decode=decode,
            decode_steps=decode_steps,
            multi_step=multi_step,
            variants=variants,
        )

    @property
    def max_multi_step_rows(self) -> int:
        """Rows that may take k steps at once."""
        return max(self.multi_step, default=0)

    def check(self, scheduler: SchedulerConfig) -> None:
        """Raises ValueError, with the numbers, if a step of such a scheduler would find no bucket."""
        rows, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        if self.decode_steps != scheduler.decode_steps:
            raise ValueError(
                f"buckets have decode_steps={self.decode_steps}, the scheduler {scheduler.decode_steps}: "
                "they must be equal"
            )
        if not any(t >= tokens and b >= rows for t, b in self.prefill):
            raise ValueError(
                f"no prefill bucket of {self.prefill} holds max_num_batched_tokens={tokens} and "
                f"max_num_seqs={rows}: add ({tokens}, {rows})"
            )
        if max(self.decode, default=0) < rows:
            raise ValueError(f"no decode bucket of {self.decode} holds max_num_seqs={rows}: add {rows}")
        multi = min(rows, scheduler.max_multi_step_rows or rows)
        if self.decode_steps > 1 and multi > self.max_multi_step_rows:
            raise ValueError(
                f"{multi} rows may take decode_steps={self.decode_steps} steps at once, and no bucket of "
                f"multi_step={self.multi_step} holds them"
            )
        unknown = set(self.variants) - {"greedy", "sample", "any"}
        if unknown:
            raise ValueError(
                f"buckets have variants {sorted(unknown)}; warm-up compiles 'greedy', 'sample' or 'any'"
            )

    def programs(self) -> list[Program]:
        """All programs that warm-up compiles, the ones needed first at the front."""
        shapes = [("prefill", t, b, 1) for t, b in self.prefill]
        shapes += [("decode", b, b, 1) for b in self.decode]
        if self.decode_steps > 1:
            shapes += [("decode", b, b, self.decode_steps) for b in self.multi_step]
        programs = [
            Program(kind, t, b, k, variant, tile=self.tile)
            for variant in self.variants
            for kind, t, b, k in shapes
        ]
        widths = dict.fromkeys(t for t, _ in self.prefill)
        return programs + [score_program(t, k, self.tile) for k in self.prompt_logprobs for t in widths]

    def variant(self, needed: Variant) -> Variant:
        """The variant whose programs run rows that need `needed`."""
        return "any" if needed != "full" and "any" in self.variants else needed

    def first_programs(self) -> list[Program]:
        """Those that one short prompt needs: its prefill, and then k steps at once, in the first variant."""
        k, variant = self.decode_steps, self.variants[0]
        return [
            Program("prefill", *self.prefill[0], 1, variant, tile=self.tile),
            Program(*self.shape(1, 1, k), k, variant, tile=self.tile),
        ]

    def shape(
        self, num_tokens: int, num_rows: int, num_steps: int, scores_prompt: bool = False
    ) -> tuple[str, int, int]:
        """(kind, T, B) of the smallest bucket for a step; prompts are scored by prefills alone.

        Raises:
          ValueError: there is none.
        """
        if num_tokens == num_rows and not scores_prompt:
            for b in self.decode if num_steps == 1 else self.multi_step:
                if num_rows <= b:
                    return "decode", b, b
        else:
            for t, b in self.prefill:
                if num_tokens <= t and num_rows <= b:
                    return "prefill", t, b
        raise ValueError(f"no bucket holds {num_tokens} tokens of {num_rows} rows, {num_steps} steps: {self}")


def example_arguments(
    program: Program,
    model_config: Any,
    weights: Any,
    kv_cache: KVCache,
    rows: RowState,
    sampling_batch: SamplingBatch | None,
) -> tuple:
    """Arguments of the shapes that `program` takes, for compiling it: the batch holds one token of one row.

    Args:
      weights, kv_cache, rows: as the engine has them, or their shapes (`jax.ShapeDtypeStruct` leaves).
      sampling_batch: of `program.num_rows` rows; None for greedy programs.
    """
    if program.kind == "score":
        hidden = jax.ShapeDtypeStruct((program.num_tokens, model_config.embed_dim), model_config.dtype)
        index = np.zeros(program.num_rows, np.int32)
        return weights, hidden, index, index
    num_rows, max_model_len = rows.token_ids.shape
    batch = batches.pack(
        [((0,), 0, (1,))],
        page_size=kv_cache.spec.page_size,
        num_tokens=program.num_tokens,
        num_rows=program.num_rows,
        pages_per_row=kv.pages_needed(max_model_len, kv_cache.spec.page_size),
        spare_row=num_rows - 1,
        max_q_len=1 if program.kind == "decode" else program.num_tokens,
        tile=program.tile,
    )
    limits = None
    if program.num_steps > 1:
        zeros = np.zeros(program.num_rows, np.int32)
        limits = DecodeLimits(np.zeros((program.num_rows, NUM_END_IDS), np.int32), zeros, zeros)  # type: ignore[arg-type]
    return weights, kv_cache, rows, batch, sampling_batch, limits


def score_program(num_tokens: int, num_logprobs: int, tile: int | None = None) -> Program:
    """The program that scores prompt tokens after a prefill of `num_tokens`."""
    num_positions = min(num_tokens, SCORE_POSITIONS)
    return Program("score", num_tokens, num_positions, num_logprobs=num_logprobs, tile=tile)


@struct.dataclass
class StepOutput:
    sampled: SampleOutput  # [k, B] arrays
    hidden: jax.Array | None  # [T, D] of a prefill: what `score` reads; None after a decode


def step(
    model: ModuleType,
    config: Any,
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
    hidden, kv_cache = model.forward(config, weights, kv_cache, replace(batch, token_ids=token_ids))
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

    output = batch.per_row(draw, hidden[last], batch.positions[last] + 1, batch.row_ids, sampling_batch)
    rows = sample.record(rows, batch.row_ids, output.tokens, batch.samples)
    return StepOutput(output, hidden), kv_cache, rows


def score(
    model: ModuleType,
    config: Any,
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
    model: ModuleType,
    config: Any,
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


class Programs:
    """Compiles programs ahead of time, keeps them, counts them, and says when one was missing.

    Helpers (small functions that run between steps) are kept too; `len` counts the programs of steps alone.
    """

    def __init__(
        self,
        model: ModuleType,
        config: Any,
        *,
        logprobs_mode: LogprobsMode = "raw",
        logits_processors: tuple[LogitsProcessor, ...] = (),
        matmul_precision: str | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        strict: bool = False,
        saved: SavedPrograms | None = None,
    ) -> None:
        self._model, self._config, self._saved = model, config, saved
        self._logprobs_mode, self._logits_processors = logprobs_mode, logits_processors
        self._precision, self._strict = matmul_precision, strict
        self._compiler_options = dict(compiler_options or {})
        self._programs: dict[Program, Future[Callable[..., Any]]] = {}  # done, or under way on some thread
        self._helpers: dict[Callable, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self.warm = False  # set once all programs of the buckets are compiled
        self.compile_seconds = 0.0

    def __len__(self) -> int:
        return len(self.compiled())

    def get(self, program: Program, arguments: tuple) -> Callable[..., Any]:
        """The executable of `program`, loaded or compiled for `arguments` if it is not there yet.

        Args:
          program: what to compile.
          arguments: (weights, kv_cache, rows, batch, sampling_batch, limits) of `run_steps`, or
            (weights, hidden, index, targets) of `score`; arrays or their shapes.

        Raises:
          RuntimeError: the engine is warm and strict, and `program` is none of its buckets.
          ValueError: a saved program was compiled from other settings.
        """
        return self.begin(program, arguments)()

    def begin(self, program: Program, arguments: tuple) -> Callable[[], Callable[..., Any]]:
        """The first half of `get`: traces and lowers `program`, which takes the interpreter.

        Returns:
          the second half, which compiles or loads it and leaves the interpreter to others: to be called once, on any
          thread, since whoever asks for the program waits for it.
        """
        with self._lock:
            known = self._programs.get(program)
            if known is None:
                if self.warm:
                    self._late(program)
                future = self._programs[program] = Future()
        if known is not None:
            return known.result

        def half(function: Callable[..., Any], *args: Any) -> Any:
            try:
                return function(*args)
            except BaseException as error:
                with self._lock:
                    del self._programs[program]  # whoever asks next tries again
                future.set_exception(error)
                raise

        def lower() -> Callable[[], Callable[..., Any]]:
            identity = self.identity(program, arguments)
            return self._lower(str(program), self._jit(program, arguments), arguments, identity)

        compile_ = half(lower)

        def finish() -> Callable[..., Any]:
            future.set_result(half(compile_))
            return future.result()

        return finish

    def compiled(self) -> dict[Program, Callable[..., Any]]:
        """The executables that are there by now."""
        return {program: future.result() for program, future in list(self._programs.items()) if future.done()}

    def helper(self, function: Callable, arguments: tuple) -> Callable[..., Any]:
        """The executable of a function that takes arrays of one shape each; it owns its first argument."""
        with self._lock:
            if function not in self._helpers:
                layouts = _layouts(arguments, lambda pages: pages)
                jitted = jax.jit(function, donate_argnums=0, keep_unused=True, **layouts)
                identity = saved_programs.identity(function.__name__, arguments)
                self._helpers[function] = self._lower(function.__name__, jitted, arguments, identity)()
            return self._helpers[function]

    def identity(self, program: Program, arguments: tuple) -> str:
        """A hash of all that `program` is compiled from, logits processors left out."""
        options: tuple = self._model.__name__, self._config, program, self._precision, self._logprobs_mode
        options += (self._compiler_options,)
        return saved_programs.identity(*options, arguments)

    @property
    def num_helpers(self) -> int:
        return len(self._helpers)

    def _lower(
        self, name: str, jitted: Any, arguments: tuple, identity: str
    ) -> Callable[[], Callable[..., Any]]:
        """What then makes the executable."""
        loaded = self._saved and self._saved.load(name, identity, jitted, arguments)
        if loaded:
            return lambda: loaded
        start = time.perf_counter()
        with jax.default_matmul_precision(self._precision or "default"):
            lowered = jitted.lower(*arguments)
        return partial(self._compile, name, lowered, time.perf_counter() - start)

    def _compile(self, name: str, lowered: Any, seconds: float) -> Callable[..., Any]:
        """Adds the `seconds` that it took to be lowered to those that it takes here."""
        start = time.perf_counter()
        compiled = lowered.compile(compiler_options=self._compiler_options)
        seconds += time.perf_counter() - start
        self.compile_seconds += seconds  # of all threads together
        logger.info("compiled %s in %.2f s", name, seconds)
        return compiled

    def _jit(self, program: Program, arguments: tuple) -> Any:
        # keep_unused: an executable takes all leaves of its arguments, which is how a saved one is called.
        if program.kind == "score":
            function: Any = partial(score, self._model, self._config, program.num_logprobs or 0, program.tile)
            return jax.jit(function, keep_unused=True)
        options = (program, self._logprobs_mode, self._logits_processors)
        function = partial(run_steps, self._model, self._config, *options)
        layouts = _layouts(arguments, lambda pages: (None, pages, None))
        return jax.jit(function, donate_argnums=(1, 2), keep_unused=True, **layouts)

    def _late(self, program: Program) -> None:
        message = f"program {program} was not among those compiled at warm-up"
        if self._strict:
            raise RuntimeError(f"{message}, and strict_compile=True forbids to compile it now")
        logger.warning("%s; compiling it now", message)


def _layouts(arguments: tuple, results: Callable[[Any], Any]) -> dict[str, Any]:
    """Options of jax.jit with which a cache among `arguments` keeps the layout that its kernels read.

    results: the format of pages -> what the function returns, the format where the cache stands and else None.
    """
    formats = [
        kv.page_format(x.spec, x.pages[0].sharding) if isinstance(x, KVCache) else None for x in arguments
    ]
    found = next((format_ for format_ in formats if format_ is not None), None)
    return {} if found is None else {"in_shardings": tuple(formats), "out_shardings": results(found)}
