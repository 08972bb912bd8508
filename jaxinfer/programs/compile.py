"""Compiles the programs of an engine ahead of time, keeps them, and counts them."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinfer import batch as batches
from jaxinfer import kv_cache as kv
from jaxinfer.kv_cache import KVCache
from jaxinfer.models.spec import ModelModule
from jaxinfer.programs import saved_programs
from jaxinfer.programs.buckets import Program
from jaxinfer.programs.saved_programs import SavedPrograms
from jaxinfer.sampling.sample import LogitsProcessor, LogprobsMode, RowState, SamplingBatch
from jaxinfer.step import NUM_END_IDS, DecodeLimits, run_steps, score

logger = logging.getLogger(__name__)


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


class Programs:
    """Compiles programs ahead of time, keeps them, counts them, and says when one was missing.

    Helpers (small functions that run between steps) are kept too; `len` counts the programs of steps alone.
    """

    def __init__(
        self,
        model: ModelModule,
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
                    self._programs.pop(program, None)  # whoever asks next tries again
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

    def close(self) -> None:
        """Gives the executables back; whoever still holds one can go on with it."""
        with self._lock:
            self._programs.clear()
            self._helpers.clear()

    def compiled(self) -> dict[Program, Callable[..., Any]]:
        """The executables that are there by now."""
        return {program: future.result() for program, future in list(self._programs.items()) if future.done()}

    def helper(self, function: Callable, arguments: tuple) -> Callable[..., Any]:
        """The executable of a function that takes arrays of one shape each; it owns its first argument."""
        with self._lock:
            if function not in self._helpers:
                layouts = _layouts(arguments, lambda pages: pages)
                jitted = jax.jit(function, donate_argnums=0, **layouts)
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
        # Never with keep_unused: jax would keep the traced program, and the executable with it, for ever (0.12.0).
        if program.kind == "score":
            function: Any = partial(score, self._model, self._config, program.num_logprobs or 0, program.tile)
            return jax.jit(function)
        options = (program, self._logprobs_mode, self._logits_processors)
        function = partial(run_steps, self._model, self._config, *options)
        layouts = _layouts(arguments, lambda pages: (None, pages, None))
        return jax.jit(function, donate_argnums=(1, 2), **layouts)

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
