"""The paged KV cache: a preallocated pytree of pages, and the only code that knows their layout.

A page holds `page_size` tokens of one layer: `[num_pages, K, page_size, 2H]`, K in lanes [0, H), V in
[H, 2H); for the CPU's kernels as `pallas_kernels.cpu_pages` says. Page 0 is the null page: padding writes there
and table tails point at it. A slot is `page * page_size + offset`. Which page belongs to whom is host bookkeeping
(`page_allocator`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding, SingleDeviceSharding

from jaxinfer.pallas_kernels import cpu_pages

LAYER_STRATEGIES = ("unrolled", "one_loop")
TPU_LANES = 128  # of a vector register


@dataclass(frozen=True)
class KVCacheSpec:
    """Everything static about a cache.

    dtype: of the pages.
    implementation: which kernels write and read them (reference | xla | cpu | tpu | gpu | gpu_xla).
    layer_strategy: how a model's layers run (`forward.STRATEGIES`), and so whether the pages of all of them stand in
      one array; "auto": one_loop with the CPU's kernels, else unrolled.
    compute_capability: of the GPU that the programs are compiled for; only its kernels look at it.
    num_pages counts the null page.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    dtype: str = "float32"
    implementation: str = "xla"
    compute_capability: tuple[int, int] = (0, 0)
    layer_strategy: str = "auto"

    def __post_init__(self) -> None:
        if self.layer_strategy == "auto":
            on_cpu = self.implementation in cpu_pages.IMPLEMENTATIONS
            object.__setattr__(self, "layer_strategy", "one_loop" if on_cpu else "unrolled")
        if self.layer_strategy not in LAYER_STRATEGIES:
            raise ValueError(
                f"layer_strategy={self.layer_strategy!r} must be one of {', '.join(LAYER_STRATEGIES)}"
            )
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_pages < 2:
            raise ValueError(f"num_pages={self.num_pages} must be at least 2: the null page and one more")
        if self.num_pages_in_array * self.page_size >= 2**31:
            raise ValueError(
                f"num_pages={self.num_pages_in_array} x page_size={self.page_size} slots do not fit 32-bit indices; "
                "use fewer pages"
            )

    @property
    def one_array(self) -> bool:
        """Whether the pages of all layers stand in one array, layer after layer, which a loop over layers can index."""
        return self.layer_strategy == "one_loop"

    @property
    def num_pages_in_array(self) -> int:
        return self.num_pages * (self.num_layers if self.one_array else 1)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of an array of pages: of all layers, or of one."""
        if self.implementation in cpu_pages.IMPLEMENTATIONS:
            return cpu_pages.page_shape(
                self.num_pages_in_array, self.num_kv_heads, self.page_size, self.head_dim
            )
        return (self.num_pages_in_array, self.num_kv_heads, self.page_size, 2 * self.head_dim)

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that fit, the null page left out."""
        return (self.num_pages - 1) * self.page_size

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, as it lies in memory: for the TPU kernels in whole registers of lanes."""
        lanes = 2 * self.head_dim
        if self.implementation == "tpu":
            lanes = -(-lanes // TPU_LANES) * TPU_LANES
        elements = self.num_layers * self.num_kv_heads * self.page_size * lanes
        return elements * ml_dtypes_itemsize(self.dtype)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool, the null page included."""
        return self.num_pages * self.bytes_per_page

    def describe(self) -> str:
        """One line for people: pages, tokens, bytes."""
        return (
            f"{self.num_pages - 1} pages x {self.page_size} tokens = {self.num_usable_tokens} tokens, "
            f"{self.total_bytes / 2**20:.1f} MiB of {self.dtype}"
        )


