"""The shapes of a program's arguments: from the program, and from what all programs of an engine share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinfer import batch as batches
from jaxinfer import kv_cache as kv
from jaxinfer.kv_cache import KVCacheSpec
from jaxinfer.programs.buckets import Program
from jaxinfer.sampling import sample
from jaxinfer.sampling.penalties import build_extras
from jaxinfer.sampling.sample import SamplingBatch
from jaxinfer.step import NUM_END_IDS, DecodeLimits

PAGE_COPIES = 16  # page copies done by one call; more take several calls


@dataclass(frozen=True)
class ArgumentShapes:
    """Shapes of the arguments of every program of an engine.

    config: of the model.
    weights: of arrays or shapes; shapes are kept, with the place of arrays that are bound to one.
    sharding: where all other arguments lie; None leaves them to the default device.
    """

    config: Any
    weights: Any
    spec: KVCacheSpec
    max_num_seqs: int
    max_model_len: int
    sharding: jax.sharding.Sharding | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", jax.tree.map(_shape, self.weights))

    def of(self, program: Program) -> tuple[Any, ...]:
        """(weights, kv_cache, rows, batch, sampling_batch, limits) of `run_steps`, or (weights, hidden, index, targets)
        of `score`."""
        if program.kind == "score":
            hidden = jax.ShapeDtypeStruct((program.num_tokens, self.config.embed_dim), self.config.dtype)
            index = np.zeros(program.num_rows, np.int32)
            return self.weights, *self._placed((hidden, index, index))
        batch = batches.pack(
            [((0,), 0, [(1,) for _ in self.spec.kv_groups])],
            page_size=self.spec.page_size,
            num_tokens=program.num_tokens,
            num_rows=program.num_rows,
            pages_per_row=kv.pages_needed(self.max_model_len, self.spec.page_size),
            spare_row=self.max_num_seqs,
            max_q_len=1 if program.kind == "decode" else program.num_tokens,
            tile=program.tile,
        )
        limits = None
        if program.num_steps > 1:
            zeros: Any = np.zeros(program.num_rows, np.int32)
            end_ids: Any = np.zeros((program.num_rows, NUM_END_IDS), np.int32)
            limits = DecodeLimits(end_ids, zeros, zeros)
        sampling_batch = sampling_arguments(program, self.config.vocab_size)
        return self.weights, *self._placed((*self._state(), batch, sampling_batch, limits))

    def of_helpers(self) -> dict[Callable[..., Any], tuple[Any, ...]]:
        """The functions that run between steps, with the shapes of their arguments."""
        cache, rows = self._state()
        pages = tuple(np.zeros(PAGE_COPIES, np.int32) for _ in self.spec.kv_groups)
        tokens = np.zeros(self.max_model_len, np.int32)
        arguments: dict[Callable[..., Any], tuple[Any, ...]] = {
            kv.copy_pages: (cache, pages, pages),
            sample.set_row: (rows, np.int32(0), tokens, np.int32(0)),
        }
        return {function: self._placed(each) for function, each in arguments.items()}

    def _state(self) -> tuple[Any, Any]:
        """Shapes of cache and row state."""
        rows = partial(sample.init_row_state, self.max_num_seqs, self.max_model_len)
        return jax.eval_shape(partial(kv.init, self.spec)), jax.eval_shape(rows)

    def _placed(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding), tree)


def sampling_arguments(program: Program, vocab_size: int) -> SamplingBatch | None:
    """A SamplingBatch of the arrays that `program` takes; None for greedy rows that ask for nothing else."""
    if program.variant == "greedy" and not program.processor_args and not program.num_labels:
        return None
    rows = program.num_rows
    given = {key: np.zeros((rows, *shape), dtype) for key, dtype, shape in program.processor_args}
    batch = SamplingBatch.from_rows([], rows, vocab_size, given)
    if program.num_labels:
        labels: Any = np.zeros((rows, program.num_labels), np.int32)
        batch = replace(batch, label_ids=labels)
    if program.extras_shape is not None:
        batch = replace(batch, extras=build_extras([], rows, vocab_size, program.extras_shape))
    return batch


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """Of an array or a shape; with the place of an array that is bound to it, so that both lower to one program."""
    place = x.sharding if not isinstance(x, jax.Array) or x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
