"""The page layout of the CPU path, and the one place that reads blocks of pages of either layout.

The contracts' layout is [num_pages, K, page_size, 2H]. The CPU path keeps K apart from V, and K transposed:
[num_pages, 2, K, R, L], where plane 0 is K as [K, H, page_size], plane 1 is V as [K, page_size, H], each head's
page_size * H values in R rows of L = 128 (fewer, if 128 does not divide them). Why (figures in
log/cpu-attention.md):

- The products of a few queries with keys, and of their weights with values, are sums over an axis that is not the
  fastest one. XLA:CPU makes vector instructions of such a sum; its library's matrix product would first pack all keys
  anew, for each query token.
- XLA:CPU copies rows of 128 bfloat16 at the speed of the memory, rows of 64 at a third of it.

A new token's K goes to page_size-strided places; that costs 2 % of what attention takes.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback

IMPLEMENTATIONS = ("cpu", "cpu_invariant")  # that take this layout
LANES = 128  # of a row


def page_shape(num_pages: int, num_kv_heads: int, page_size: int, head_dim: int) -> tuple[int, ...]:
    """Of the pages of one layer in the CPU layout."""
    lanes = math.gcd(page_size * head_dim, LANES)
    return (num_pages, 2, num_kv_heads, page_size * head_dim // lanes, lanes)


def unwritten(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of this shape that nothing writes: it takes no time, and no resident memory until something does."""
    return buffer_callback(lambda context, array: None, shape)()


def check_shape(
    kv_pages: jax.Array, implementation: str, num_heads: int | None, head_dim: int
) -> tuple[int, int, int]:
    """(num_pages, K, page_size) of pages in the layout of `implementation`, for q or k of this head_dim.

    Args:
      num_heads: K, where the caller knows it.

    Raises:
      ValueError: the shape is not of that layout.
    """
    said = "K" if num_heads is None else num_heads
    if implementation not in IMPLEMENTATIONS:
        if (
            kv_pages.ndim != 4
            or kv_pages.shape[3] != 2 * head_dim
            or num_heads not in (None, kv_pages.shape[1])
        ):
            raise ValueError(
                f"kv_pages is {list(kv_pages.shape)} but implementation {implementation!r} with head_dim {head_dim} "
                f"needs [num_pages, {said}, page_size, {2 * head_dim}]"
            )
        return kv_pages.shape[0], kv_pages.shape[1], kv_pages.shape[2]
    if kv_pages.ndim == 5:
        found = kv_pages.shape[0], kv_pages.shape[2], page_size(kv_pages, head_dim)
        if kv_pages.shape == page_shape(*found, head_dim) and num_heads in (None, kv_pages.shape[2]):
            return found
    raise ValueError(
        f"kv_pages is {list(kv_pages.shape)} but implementation {implementation!r} with head_dim {head_dim} needs "
        f"[num_pages, 2, {said}, page_size * {head_dim} / lanes, lanes], as kv_cache.init makes them"
    )


def of_layout(kv_pages: jax.Array, implementation: str) -> jax.Array:
    """Pages of the contracts' layout in that of `implementation`."""
    return from_contract(kv_pages) if implementation in IMPLEMENTATIONS else kv_pages


def is_cpu_layout(kv_pages: jax.Array) -> bool:
    """Whether these pages are of the CPU layout; else they are of the contracts'."""
    return kv_pages.ndim == 5


def num_kv_heads(kv_pages: jax.Array) -> int:
    """K, in either layout."""
    return kv_pages.shape[2 if is_cpu_layout(kv_pages) else 1]


def page_size(kv_pages: jax.Array, head_dim: int) -> int:
    """Tokens of a page, in either layout."""
    if is_cpu_layout(kv_pages):
        return kv_pages.shape[3] * kv_pages.shape[4] // head_dim
    return kv_pages.shape[2]