def bytes_per_token(num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of K and V of one token in one layer."""
    return 2 * num_kv_heads * head_dim * ml_dtypes_itemsize(dtype)


def ml_dtypes_itemsize(dtype: str) -> int:
    """Bytes of one element, bfloat16 and the 8-bit floats included."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


@struct.dataclass
class KVCache:
    """pages: per layer, or one array (`spec.one_array`), of `spec.page_shape`. scales: per layer
    f32[num_pages, K, 2, page_size] for quantized pages, else None."""

    pages: tuple[jax.Array, ...]
    scales: tuple[jax.Array, ...] | None
    spec: KVCacheSpec = struct.field(pytree_node=False)


def init(spec: KVCacheSpec) -> KVCache:
    """A cache that holds nothing. Call it under `jax.jit` with `out_shardings` to place it (`page_format`).

    Its pages are zero, but for the CPU's kernels: there nothing writes them, so that they take no time and no resident
    memory until tokens do. Whatever stands in a slot that was not written is masked, NaN included.
    """
    shape = jax.ShapeDtypeStruct(spec.page_shape, jnp.dtype(spec.dtype))
    if spec.one_array:
        return KVCache(pages=(cpu_pages.unwritten(shape),), scales=None, spec=spec)
    pages = tuple(jnp.zeros(shape.shape, shape.dtype) for _ in range(spec.num_layers))
    return KVCache(pages=pages, scales=None, spec=spec)


def page_format(spec: KVCacheSpec, sharding: Sharding | None = None) -> Format | None:
    """Where programs must say how pages lie in memory, the layout and the place to say; None: the default is right.

    The TPU kernels read pages row by row. The TPU's compiler stores arrays of other than whole registers of
    lanes (2H = 160 or 192) in another order, and would copy the pool into and out of every call.

    Args:
      spec: of the cache.
      sharding: where it lies; None: on the first device.
    """
    if spec.implementation != "tpu" or 2 * spec.head_dim % TPU_LANES == 0:
        return None
    return Format(Layout((0, 1, 2, 3)), sharding or SingleDeviceSharding(jax.devices()[0]))


def pages_needed(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens`."""
    return math.ceil(num_tokens / page_size)


def slot_mapping(page_table: Any, rows: Any, indices: Any, page_size: int) -> Any:
    """Slots of tokens, on host (numpy) or device (jax) alike.

    Args:
      page_table: i32[B, P].
      rows: i32[T], the row of each token.
      indices: i32[T], where in its row's resident tokens each token stands.
      page_size: tokens per page.

    Returns:
      i32[T].
    """
    return page_table[rows, indices // page_size] * page_size + indices % page_size


def gather(cache: KVCache, layer: int, table_row: jax.Array, kv_len: int) -> tuple[jax.Array, jax.Array]:
    """K and V of one row of one layer, for tests and research: two arrays [kv_len, K, H].

    Args:
      layer: counted from 0.
      table_row: i32[P], the row's page table.
      kv_len: resident tokens, static.
    """
    used = table_row[: pages_needed(kv_len, cache.spec.page_size)]
    if cache.spec.one_array:
        first = layer * (cache.pages[0].shape[0] // cache.spec.num_layers)
        pages = cache.pages[0][first + used]
    else:
        pages = cache.pages[layer][used]
    if cpu_pages.is_cpu_layout(pages):
        pages = cpu_pages.to_contract(pages, cache.spec.head_dim)
    tokens = jnp.swapaxes(pages, 1, 2).reshape(-1, cache.spec.num_kv_heads, 2 * cache.spec.head_dim)[:kv_len]
    return tokens[..., : cache.spec.head_dim], tokens[..., cache.spec.head_dim :]


def copy_pages(cache: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
    """Copy whole pages `source` i32[M] over pages `target` i32[M] in every layer.

    Pad both with 0: the null page may be copied onto itself any number of times.
    """
    source, target = _in_all_layers(cache.spec, source), _in_all_layers(cache.spec, target)
    return _map_arrays(cache, lambda array: array.at[target].set(array[source]))


def export_pages(cache: KVCache, page_ids: jax.Array) -> KVCache:
    """The contents of `page_ids` i32[M] as a cache of M pages, to be moved elsewhere."""
    ids = _in_all_layers(cache.spec, page_ids)
    out = _map_arrays(cache, lambda array: array[ids])
    return replace(out, spec=_resized(cache.spec, len(page_ids)))


def import_pages(cache: KVCache, exported: KVCache, page_ids: jax.Array) -> KVCache:
    """Write pages that `export_pages` returned into `page_ids` i32[M] of this cache.

    Raises:
      ValueError: the two caches differ in more than their number of pages.
    """
    if _resized(exported.spec, cache.spec.num_pages) != cache.spec:
        raise ValueError(f"pages of {exported.spec} cannot be imported into a cache of {cache.spec}")
    page_ids = _in_all_layers(cache.spec, page_ids)
    pages = tuple(a.at[page_ids].set(b) for a, b in zip(cache.pages, exported.pages, strict=True))
    scales = cache.scales
    if scales is not None and exported.scales is not None:
        scales = tuple(a.at[page_ids].set(b) for a, b in zip(scales, exported.scales, strict=True))
    return replace(cache, pages=pages, scales=scales)


def _in_all_layers(spec: KVCacheSpec, page_ids: jax.Array) -> jax.Array:
    """Where the pages `page_ids` i32[M] stand in an array: i32[layers * M] where it is one for all layers."""
    if not spec.one_array:
        return page_ids
    return (jnp.arange(spec.num_layers)[:, None] * spec.num_pages + page_ids).reshape(-1)


def _resized(spec: KVCacheSpec, num_pages: int) -> KVCacheSpec:
    # A one-page export is legal although a one-page pool is not, so the spec keeps at least two.
    return replace(spec, num_pages=max(num_pages, 2))


def _map_arrays(cache: KVCache, function: Callable[[jax.Array], jax.Array]) -> KVCache:
    scales = None if cache.scales is None else tuple(function(s) for s in cache.scales)
    return replace(cache, pages=tuple(function(p) for p in cache.pages), scales=scales)
