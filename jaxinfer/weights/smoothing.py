"""Channels of activations made alike before they become int8, the difference moved into weights.

A few channels of a language model are much larger than the others, for every token (arXiv:2208.07339), and one scale
per token is then that of those few. Dividing a channel by a factor, and multiplying by it the weights that read the
channel, changes nothing but the rounding (SmoothQuant, arXiv:2211.10438); the division is a factor on the norm or the
matrix that writes the channel, so it costs nothing in a step. Which channels are large is seen on tokens that the model
itself draws (as LLM-QAT, arXiv:2305.17888): no data is needed, and equal weights get equal factors.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import batch as batches
from jaxinfer import kv_cache as kv
from jaxinfer.batch import StepBatch
from jaxinfer.checkpoints.loading import named_leaves
from jaxinfer.forward import run_layer
from jaxinfer.models import spec
from jaxinfer.models.rope import rope_table
from jaxinfer.models.spec import LayerSpec, ModelModule
from jaxinfer.pallas_kernels.dense_matmul import dense_matmul
from jaxinfer.weights import quantization

ROWS, STEPS = 32, 24  # sequences that are drawn, and their tokens
FLOOR = 1e-2  # a channel counts as at least this part of the mean one: it was not seen at its largest


class Factors(NamedTuple):
    """What a leaf is multiplied by: f32[D] along its inputs, f32[F] along its outputs; None: nothing."""

    inputs: jax.Array | None = None
    outputs: jax.Array | None = None


def factors(module: ModelModule, config: Any, weights: Any) -> dict[str, Factors]:
    """Leaf name -> its factors, for the groups of the model file's leaves (`Leaf.reads`).

    The factor of a channel is SmoothQuant's for both sides alike, the root of its size over that of the largest weight
    that reads it, but for its size: the root mean square over tokens, which changes less from one text to another than
    the largest value does.
    """
    groups = _groups(module, weights)
    sizes = _sizes(module, config, weights, [readers[0] for readers in groups.values()])
    found: dict[str, Factors] = {}
    for (i, layer), (writer, readers) in itertools.product(enumerate(weights.layers), groups.items()):
        size = sizes[i][readers[0]]
        peaks = [jnp.abs(getattr(layer, name).reshape(-1, size.size)).max(axis=0) for name in readers]
        weight = np.max(np.asarray(peaks, np.float64), axis=0)
        log_factor = np.log(_floored(size) / _floored(weight)) / 2
        factor = np.exp(log_factor - log_factor.mean()).astype(np.float32)
        for name in (f"layers.{i}.{reader}" for reader in readers):
            found[name] = found.get(name, Factors())._replace(inputs=jnp.asarray(factor))
        name = f"layers.{i}.{writer}"
        found[name] = found.get(name, Factors())._replace(outputs=jnp.asarray(1 / factor))
    return found


def _groups(module: ModelModule, weights: Any) -> dict[str, tuple[str, ...]]:
    """`smoothing_groups` of which all layers have the writer and its readers, and the writer adds no bias."""

    def have(name: str) -> bool:
        return all(getattr(layer, name, None) is not None for layer in weights.layers)

    groups = spec.smoothing_groups(module.LEAVES)
    return {
        writer: readers
        for writer, readers in groups.items()
        if all(map(have, (writer, *readers))) and not have(writer.removesuffix("_proj") + "_bias")
    }


def _floored(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, FLOOR * x.mean() or 1.0)


class _Recorded:
    """A matrix in a layer that is traced: it multiplies as ever, and keeps the sum of squares of what it multiplied."""

    def __init__(self, matrix: jax.Array) -> None:
        self.shape, self._matrix = matrix.shape, matrix
        self.squares: jax.Array | None = None  # f32[D]

    def plain(self, num_rows: int) -> None:
        return None

    def matmul(self, x: jax.Array, out_dtype: jax.typing.DTypeLike) -> jax.Array:
        self.squares = jnp.square(x.astype(jnp.float32)).sum(axis=0)
        matrix = self._matrix.reshape(-1, x.shape[1])
        return dense_matmul(x, matrix, out_dtype=out_dtype, implementation="xla")


def _sizes(
    module: ModelModule, config: Any, weights: Any, readers: Sequence[str]
) -> list[dict[str, np.ndarray]]:
    """Per layer, of what each of these matrices is multiplied by: float64[D], root mean squares over tokens it draws.

    Layer after layer is run, each in one compiled function of its own, which also returns what the matrices recorded.
    """
    steps = min(STEPS, config.max_position_embeddings)
    cache_spec = kv.KVCacheSpec(1, config.num_kv_heads, config.head_dim, STEPS, ROWS + 1, config.dtype, "cpu")

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def run(layer: LayerSpec, w: Any, x: jax.Array, pages: jax.Array, ropes: Any, batch: StepBatch) -> Any:
        recorded = {name: _Recorded(getattr(w, name)) for name in readers}
        w = w.replace(**recorded)
        # A row's one page holds all of its tokens, whatever KV group a layer is of.
        slots, table = batch.slot_mappings[0], batch.page_tables[0]
        x, pages, _ = run_layer(
            module, config, cache_spec, layer, w, x, pages, None, ropes, slots, table, batch
        )
        return x, pages, {name: matrix.squares for name, matrix in recorded.items()}

    @jax.jit
    def embed(weights: Any, batch: StepBatch) -> Any:
        tables = tuple(rope_table(rope, batch.positions) for rope in config.ropes)
        return module.embed(config, weights, batch.token_ids), tables

    @jax.jit
    def draw(weights: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        hidden = module.final(config, weights, x)
        return jax.random.categorical(key, module.unembed(config, weights, hidden))

    layers = weights.layers
    pages = [kv.init(cache_spec).pages[0] for _ in layers]
    sums: list[dict[str, Any]] = [dict.fromkeys(readers, 0.0) for _ in layers]
    ids, key = np.random.default_rng(0).integers(0, config.vocab_size, ROWS), jax.random.key(0)
    for step in range(steps):
        rows = [([token], step, [1 + row]) for row, token in enumerate(ids.tolist())]
        batch = batches.pack(rows, page_size=STEPS)
        x, ropes = embed(weights, batch)
        squares = []
        for i, w in enumerate(layers):
            x, pages[i], recorded = run(config.layers[i], w, x, pages[i], ropes, batch)
            squares.append(recorded)
        ids = np.asarray(draw(weights, x, jax.random.fold_in(key, step)))
        for total, recorded in zip(sums, squares, strict=True):
            for name in readers:
                total[name] = total[name] + np.asarray(recorded[name], np.float64)
    return [{name: np.sqrt(value / (ROWS * steps)) for name, value in layer.items()} for layer in sums]


def apply(
    module: ModelModule,
    config: Any,
    weights: Any,
    activations: str | None,
    implementation: str,
    found: Mapping[str, Factors],
) -> Any:
    """The weights times their factors, in the form that runs.

    The matrices of K and V are multiplied by their factors alone. Every query head of their group reads what they
    write, so they are a quarter of what is left of the loss, and of the work they are a sixteenth
    (log/w8a8-quality.md).
    """
    axes = dict(named_leaves(module.logical_axes(config), is_leaf=quantization.is_axes))

    def in_form(name: str, leaf: jax.Array) -> Any:
        inputs, outputs = found.get(name, Factors())
        if "kv_heads" in axes[name]:
            return leaf if inputs is None else (leaf * inputs).astype(leaf.dtype)
        return quantization.quantize_leaf(axes[name], leaf, activations, implementation, inputs, outputs)

    return jax.tree.unflatten(
        jax.tree.structure(weights), [in_form(name, leaf) for name, leaf in named_leaves(weights)]
    )
