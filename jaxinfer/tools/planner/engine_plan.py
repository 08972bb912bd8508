"""What an engine will allocate on the device at hand, decided and checked before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jaxinfer import defaults, models
from jaxinfer.kv_cache import KVCacheSpec, pages_needed
from jaxinfer.tools.planner import temporaries
from jaxinfer.tools.planner.memory import row_state_bytes
from jaxinfer.tools.planner.shape import ModelShape, read_config


class PlanError(ValueError):
    """Settings that cannot work here, in one sentence with the numbers and the nearest settings that can."""


@dataclass(frozen=True)
class EnginePlan:
    """Bytes on one device. `weights_bytes` and `pool_bytes` are exact, `temporaries_bytes` is an estimate."""

    weights_bytes: int
    num_pages: int  # the null page included
    page_size: int
    pool_bytes: int
    row_state_bytes: int
    temporaries_bytes: int
    free_bytes: int  # before the weights are loaded
    max_model_len: int
    reason: str  # which option or default the size of the pool is from

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the pool."""
        return (self.num_pages - 1) * self.page_size

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.pool_bytes + self.row_state_bytes + self.temporaries_bytes

    def lines(self) -> list[str]:
        """The plan for people, to be logged at start."""
        full = self.num_tokens // self.max_model_len
        return [
            f"plan: {_size(self.weights_bytes)} of weights, {_size(self.pool_bytes)} of pages, "
            f"{_size(self.row_state_bytes)} of row state, about {_size(self.temporaries_bytes)} of temporaries "
            f"(estimate); {_size(self.free_bytes)} are free",
            f"plan: {self.num_pages - 1} pages x {self.page_size} tokens, from {self.reason}: "
            f"{self.num_tokens} tokens fit, {full} sequences of max_model_len={self.max_model_len}"
            + ("" if full else " (longer requests are refused one by one)"),
        ]


def cache_spec(
    config: Any,
    device: defaults.Device,
    *,
    max_model_len: int,
    page_size: int | str = "auto",
    implementation: str = "auto",
) -> tuple[KVCacheSpec, defaults.Choice]:
    """The cache of an engine on a device, its number of pages still to be decided, and the kernels that serve it."""
    chosen = defaults.implementation(implementation, device, config.dtype, config.head_dim)
    spec = KVCacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=defaults.page_size(page_size, device, max_model_len),
        num_pages=2,
        dtype=config.dtype,
        implementation=chosen.value,
        compute_capability=defaults.compute_capability(device),
    )
    return spec, chosen


def plan_engine(
    model: str | Path,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    page_size: int | str = "auto",
    gpu_memory_utilization: float | None = None,
) -> EnginePlan:
    """The plan that `LLM(model, ...)` would run here; options and defaults are those of `LLM`. No weights are read.

    Raises:
      PlanError: it would be refused.
    """
    device = jax.devices()[0]
    hf = read_config(model)
    module = models.for_config(hf)
    config = module.Config.from_hf(hf, dtype=defaults.dtype(dtype, device))
    length = max_model_len or config.max_position_embeddings
    spec, _ = cache_spec(config, device, max_model_len=length, page_size=page_size)
    return check(
        module,
        config,
        device,
        spec,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
    )


