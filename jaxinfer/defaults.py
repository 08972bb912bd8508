"""What "auto" means: small tables by platform, with the reason beside each choice. Nothing is timed here."""

import math
import os
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.kv_cache import KVCacheSpec, pages_needed

# platform of a jax device -> dtype of weights and activations
DTYPES = {"cpu": "float32", "gpu": "bfloat16", "tpu": "bfloat16"}
# platform -> (tokens per page, why)
PAGE_SIZES = {"cpu": 64, "gpu": 64, "tpu": 128}
# platform -> (kernels that write and read pages, why)
IMPLEMENTATIONS = {
    "cpu": ("xla", "the device is a CPU"),
    "gpu": ("gpu", "the device is a GPU"),
    "tpu": ("tpu", "the device is a TPU"),
}
CPU_MEMORY_SHARE = 0.25  # of the memory that is available, for the pool, when nothing else is said
ACCELERATOR_MEMORY_SHARE = 0.9  # of the device, for weights, pool and temporaries together
TEMPORARIES_SHARE = 0.05  # of an accelerator's memory, kept free for a step's own arrays


@dataclass(frozen=True)
class Choice:
    """A setting and the reason for it, to be said once in the log."""

    value: Any
    reason: str


def implementation(name: str, device: jax.Device) -> Choice:
    """Which kernels write and read pages."""
    if name != "auto":
        return Choice(name, "asked for by name")
    return Choice(*IMPLEMENTATIONS[device.platform])


def dtype(name: str, device: jax.Device) -> str:
    """dtype of weights and activations."""
    if name == "auto":
        return DTYPES[device.platform]
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={name!r} must be auto, float32, bfloat16 or float16")
    return name


def page_size(value: int | str, device: jax.Device, max_model_len: int) -> int:
    """Tokens per page; never more than the smallest power of two that holds a whole sequence, or 8."""
    if value != "auto":
        return int(value)
    return min(PAGE_SIZES[device.platform], max(8, 1 << math.ceil(math.log2(max_model_len))))


def num_pages(
    spec: KVCacheSpec,
    device: jax.Device,
    *,
    max_model_len: int,
    max_num_seqs: int,
    weights_bytes: int,
    num_pages: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float | None = None,
) -> Choice:
    """Pages of the pool, the null page included, from whichever of the three options is given.

    With none: as many as all rows at full length can use, within a share of the memory that is available.

    Raises:
      ValueError: more than one option is given, or the pool would not hold one page.
    """
    given = {
        "num_pages": num_pages,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} both set the size of the KV cache; give one of them")
    if num_pages is not None:
        return Choice(num_pages, "num_pages")
    if kv_cache_memory_bytes is not None:
        budget, reason = float(kv_cache_memory_bytes), "kv_cache_memory_bytes"
    else:
        budget, reason = _memory_budget(device, gpu_memory_utilization, weights_bytes)
    pages = int(budget // spec.bytes_per_page)
    if kv_cache_memory_bytes is None:
        pages = min(pages, 1 + max_num_seqs * pages_needed(max_model_len, spec.page_size))
    if pages < 2:
        raise ValueError(
            f"{reason} leaves {max(0, int(budget))} bytes for the KV cache, and two pages need "
            f"{2 * spec.bytes_per_page}; give it more memory, or lower page_size"
        )
    return Choice(pages, reason)


def _memory_budget(device: jax.Device, utilization: float | None, weights_bytes: int) -> tuple[float, str]:
    """(bytes for the pool, where the number comes from)."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        share = ACCELERATOR_MEMORY_SHARE if utilization is None else utilization
        _check_share(share)
        # The weights are loaded: bytes_in_use has them, and whatever else this process holds.
        free = stats["bytes_limit"] * (share - TEMPORARIES_SHARE) - stats["bytes_in_use"]
        return free, f"gpu_memory_utilization={share:g}"
    available = _available_memory()
    if utilization is not None:
        _check_share(utilization)
        return available * utilization - weights_bytes, f"gpu_memory_utilization={utilization:g}"
    return available * CPU_MEMORY_SHARE, f"{CPU_MEMORY_SHARE:.0%} of the available memory"


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization={share} must be in (0, 1]")


def _available_memory() -> int:
    """Bytes of memory that can still be used on this host."""
    try:
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # macOS tells the total only
