"""Batch invariance: tokens are worked on in tiles of one fixed size, so that none knows its neighbours.

How a product rounds depends on its number of rows, and how a reduction rounds on the fusion that it is part of. A
loop over tiles has one body, of one shape, in every program that contains it, whatever T, B and k of that program
are: a token gets the same bits from all of them as long as its place within the tile does not matter, which the tests
show by permuting rows. The trip count is data: a step pays for its live tokens, rounded up to a tile.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

TILE = 64  # tokens of a tile: 32 and 128 cost more in decode or in prefill (log/batch-invariance.md)


def map_tiles(
    function: Callable[..., Any], arguments: tuple[Any, ...], tile: int | None, live: jax.Array
) -> Any:
    """function(*arguments), worked out tile by tile.

    Args:
      function: of trees of arrays [n, ...] for any n, row by row; returns such a tree.
      arguments: trees of arrays [T, ...].
      tile: rows of a tile; None calls the function once with all.
      live: i32[], how many of the T rows have a meaning; whole tiles behind them are left out, and are zeros.

    Returns:
      The tree that function returns, [T, ...].
    """
    if tile is None:
        return function(*arguments)
    (num_rows,) = {x.shape[0] for x in jax.tree.leaves(arguments)}
    padding = -num_rows % tile
    padded = jax.tree.map(
        lambda x: jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)), mode="edge"), arguments
    )

    def tile_of(tree: Any, i: jax.Array) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * tile, tile), tree)

    def body(i: jax.Array, out: Any) -> Any:
        new = function(*tile_of(padded, i))
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, i * tile, 0), out, new)

    shapes = jax.eval_shape(lambda: function(*tile_of(padded, jnp.int32(0))))
    out = jax.tree.map(lambda x: jnp.zeros((num_rows + padding, *x.shape[1:]), x.dtype), shapes)
    # The barrier hides a count that is known when the program is compiled: one tile would be no loop.
    num_tiles = lax.optimization_barrier((jnp.asarray(live, jnp.int32) + tile - 1) // tile)
    out = lax.fori_loop(0, num_tiles, body, out)
    return jax.tree.map(lambda x: x[:num_rows], out)