def check(
    module: ModuleType,
    config: Any,
    device: defaults.Device,
    spec: KVCacheSpec,
    *,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_pages: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float | None = None,
    weights_bytes: int | None = None,
    weights_loaded: bool = False,
) -> EnginePlan:
    """Decides the number of pages and checks that all of it fits, before weights are read.

    Args:
      module, config: the model file and its config.
      device: where weights and pages will be.
      spec: of the cache; its `num_pages` is ignored.
      max_model_len: as the user gave it; None is the model's own maximum, and then a smaller pool is no error.
      max_num_seqs, max_num_batched_tokens: rows and tokens of the largest step.
      num_pages, kv_cache_memory_bytes, gpu_memory_utilization: size of the pool; at most one of them.
      weights_bytes: of weights in another form than the config's dtype (quantized); None computes them.
      weights_loaded: whether they are already on the device.

    Returns:
      The plan; give `plan.num_pages` to the spec and `plan.lines()` to the log.

    Raises:
      PlanError: something does not fit; the message names the nearest settings that do.
      ValueError: two options set the size of the pool.
    """
    shape = ModelShape.from_config(module, config)
    length = max_model_len or config.max_position_embeddings
    full_sequence = 1 + pages_needed(length, spec.page_size)
    weights = shape.weights_bytes() if weights_bytes is None else weights_bytes
    temporary = temporaries.estimate(
        shape,
        num_tokens=max(max_num_batched_tokens, max_num_seqs),
        num_rows=max_num_seqs,
        platform=device.platform,
    )
    rows = row_state_bytes(max_num_seqs, length)
    free = _free_memory(device)
    room = free - (0 if weights_loaded else weights) - rows - temporary
    if room < 2 * spec.bytes_per_page:
        raise PlanError(_no_room(shape, weights, rows + temporary, free, weights_loaded))

    def shared(utilization: float | None) -> tuple[int, str]:
        """(pages that a share of the memory leaves, where the number comes from)."""
        budget, reason = defaults.memory_budget(device, utilization, 0 if weights_loaded else weights)
        return min(int(budget // spec.bytes_per_page), 1 + max_num_seqs * (full_sequence - 1)), reason

    most = room // spec.bytes_per_page
    reason = _reason(num_pages, kv_cache_memory_bytes, gpu_memory_utilization)
    if num_pages is not None:
        pages = num_pages
    elif kv_cache_memory_bytes is not None:
        pages = kv_cache_memory_bytes // spec.bytes_per_page
    else:
        pages, reason = shared(gpu_memory_utilization)
        if gpu_memory_utilization is None and pages > most:  # nobody asked for so many
            pages, reason = most, "all that weights and temporaries leave"
    wanted = full_sequence if max_model_len is not None else 2
    if pages > most:
        raise PlanError(
            f"{reason} asks for {pages} pages, {_size(pages * spec.bytes_per_page)}, and after "
            f"{_size(weights)} of weights {_size(max(0, room))} of {_size(free)} are left; the nearest is "
            f"num_pages={most} ({(most - 1) * spec.page_size} tokens)"
        )
    if pages < wanted:
        # Tried one by one, so that what is named passes this very check.
        shares = (hundredths / 100 for hundredths in range(1, 101))
        utilization = next((share for share in shares if wanted <= shared(share)[0] <= most), None)
        raise PlanError(
            f"{reason} leaves {max(0, pages)} pages of {spec.page_size} tokens, and one sequence of {length} "
            f"tokens needs {wanted} with the null page; the nearest are "
            + ", or ".join(_nearest(spec, pages, wanted, most, max_model_len, utilization))
        )
    return EnginePlan(
        weights_bytes=weights,
        num_pages=pages,
        page_size=spec.page_size,
        pool_bytes=pages * spec.bytes_per_page,
        row_state_bytes=rows,
        temporaries_bytes=temporary,
        free_bytes=free,
        max_model_len=length,
        reason=reason,
    )


def _reason(num_pages: int | None, kv_bytes: int | None, utilization: float | None) -> str:
    given = {
        f"num_pages={num_pages}": num_pages,
        f"kv_cache_memory_bytes={kv_bytes}": kv_bytes,
        f"gpu_memory_utilization={utilization}": utilization,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} both set the size of the KV cache; give one of them")
    return named[0] if named else "the default"


def _free_memory(device: defaults.Device) -> int:
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return defaults.available_memory()


def _no_room(shape: ModelShape, weights: int, beside: int, free: int, loaded: bool) -> str:
    text = (
        f"the model does not fit: {_size(weights)} of {shape.dtype} weights and {_size(beside)} beside them "
    )
    text += f"(estimate), and {_size(free)} are free{' after the weights' if loaded else ''}; "
    if shape.dtype == "float32" and not loaded and weights // 2 + beside < free:
        return text + f"the nearest is dtype='bfloat16' with {_size(weights // 2)} of weights"
    return text + "take a smaller model, lower max_num_batched_tokens, or more memory"


def _nearest(
    spec: KVCacheSpec,
    pages: int,
    wanted: int,
    most: int,
    max_model_len: int | None,
    utilization: float | None,
) -> list[str]:
    found = []
    if max_model_len is not None and pages >= 2:
        found.append(f"max_model_len={(pages - 1) * spec.page_size}")
    if wanted <= most:
        found.append(f"num_pages={wanted} ({_size(wanted * spec.bytes_per_page)})")
        if utilization is not None:
            found.append(f"gpu_memory_utilization={utilization:g}")
    elif most >= 2:
        found.append(f"max_model_len={(most - 1) * spec.page_size} with num_pages={most}, all that is free")
    return found


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} bytes"
