"""Compiles the programs of an engine ahead of time, keeps them, and counts them."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax

from jaxinfer import kv_cache as kv
from jaxinfer.kv_cache import KVCache
from jaxinfer.models.spec import ModelModule
from jaxinfer.programs import saved_programs, slow_compile
from jaxinfer.programs.arguments import ArgumentShapes
from jaxinfer.programs.buckets import Program
from jaxinfer.programs.saved_programs import SavedPrograms
from jaxinfer.programs.settings import own_settings
from jaxinfer.sampling.sample import LogitsProcessor, LogprobsMode
from jaxinfer.step import run_steps, score
from jaxinfer.weights import quantization

logger = logging.getLogger(__name__)


class Programs:
    """Compiles programs ahead of time, keeps them, counts them, and says when one was missing.

    Helpers (small functions that run between steps) are kept too; `len` counts the programs of steps alone.
    """

    def __init__(
        self,
        model: ModelModule,
        shapes: ArgumentShapes,
        *,
        logprobs_mode: LogprobsMode = "raw",
        logits_processors: tuple[LogitsProcessor, ...] = (),
        matmul_precision: str | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        strict: bool = False,
        saved: SavedPrograms | None = None,
    ) -> None:
        self.model, self.shapes, self.strict = model, shapes, strict
        self.logits_processors, self._logprobs_mode = logits_processors, logprobs_mode
        self._precision, self._saved = matmul_precision, saved
        self._compiler_options = dict(compiler_options or {})
        self._programs: dict[Program, Future[Callable[..., Any]]] = {}  # done, or under way on some thread
        self._lowered: dict[Program, Any] = {}  # traced, and not yet compiled
        self._helpers: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self.warm = False  # set once all programs of the buckets are compiled
        self.compile_seconds = 0.0  # of all threads together

    def __len__(self) -> int:
        return len(self.compiled())

    def get(self, program: Program) -> Callable[..., Any]:
        """The executable of `program`, which is loaded or compiled if it is not there yet; all who ask wait for one.

        It takes the arguments whose shapes `shapes.of` tells.

        Raises:
          RuntimeError: the engine is warm and strict, and `program` is none of its buckets.
          ValueError: a saved program was compiled from other settings.
        """
        with self._lock:
            known = self._programs.get(program)
            if known is None:
                if self.warm:
                    self._late(program)
                future = self._programs[program] = Future()
        if known is not None:
            return known.result()
        try:
            executable = self._load(program) or self._compile(str(program), self._lower(program))
        except BaseException as error:
            with self._lock:
                self._programs.pop(program, None)  # whoever asks next tries again
            future.set_exception(error)
            raise
        future.set_result(executable)
        return executable

    def trace(self, program: Program) -> None:
        """Traces and lowers `program` here and now, unless it may be saved: `get` then has only to compile it."""
        if self._saved is None:
            self._lowered[program] = self._lower(program)

    def check_saved(self, programs: Iterable[Program]) -> None:
        """Raises ValueError if one of these was saved from other settings."""
        for program in programs if self._saved is not None else ():
            assert self._saved is not None
            self._saved.check(str(program), self.identity(program))

    @property
    def under_way(self) -> bool:
        """Whether a program is compiled or loaded at this moment, on any thread."""
        return any(not future.done() for future in list(self._programs.values()))

    def close(self) -> None:
        """Gives the executables back; whoever still holds one can go on with it."""
        with self._lock:
            self._programs.clear()
            self._lowered.clear()
            self._helpers.clear()

    def compiled(self) -> dict[Program, Callable[..., Any]]:
        """The executables that are there by now."""
        return {program: future.result() for program, future in list(self._programs.items()) if future.done()}

    def helper(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The executable of a function that runs between steps (`shapes.of_helpers`); it owns its first argument."""
        with self._lock:
            if function not in self._helpers:
                self._helpers[function] = self._make_helper(function)
            return self._helpers[function]

    def identity(self, program: Program) -> str:
        """A hash of all that `program` is compiled from, logits processors left out."""
        options: tuple[Any, ...] = (
            self.model.__name__,
            self.shapes.config,
            program,
            self._precision,
            self._logprobs_mode,
        )
        options += (self._compiler_options,)
        with own_settings():
            return saved_programs.identity(*options, self.shapes.of(program))

    def helper_identity(self, function: Callable[..., Any]) -> str:
        """Likewise of a helper."""
        with own_settings():
            return saved_programs.identity(function.__name__, self.shapes.of_helpers()[function])

    @property
    def num_helpers(self) -> int:
        return len(self._helpers)

    def _make_helper(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name, arguments = function.__name__, self.shapes.of_helpers()[function]
        jitted = jax.jit(function, donate_argnums=0, **_layouts(arguments, lambda pages: pages))
        with own_settings():
            identity = self.helper_identity(function)
            loaded = self._saved and self._saved.load(name, identity, jitted, arguments)
            return loaded or self._compile(name, (jitted.lower(*arguments), 0.0))

    def _load(self, program: Program) -> Callable[..., Any] | None:
        if self._saved is None:
            return None
        with own_settings():
            arguments = self.shapes.of(program)
            identity = self.identity(program)
            return self._saved.load(str(program), identity, self._jit(program, arguments), arguments)

    def _lower(self, program: Program) -> tuple[Any, float]:
        """The lowered program, and the seconds that it took."""
        if (lowered := self._lowered.pop(program, None)) is not None:
            return lowered
        start = time.perf_counter()
        with own_settings(), jax.default_matmul_precision(self._precision or "default"):
            arguments = self.shapes.of(program)
            lowered = self._jit(program, arguments).lower(*arguments)
        return lowered, time.perf_counter() - start

    def _compile(self, name: str, lowered: tuple[Any, float]) -> Callable[..., Any]:
        computation, seconds = lowered
        start = time.perf_counter()
        with own_settings(), slow_compile.said(name):
            compiled = computation.compile(compiler_options=self._compiler_options)
        seconds += time.perf_counter() - start
        self.compile_seconds += seconds
        logger.info("compiled %s in %.2f s", name, seconds)
        return compiled

    def _jit(self, program: Program, arguments: tuple[Any, ...]) -> Any:
        # Never with keep_unused: jax would keep the traced program, and the executable with it, for ever (0.12.0).
        model, config = self.model, self.shapes.config
        if program.kind == "score":
            function: Any = partial(score, model, config, program.num_logprobs or 0, program.tile)
            return jax.jit(function, **_layouts(arguments))
        function = partial(run_steps, model, config, program, self._logprobs_mode, self.logits_processors)
        layouts = _layouts(arguments, lambda pages: (None, pages, None))
        return jax.jit(function, donate_argnums=(1, 2), **layouts)

    def _late(self, program: Program) -> None:
        message = f"program {program} was not among those compiled at warm-up"
        if self.strict:
            raise RuntimeError(f"{message}, and strict_compile=True forbids to compile it now")
        logger.warning("%s; compiling it now", message)


def _layouts(
    arguments: tuple[Any, ...], results: Callable[[Any], Any] = lambda pages: None
) -> dict[str, Any]:
    """Options of jax.jit with which pages and weights among `arguments` lie as their kernels read them.

    results: the format of pages -> what the function returns, the format where the cache stands and else None.
    """
    pages = [
        kv.page_format(x.spec, x.pages[0].sharding) if isinstance(x, KVCache) else None for x in arguments
    ]
    formats = [
        weights_format if of_pages is None else of_pages
        for of_pages, weights_format in zip(pages, map(quantization.formats, arguments), strict=True)
    ]
    options: dict[str, Any] = {}
    if any(format_ is not None for format_ in formats):
        options["in_shardings"] = tuple(formats)
    found = next((format_ for format_ in pages if format_ is not None), None)
    return options if found is None else options | {"out_shardings": results(found)}