def from_contract(kv_pages: jax.Array) -> jax.Array:
    """[num_pages, K, page_size, 2H] in the CPU layout."""
    num_pages, num_heads, size, lanes = kv_pages.shape
    k, v = kv_pages[..., : lanes // 2].swapaxes(2, 3), kv_pages[..., lanes // 2 :]
    shape = page_shape(num_pages, num_heads, size, lanes // 2)
    return jnp.stack([x.reshape(shape[0], *shape[2:]) for x in (k, v)], axis=1)


def to_contract(kv_pages: jax.Array, head_dim: int) -> jax.Array:
    """The inverse of `from_contract`."""
    k, v = (
        kv_pages[:, plane].reshape(*shape) for plane, shape in enumerate(_plane_shapes(kv_pages, head_dim))
    )
    return jnp.concatenate([k.swapaxes(2, 3), v], axis=-1)


def append(
    k: jax.Array,  # [T, K, H] of the pages' dtype
    v: jax.Array,
    kv_pages: jax.Array,  # of the CPU layout
    pages: jax.Array,  # i32[T]
    offsets: jax.Array,  # i32[T]
) -> jax.Array:
    """The pages with K and V of T tokens in their slots, in place if donated."""
    k_shape, v_shape = _plane_shapes(kv_pages, k.shape[2])
    shape, num_pages = kv_pages.shape, kv_pages.shape[0]
    if (
        len(pages) == 1
    ):  # of a scatter of one XLA makes selections that copy the pool: another goes to the null page
        k, v = (jnp.pad(x, ((0, 1), (0, 0), (0, 0))) for x in (k, v))
        pages, offsets = jnp.pad(pages, (0, 1)), jnp.pad(offsets, (0, 1))
    k_pages = kv_pages.reshape(num_pages, 2, *k_shape[1:]).at[pages, 0, :, :, offsets].set(k)
    v_pages = k_pages.reshape(num_pages, 2, *v_shape[1:]).at[pages, 1, :, offsets].set(v)
    # A barrier: indices of this other shape would be worked out for every element that `read` copies.
    return jax.lax.optimization_barrier(v_pages.reshape(shape))


def read(
    kv_pages: jax.Array,
    page_ids: jax.Array,  # i32[W, P]
    head_dim: int,
) -> tuple[jax.Array, jax.Array]:  # k [W, K, H, C], v [W, K, C, H], C = P * page_size
    """Blocks of P pages each, of either layout."""
    width, block_pages = page_ids.shape
    size = page_size(kv_pages, head_dim)
    if not is_cpu_layout(kv_pages):
        kv = kv_pages.at[page_ids].get(mode="promise_in_bounds").swapaxes(1, 2)  # [W, K, P, page_size, 2H]
        kv = kv.reshape(width, kv_pages.shape[1], block_pages * size, 2 * head_dim)
        return kv[..., :head_dim].swapaxes(2, 3), kv[..., head_dim:]
    num_pages, _, num_heads, rows, lanes = kv_pages.shape
    pool = kv_pages.reshape(num_pages * 2 * num_heads, rows, lanes)
    # heads before pages, so that the copy itself puts the tokens of a head's V one behind the other
    heads = 2 * num_heads * page_ids[:, None, :] + jnp.arange(num_heads)[:, None]  # i32[W, K, P]
    # Barriers: indices are not worked out again for each element, and a copy that is fused into what follows it runs at
    # a third of the speed.
    barrier = jax.lax.optimization_barrier

    def of_plane(plane: int) -> jax.Array:
        ids = barrier((heads + plane * num_heads).reshape(-1))
        return barrier(pool.at[ids].get(mode="promise_in_bounds"))

    k = of_plane(0).reshape(width, num_heads, block_pages, head_dim, size)
    k = k.transpose(0, 1, 3, 2, 4).reshape(width, num_heads, head_dim, block_pages * size)
    return k, of_plane(1).reshape(width, num_heads, block_pages * size, head_dim)


def _plane_shapes(kv_pages: jax.Array, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """[num_pages, K, H, page_size] of K and [num_pages, K, page_size, H] of V."""
    num_pages, _, num_heads = kv_pages.shape[:3]
    size = page_size(kv_pages, head_dim)
    return (num_pages, num_heads, head_dim, size), (num_pages, num_heads, size, head_dim)
