"""What an engine will allocate on the device at hand, decided and checked before anything is loaded."""

from dataclasses import dataclass
from typing import Any

from jaxinfer.kv_cache import KVCacheSpec
from jaxinfer.models.spec import ModelModule
from jaxinfer.options import defaults
from jaxinfer.options.device_facts import DeviceFacts
from jaxinfer.options.llm_options import LLMOptions
from jaxinfer.text.wording import size
from jaxinfer.tools.planner import temporaries
from jaxinfer.tools.planner.memory import row_state_bytes
from jaxinfer.tools.planner.shape import ModelShape


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
            f"plan: {size(self.weights_bytes)} of weights, {size(self.pool_bytes)} of pages, "
            f"{size(self.row_state_bytes)} of row state, about {size(self.temporaries_bytes)} of temporaries "
            f"(estimate); {size(self.free_bytes)} are free",
            f"plan: {self.num_pages - 1} pages x {self.page_size} tokens, from {self.reason}: "
            f"{self.num_tokens} tokens fit, {full} sequences of max_model_len={self.max_model_len}"
            + ("" if full else " (longer requests are refused one by one)"),
        ]


def check(
    module: ModelModule,
    config: Any,
    device: DeviceFacts,
    spec: KVCacheSpec,
    options: LLMOptions,
    *,
    weights_bytes: int,
    weights_loaded: bool = False,
) -> EnginePlan:
    """Decides the number of pages and checks that all of it fits, before weights are read.

    Args:
      module, config: the model file and its config.
      device: where weights and pages will be.
      spec: of the cache; its `num_pages` is ignored.
      options: sizes of a step and of the pool. Without a max_model_len a pool for less than the model's own maximum
        is no error.
      weights_bytes: of weights in the form that runs.
      weights_loaded: whether they are already on the device.

    Returns:
      The plan; give `plan.num_pages` to the spec and `plan.lines()` to the log.

    Raises:
      PlanError: something does not fit; the message names the nearest settings that do.
    """
    shape = ModelShape.from_config(module, config)
    num_rows, max_model_len = options.max_num_seqs, options.max_model_len
    length = max_model_len or config.max_position_embeddings
    per_sequence = spec.pages_per_sequence(length, max(options.max_num_batched_tokens, options.decode_steps))
    full_sequence = 1 + max(per_sequence)
    temporary = temporaries.estimate(
        shape, num_tokens=options.max_num_batched_tokens, num_rows=num_rows, platform=device.platform
    )
    rows = row_state_bytes(num_rows, length)
    free, to_load = device.memory_free, 0 if weights_loaded else weights_bytes
    room = free - to_load - rows - temporary
    if room < spec.sized(2, per_sequence).total_bytes:
        raise PlanError(_no_room(shape, weights_bytes, rows + temporary, free, weights_loaded))

    def shared(utilization: float | None) -> tuple[int, str]:
        """(pages that a share of the memory leaves, where the number comes from)."""
        budget, reason = defaults.memory_budget(device, utilization, to_load)
        return min(spec.pages_in(budget, per_sequence), 1 + num_rows * (full_sequence - 1)), reason

    most = spec.pages_in(room, per_sequence)
    if options.num_pages is not None:
        pages, reason = options.num_pages, f"num_pages={options.num_pages}"
    elif options.kv_cache_memory_bytes is not None:
        pages = spec.pages_in(options.kv_cache_memory_bytes, per_sequence)
        reason = f"kv_cache_memory_bytes={options.kv_cache_memory_bytes}"
    else:
        pages, reason = shared(options.gpu_memory_utilization)
        if options.gpu_memory_utilization is None and pages > most:  # nobody asked for so many
            pages, reason = most, "all that weights and temporaries leave"
    wanted = full_sequence if max_model_len is not None else 2
    if pages > most:
        raise PlanError(
            f"{reason} asks for {pages} pages, {size(spec.sized(pages, per_sequence).total_bytes)}, and after "
            f"{size(weights_bytes)} of weights {size(max(0, room))} of {size(free)} are left; the nearest is "
            f"num_pages={most} ({(most - 1) * spec.page_size} tokens)"
        )
    if pages < wanted:
        # Tried one by one, so that what is named passes this very check.
        shares = (hundredths / 100 for hundredths in range(1, 101))
        utilization = next((share for share in shares if wanted <= shared(share)[0] <= most), None)
        raise PlanError(
            f"{reason} leaves {max(0, pages)} pages of {spec.page_size} tokens, and one sequence of {length} "
            f"tokens needs {wanted} with the null page; the nearest are "
            + ", or ".join(_nearest(spec, per_sequence, pages, wanted, most, max_model_len, utilization))
        )
    return EnginePlan(
        weights_bytes=weights_bytes,
        num_pages=pages,
        page_size=spec.page_size,
        pool_bytes=spec.sized(pages, per_sequence).total_bytes,
        row_state_bytes=rows,
        temporaries_bytes=temporary,
        free_bytes=free,
        max_model_len=length,
        reason=reason,
    )


def _no_room(shape: ModelShape, weights: int, beside: int, free: int, loaded: bool) -> str:
    text = f"the model does not fit: {size(weights)} of {shape.dtype} weights and {size(beside)} beside them "
    text += f"(estimate), and {size(free)} are free{' after the weights' if loaded else ''}; "
    if shape.dtype == "float32" and not loaded and weights // 2 + beside < free:
        return text + f"the nearest is dtype='bfloat16' with {size(weights // 2)} of weights"
    return text + "take a smaller model, lower max_num_batched_tokens, or more memory"


def _nearest(
    spec: KVCacheSpec,
    per_sequence: tuple[int, ...],
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
        found.append(f"num_pages={wanted} ({size(spec.sized(wanted, per_sequence).total_bytes)})")
        if utilization is not None:
            found.append(f"gpu_memory_utilization={utilization:g}")
    elif most >= 2:
        found.append(f"max_model_len={(most - 1) * spec.page_size} with num_pages={most}, all that is free")
    return found
