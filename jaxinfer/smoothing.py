"""Channels of activations made alike before they become int8, the difference moved into weights.

A few channels of a language model are much larger than the others, for every token (arXiv:2208.07339), and one scale
per token is then that of those few. Dividing a channel by a factor, and multiplying by it the weights that read the
channel, changes nothing but the rounding (SmoothQuant, arXiv:2211.10438); the division is a factor on the norm or the
matrix that writes the channel, so it costs nothing in a step. Which channels are large is seen on tokens that the model
itself draws (as LLM-QAT, arXiv:2305.17888): no data is needed, and equal weights get equal factors.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxinfer import batch as batches
from jaxinfer import kv_cache as kv
from jaxinfer import quantization
from jaxinfer.checkpoints.loading import named_leaves
from jaxinfer.forward import forward
from jaxinfer.models import spec
from jaxinfer.models.spec import ModelModule
from jaxinfer.pallas_kernels.dense_matmul import dense_matmul

ROWS, STEPS = 32, 24  # sequences that are drawn, and their tokens
FLOOR = 1e-2  # a channel counts as at least this part of the mean one: it was not seen at its largest


@struct.dataclass
class _Observed:
    """A matrix as a leaf that reports what it multiplies."""

    matrix: jax.Array  # [*out, *in]
    number: jax.Array  # i32[]
    report: Callable[[jax.Array, jax.Array], None] = struct.field(pytree_node=False)  # of number and x [T, D]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    def plain(self, num_rows: int) -> None:
        return None

    def matmul(self, x: jax.Array, out_dtype: jax.typing.DTypeLike) -> jax.Array:
        jax.debug.callback(self.report, self.number, x)
        matrix = self.matrix.reshape(-1, x.shape[1])
        return dense_matmul(x, matrix, out_dtype=out_dtype, implementation="xla")


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
    leaves = dict(named_leaves(weights))
    groups = []
    for layer in range(config.num_layers):
        for writer, readers in spec.smoothing_groups(module.LEAVES).items():
            groups.append((f"layers.{layer}.{writer}", [f"layers.{layer}.{name}" for name in readers]))
    sizes = _sizes(module, config, weights, [readers[0] for _, readers in groups])
    found: dict[str, Factors] = {}
    for (writer, names), size in zip(groups, sizes, strict=True):
        peaks = [jnp.abs(leaves[name].reshape(-1, size.size)).max(axis=0) for name in names]
        weight = np.max(np.asarray(peaks, np.float64), axis=0)
        log_factor = np.log(_floored(size) / _floored(weight)) / 2
        factor = np.exp(log_factor - log_factor.mean()).astype(np.float32)
        for name in names:
            found[name] = found.get(name, Factors())._replace(inputs=jnp.asarray(factor))
        found[writer] = found.get(writer, Factors())._replace(outputs=jnp.asarray(1 / factor))
    return found


def _floored(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, FLOOR * x.mean() or 1.0)


def _sizes(module: ModelModule, config: Any, weights: Any, names: list[str]) -> list[np.ndarray]:
    """Of what each of these matrices is multiplied by: float64[D], the root mean square over tokens it draws."""
    sums: dict[int, np.ndarray] = {}

    def report(number: jax.Array, x: jax.Array) -> None:
        squares = np.square(np.asarray(x, np.float64)).sum(axis=0)
        sums[int(number)] = sums.get(int(number), 0.0) + squares

    numbers = {name: jnp.int32(i) for i, name in enumerate(names)}
    observed = [
        _Observed(leaf, numbers[name], report) if name in numbers else leaf
        for name, leaf in named_leaves(weights)
    ]
    observed = jax.tree.unflatten(jax.tree.structure(weights), observed)
    steps = min(STEPS, config.max_position_embeddings)
    cache_spec = kv.KVCacheSpec(
        config.num_layers, config.num_kv_heads, config.head_dim, STEPS, ROWS + 1, config.dtype, "cpu"
    )
    cache = kv.init(cache_spec)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, ROWS)
    key = jax.random.key(0)
    draw = jax.jit(
        lambda weights, hidden, key: jax.random.categorical(key, module.unembed(config, weights, hidden))
    )
    run = jax.jit(partial(forward, module, config))  # else each step would be traced and compiled anew
    for step in range(steps):
        rows = [([token], step, [1 + row]) for row, token in enumerate(ids.tolist())]
        hidden, cache = run(observed, cache, batches.pack(rows, page_size=STEPS))
        ids = np.asarray(draw(weights, hidden, jax.random.fold_in(key, step)))
    jax.effects_barrier()
    return [np.sqrt(sums[i] / (ROWS * steps)) for i in range(len(names))]


def quantize(
    module: ModelModule, config: Any, weights: Any, activations: str | None, implementation: str
) -> Any:
    """As quantization.quantize, with the channels of activations made alike first; what writes K and V stays."""
    return apply(module, config, weights, activations, implementation, factors(module, config, weights))


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
