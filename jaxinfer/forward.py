"""Runs a model over a step's batch: embedding, layers, final norm. A model file says what a layer is, this how layers
are run: `KVCacheSpec.layer_strategy` names one of STRATEGIES.

Shape letters: T tokens, B rows, D embed_dim, N query heads, K KV heads, H head_dim, P pages per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.attention import AttentionOptions, append_and_attend
from jaxinfer.batch import StepBatch
from jaxinfer.kv_cache import KVCache, KVCacheSpec
from jaxinfer.models.rope import rope_table
from jaxinfer.models.spec import LayerSpec, ModelConfig, ModelModule
from jaxinfer.programs.tiles import map_tiles

NO_WINDOW = 2**31 - 1  # a window as data that hides nothing


def forward(
    model: ModelModule, config: ModelConfig, weights: Any, kv_cache: KVCache, batch: StepBatch
) -> tuple[jax.Array, KVCache]:
    """Hidden states [T, D] of the batch's tokens after the final norm, and the cache with them appended."""
    _check_groups(config, kv_cache.spec)
    # `pack` makes numpy arrays, which without jax.jit come as they are
    batch = jax.tree.map(jnp.asarray, batch)

    def embed(token_ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
        tables = tuple(rope_table(rope, positions) for rope in config.ropes)
        return model.embed(config, weights, token_ids), tables

    x, ropes = _per_token(batch, embed, batch.token_ids, batch.positions)
    run_layers = STRATEGIES[kv_cache.spec.strategy]
    x, kv_cache = run_layers(model, config, weights.layers, x, ropes, kv_cache, batch)
    return _per_token(batch, partial(model.final, config, weights), x), kv_cache


def kv_groups(model: ModelModule, config: ModelConfig) -> tuple[tuple[tuple[int, ...], int | None], ...]:
    """Of each KV group of a model its layers and window: that of the layer that sees most.

    Raises:
      ValueError: a group has no layer.
    """
    options = [layer.attention for layer in config.layers]
    groups = []
    for g in range(1 + max(o.group for o in options)):
        layers = tuple(layer for layer, o in enumerate(options) if o.group == g)
        if not layers:
            raise ValueError(
                f"no layer of {model.__name__} is in KV group {g}; groups are numbered without a gap"
            )
        windows = [options[layer].window for layer in layers]
        groups.append((layers, None if None in windows else max(w for w in windows if w is not None)))
    return tuple(groups)


def _check_groups(config: ModelConfig, spec: KVCacheSpec) -> None:
    """Raises ValueError where the cache does not hold what layers see."""
    for layer, g in enumerate(spec.layer_groups):
        options, group = config.layers[layer].attention, spec.kv_groups[g]
        sees = NO_WINDOW if options.window is None else options.window
        if group.window is not None and sees > group.window:
            raise ValueError(f"layer {layer} sees {sees} tokens, its KV group keeps {group.window}")
        if options.group != g and len(spec.kv_groups) > 1:
            raise ValueError(
                f"layer {layer} is in KV group {options.group} of the model and {g} of the cache"
            )


def _per_token(batch: StepBatch, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), trees of arrays [T, ...] that it maps token by token to such a tree."""
    return map_tiles(function, arguments, batch.tile, batch.cu_q_lens[-1])


def unrolled(
    model: ModelModule,
    config: ModelConfig,
    layers: Sequence[Any],
    x: jax.Array,  # [T, D]
    ropes: tuple[Any, ...],
    kv_cache: KVCache,
    batch: StepBatch,
) -> tuple[jax.Array, KVCache]:
    """Layer after layer, each with pages of its own; layers of equal specs and shapes are traced and lowered once."""
    spec = kv_cache.spec
    run = jax.jit(partial(run_layer, model, config, spec), static_argnums=0)
    pages: list[Any] = list(kv_cache.pages)
    scales: list[Any] = list(kv_cache.scales or [None] * len(layers))
    for i, w in enumerate(layers):
        slots, table = (arrays[spec.layer_groups[i]] for arrays in (batch.slot_mappings, batch.page_tables))
        x, pages[i], scales[i] = run(config.layers[i], w, x, pages[i], scales[i], ropes, slots, table, batch)
    return x, replace(kv_cache, pages=tuple(pages), scales=None if kv_cache.scales is None else tuple(scales))


def run_layer(
    model: ModelModule,
    config: ModelConfig,
    spec: KVCacheSpec,
    layer: LayerSpec,
    w: Any,
    x: jax.Array,  # [T, D]
    pages: jax.Array,
    scales: jax.Array | None,
    ropes: tuple[Any, ...],
    slot_mapping: jax.Array,  # i32[T]
    page_table: jax.Array,  # i32[B, P]
    batch: StepBatch,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """One layer over a step's batch, with pages of its own: (x, pages, scales)."""
    options = layer.attention
    before = partial(model.before_attention, config, layer, w)
    q, k, v = _per_token(batch, before, x, _table(options, ropes))
    out, pages, scales = append_and_attend(
        q,
        k,
        v,
        pages,
        scales,
        slot_mapping,
        page_table,
        batch,
        spec,
        options,
        window=options.window,
        sink_logits=_sinks(options, w),
    )
    return _per_token(batch, partial(model.after_attention, config, layer, w), x, out), pages, scales


def one_loop(
    model: ModelModule,
    config: ModelConfig,
    layers: Sequence[Any],
    x: jax.Array,  # [T, D]
    ropes: tuple[Any, ...],
    kv_cache: KVCache,
    batch: StepBatch,
) -> tuple[jax.Array, KVCache]:
    """All layers in one loop, the pages of all of them in one array, layer after layer.

    A layer's own part of the loop, the products before and after attention, is a branch of a switch, and reads its
    weights where they lie: weights that a loop slices out of a stack are copied. All else stands in the program once,
    and what differs by layer (window, KV group) is data. What XLA:CPU takes to compile and to load a program, and what
    it keeps of it, grows with its instructions.

    Raises:
      NotImplementedError: layers differ in what is static in the one attention of the loop.
    """
    spec = kv_cache.spec
    options = [layer.attention for layer in config.layers]
    shared = _shared(options)

    # Traced and lowered once for layers of equal specs, not in each branch.
    @partial(jax.jit, static_argnums=0)
    def before(layer: LayerSpec, w, x, ropes, batch):
        table = _table(layer.attention, ropes)
        q, k, v = _per_token(batch, partial(model.before_attention, config, layer, w), x, table)
        return q, k, v, _sinks(layer.attention, w)

    @partial(jax.jit, static_argnums=0)
    def after(layer: LayerSpec, w, x, out, batch):
        return _per_token(batch, partial(model.after_attention, config, layer, w), x, out)

    def turn(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, pages = state
        branches = [partial(before, layer, w) for layer, w in zip(config.layers, layers, strict=True)]
        q, k, v, sinks = jax.lax.switch(i, branches, x, ropes, batch)
        group = _by_layer(spec.layer_groups, i)
        # of the layer's pages in the array
        first = i * spec.num_pages if len(spec.kv_groups) == 1 else _by_layer(spec.layer_starts, i)
        out, pages, _ = append_and_attend(
            q,
            k,
            v,
            pages,
            None,
            _of_group(batch.slot_mappings, group) + first * spec.page_size,
            _of_group(batch.page_tables, group) + first,
            batch,
            spec,
            shared,
            window=_window(options, i),
            sink_logits=sinks,
        )
        branches = [partial(after, layer, w) for layer, w in zip(config.layers, layers, strict=True)]
        return jax.lax.switch(i, branches, x, out, batch), pages

    x, array = jax.lax.fori_loop(0, len(layers), turn, (x, *kv_cache.pages))
    return x, replace(kv_cache, pages=(array,))


STRATEGIES: dict[str, Callable[..., tuple[jax.Array, KVCache]]] = {
    "unrolled": unrolled,
    "one_loop": one_loop,
}


def _table(options: AttentionOptions, ropes: tuple[Any, ...]) -> Any:
    return None if options.rope is None else ropes[options.rope]


def _sinks(options: AttentionOptions, w: Any) -> jax.Array | None:
    return None if options.sinks is None else getattr(w, options.sinks)


def _shared(options: Sequence[AttentionOptions]) -> AttentionOptions:
    """The options of the loop's one attention, less what is data there."""
    shared = {replace(o, group=0, window=None, rope=0) for o in options}
    if len(shared) > 1:
        raise NotImplementedError(
            "one_loop has one attention for all layers, and these differ in sm_scale, soft_cap or sinks: "
            "give the cache layer_strategy='unrolled'"
        )
    return shared.pop()


def _by_layer(values: Sequence[int], i: jax.Array) -> int | jax.Array:
    """The value of layer i: static where all are equal."""
    return values[0] if len(set(values)) == 1 else jnp.asarray(values, jnp.int32)[i]


def _window(options: Sequence[AttentionOptions], i: jax.Array) -> int | jax.Array | None:
    windows = [o.window for o in options]
    if len(set(windows)) == 1:
        return windows[0]
    return _by_layer([NO_WINDOW if window is None else window for window in windows], i)


def _of_group(arrays: tuple[jax.Array, ...], group: int | jax.Array) -> jax.Array:
    return arrays[group] if isinstance(group, int) else jnp.stack(arrays)[group]
