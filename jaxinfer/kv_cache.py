"""The paged KV cache: a preallocated pytree of pages, and the only code that knows their layout.

A page holds `page_size` tokens of one layer: `[num_pages, K, page_size, 2H]`, K in lanes [0, H), V in
[H, 2H); for the CPU's kernels as `pallas_kernels.cpu_pages` says. Page 0 is the null page: padding writes there
and table tails point at it. A slot is `page * page_size + offset`. Which page belongs to whom is host bookkeeping
(`page_allocator`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding, SingleDeviceSharding

from jaxinfer.page_groups import most_pages
from jaxinfer.pallas_kernels import cpu_pages

LAYER_STRATEGIES = ("unrolled", "one_loop")
TPU_LANES = 128  # of a vector register


@dataclass(frozen=True)
class KVGroup:
    """Layers that see the same tokens: their pages have one table.

    layers: their numbers. window: how many of the newest tokens a token sees, itself included; None: all.
    num_pages counts the null page.
    """

    layers: tuple[int, ...]
    window: int | None
    num_pages: int


@dataclass(frozen=True)
class KVCacheSpec:
    """Everything static about a cache. K and V have one shape and dtype in all layers.

    dtype: of the pages.
    implementation: which kernels write and read them (reference | xla | cpu | tpu | gpu | gpu_xla).
    layer_strategy: how a model's layers run (`forward.STRATEGIES`), and so whether the pages of all of them stand in
      one array; "auto": one_loop with the CPU's kernels, else unrolled.
    compute_capability: of the GPU that the programs are compiled for; only its kernels look at it.
    num_pages counts the null page; with several groups it is that of the group that has most.
    groups: of layers, by the index that `AttentionOptions.group` gives; () is one group of all, without a window.
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
    groups: tuple[KVGroup, ...] = ()

    def __post_init__(self) -> None:
        if self.strategy not in LAYER_STRATEGIES:
            raise ValueError(
                f"layer_strategy={self.strategy!r} must be one of {', '.join(LAYER_STRATEGIES)}, or auto"
            )
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.groups:
            layers = sorted(layer for group in self.groups for layer in group.layers)
            pages = max(group.num_pages for group in self.groups)
            if layers != list(range(self.num_layers)) or pages != self.num_pages:
                raise ValueError(
                    f"groups have layers {layers} and up to {pages} pages, and the cache {self.num_layers} layers and "
                    f"num_pages={self.num_pages}: each layer is in one group, and the largest has num_pages"
                )
        if min(group.num_pages for group in self.kv_groups) < 2:
            raise ValueError(f"num_pages={self.num_pages} must be at least 2: the null page and one more")
        if max(self.array_pages) * self.page_size >= 2**31:
            raise ValueError(
                f"num_pages={max(self.array_pages)} x page_size={self.page_size} slots do not fit 32-bit indices; "
                "use fewer pages"
            )

    @property
    def strategy(self) -> str:
        """The name of how layers run, "auto" settled."""
        if self.layer_strategy != "auto":
            return self.layer_strategy
        return "one_loop" if self.implementation in cpu_pages.IMPLEMENTATIONS else "unrolled"

    @property
    def one_array(self) -> bool:
        """Whether the pages of all layers stand in one array, layer after layer, which a loop over layers can index."""
        return self.strategy == "one_loop"

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self.groups or (KVGroup(tuple(range(self.num_layers)), None, self.num_pages),)

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """Of each layer the index of its group."""
        group_of = {layer: g for g, group in enumerate(self.kv_groups) for layer in group.layers}
        return tuple(group_of[layer] for layer in range(self.num_layers))

    @property
    def layer_starts(self) -> tuple[int, ...]:
        """Of each layer the place of its first page in its array."""
        if not self.one_array:
            return (0,) * self.num_layers
        pages = [self.kv_groups[g].num_pages for g in self.layer_groups]
        return tuple(accumulate(pages, initial=0))[:-1]

    @property
    def array_pages(self) -> tuple[int, ...]:
        """Pages of each array: of all layers together, or of one."""
        pages = tuple(self.kv_groups[g].num_pages for g in self.layer_groups)
        return (sum(pages),) if self.one_array else pages

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of the first array of pages; others differ from it in their number of pages alone."""
        return self._array_shape(self.array_pages[0])

    def _array_shape(self, num_pages: int) -> tuple[int, ...]:
        if self.implementation in cpu_pages.IMPLEMENTATIONS:
            return cpu_pages.page_shape(num_pages, self.num_kv_heads, self.page_size, self.head_dim)
        return (num_pages, self.num_kv_heads, self.page_size, 2 * self.head_dim)

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that fit, the null page left out: in the group that has the most pages."""
        return (self.num_pages - 1) * self.page_size

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, in whole registers of lanes for the TPU kernels: as it lies in memory."""
        return self.num_layers * self.layer_page_bytes

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        lanes = 2 * self.head_dim
        if self.implementation == "tpu":
            lanes = -(-lanes // TPU_LANES) * TPU_LANES
        elements = self.num_kv_heads * self.page_size * lanes
        return elements * ml_dtypes_itemsize(self.dtype)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool, the null page included."""
        return sum(len(group.layers) * group.num_pages for group in self.kv_groups) * self.layer_page_bytes

    def pages_per_sequence(self, num_tokens: int, step_tokens: int) -> tuple[int, ...]:
        """Of each group the most pages that a sequence of `num_tokens` holds, with so many tokens of it in a step."""
        return tuple(
            most_pages(num_tokens, self.page_size, group.window, step_tokens) for group in self.kv_groups
        )

    def sized(self, num_pages: int, per_sequence: Sequence[int]) -> "KVCacheSpec":
        """The spec with so many pages in its largest group, and in the others room for as many sequences.

        Args:
          per_sequence: pages of a longest sequence in each group (`pages_per_sequence`).
        """
        if not self.groups:
            return replace(self, num_pages=num_pages)
        usable, most = num_pages - 1, max(per_sequence)
        groups = tuple(
            replace(group, num_pages=1 + max(min(n, usable), -(-usable * n // most)))
            for group, n in zip(self.groups, per_sequence, strict=True)
        )
        return replace(self, num_pages=num_pages, groups=groups)

    def pages_in(self, num_bytes: float, per_sequence: Sequence[int]) -> int:
        """The largest num_pages with which the spec, `sized`, takes at most so many bytes; below 2 there is none."""
        if not self.groups:
            return int(num_bytes // self.bytes_per_page)
        low, high = 1, max(1, int(num_bytes // self.layer_page_bytes)) + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.sized(middle, per_sequence).total_bytes <= num_bytes
            low, high = (middle, high) if fits else (low, middle)
        return low

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
    dtype = jnp.dtype(spec.dtype)
    shapes = [jax.ShapeDtypeStruct(spec._array_shape(num_pages), dtype) for num_pages in spec.array_pages]
    on_cpu = spec.implementation in cpu_pages.IMPLEMENTATIONS
    pages = tuple(cpu_pages.unwritten(x) if on_cpu else jnp.zeros(x.shape, dtype) for x in shapes)
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
      table_row: i32[P], the row's page table of the layer's group. Pages behind a window that were given back
        are read as the null page is.
      kv_len: resident tokens, static.
    """
    used = table_row[: pages_needed(kv_len, cache.spec.page_size)]
    pages = cache.pages[0 if cache.spec.one_array else layer][cache.spec.layer_starts[layer] + used]
    if cpu_pages.is_cpu_layout(pages):
        pages = cpu_pages.to_contract(pages, cache.spec.head_dim)
    tokens = jnp.swapaxes(pages, 1, 2).reshape(-1, cache.spec.num_kv_heads, 2 * cache.spec.head_dim)[:kv_len]
    return tokens[..., : cache.spec.head_dim], tokens[..., cache.spec.head_dim :]


PageIds = jax.Array | Sequence[jax.Array]  # i32[M]; of several groups one of each


def copy_pages(cache: KVCache, source: PageIds, target: PageIds) -> KVCache:
    """Copy whole pages `source` i32[M] over pages `target` i32[M] in every layer; of several groups one of each.

    Pad both with 0: the null page may be copied onto itself any number of times.
    """
    sources, targets = _in_arrays(cache.spec, source), _in_arrays(cache.spec, target)

    def copied(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(a.at[t].set(a[s]) for a, s, t in zip(arrays, sources, targets, strict=True))

    return _map_arrays(cache, copied)


def export_pages(cache: KVCache, page_ids: PageIds) -> KVCache:
    """The contents of `page_ids` i32[M] as a cache of M pages, to be moved elsewhere; of several groups one of each."""
    ids = _in_arrays(cache.spec, page_ids)
    counts = [len(of_group) for of_group in _by_group(cache.spec, page_ids)]
    out = _map_arrays(cache, lambda arrays: tuple(a[i] for a, i in zip(arrays, ids, strict=True)))
    return replace(out, spec=_resized(cache.spec, counts))


def import_pages(cache: KVCache, exported: KVCache, page_ids: PageIds) -> KVCache:
    """Write pages that `export_pages` returned into `page_ids` i32[M] of this cache; of several groups one of each.

    Raises:
      ValueError: the two caches differ in more than their number of pages.
    """
    if _resized(exported.spec, [group.num_pages for group in cache.spec.kv_groups]) != cache.spec:
        raise ValueError(f"pages of {exported.spec} cannot be imported into a cache of {cache.spec}")
    ids = _in_arrays(cache.spec, page_ids)

    def written(arrays: Sequence[jax.Array], others: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(a.at[i].set(b) for a, i, b in zip(arrays, ids, others, strict=True))

    scales = cache.scales
    if scales is not None and exported.scales is not None:
        scales = written(scales, exported.scales)
    return replace(cache, pages=written(cache.pages, exported.pages), scales=scales)


def _by_group(spec: KVCacheSpec, page_ids: PageIds) -> Sequence[jax.Array]:
    one = len(spec.kv_groups) == 1 and getattr(page_ids, "ndim", 0) == 1
    return [page_ids] if one else page_ids  # type: ignore[list-item, return-value]


def _in_arrays(spec: KVCacheSpec, page_ids: PageIds) -> tuple[jax.Array, ...]:
    """Of each array where the pages stand in it: i32[M], or i32[all layers' M] where it is one for all."""
    by_group = _by_group(spec, page_ids)
    ids = [start + by_group[g] for start, g in zip(spec.layer_starts, spec.layer_groups, strict=True)]
    return (jnp.concatenate(ids),) if spec.one_array else tuple(ids)


def _resized(spec: KVCacheSpec, num_pages: Sequence[int]) -> KVCacheSpec:
    # A one-page export is legal although a one-page pool is not, so the spec keeps at least two.
    sizes = [max(n, 2) for n in num_pages]
    groups = tuple(replace(group, num_pages=n) for group, n in zip(spec.groups, sizes, strict=False))
    return replace(spec, num_pages=max(sizes), groups=groups)


def _map_arrays(cache: KVCache, function: Callable[..., tuple[jax.Array, ...]]) -> KVCache:
    return replace(
        cache, pages=function(cache.pages), scales=None if cache.scales is None else function(cache.scales)
    )
