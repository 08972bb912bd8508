"""What fits: bytes of weights, KV cache, row state and temporaries on a device, and what is left."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax

from jaxinfer.kv_cache import pages_needed
from jaxinfer.options import defaults
from jaxinfer.options.llm_options import LLMOptions
from jaxinfer.sampling import sample
from jaxinfer.tools.planner import temporaries
from jaxinfer.tools.planner.hardware import Hardware
from jaxinfer.tools.planner.roofline import Setting

NO_LIMIT = 1 << 20  # batches above this are not looked for


@dataclass(frozen=True)
class Memory:
    """Bytes of all devices together, unless a name says otherwise. KV counts each copy of a head."""

    weights_bytes: int  # embeddings included
    embedding_bytes: int  # of them: embedding and head
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    kv_bytes_total: int  # of the batch
    pool_bytes: int  # whole pages for the batch, and the null page
    num_pages: int  # the null page included
    row_state_bytes: int
    temporaries_bytes: int
    temporaries_source: str  # "estimate" or "compiled"
    total_bytes: int
    usable_bytes: int  # the share of the memory that is given to the engine
    left_bytes: int  # negative: does not fit
    total_bytes_per_device: int
    memory_bytes_per_device: int
    largest_batch: int  # at this context; 0: not one sequence
    longest_context: int  # at this batch; 0: not one page each
    model_max_context: int

    @property
    def fits(self) -> bool:
        return self.left_bytes >= 0


@dataclass(frozen=True)
class Load:
    """What the memory is planned for."""

    batch: int
    context: int  # prompt + output tokens of each sequence
    page_size: int
    max_num_batched_tokens: int = LLMOptions.max_num_batched_tokens
    utilization: float = defaults.ACCELERATOR_MEMORY_SHARE

    def __post_init__(self) -> None:
        for name in ("batch", "context", "page_size", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization={self.utilization} must be in (0, 1]")


def default_page_size(hardware: Hardware, context: int) -> int:
    """Tokens per page that the engine takes on this hardware for sequences of `context` tokens."""
    return defaults.page_size("auto", hardware.platform, context).value


def plan_memory(setting: Setting, load: Load, temporaries_bytes: int | None = None) -> Memory:
    """The memory of a model under a load.

    Args:
      temporaries_bytes: of one device, read from a compiled program; None estimates them.
    """
    usable = int(setting.hardware.memory_bytes * load.utilization) * setting.num_devices
    now = _parts(setting, load, temporaries_bytes)
    total = sum(now.values())

    def fits(changed: Load) -> bool:
        return sum(_parts(setting, changed, temporaries_bytes).values()) <= usable

    shape = setting.shape
    sequence = round(shape.kv_bytes(setting.kv_dtype, load.context) * setting.kv_copies)
    return Memory(
        weights_bytes=now["weights"],
        embedding_bytes=shape.weights_bytes("embedding") + shape.weights_bytes("head"),
        kv_bytes_per_token=round(shape.kv_bytes_per_token(setting.kv_dtype) * setting.kv_copies),
        kv_bytes_per_sequence=sequence,
        kv_bytes_total=sequence * load.batch,
        pool_bytes=now["pool"],
        num_pages=1 + load.batch * pages_needed(load.context, load.page_size),
        row_state_bytes=now["row_state"],
        temporaries_bytes=now["temporaries"],
        temporaries_source="estimate" if temporaries_bytes is None else "compiled",
        total_bytes=total,
        usable_bytes=usable,
        left_bytes=usable - total,
        total_bytes_per_device=-(-total // setting.num_devices),
        memory_bytes_per_device=setting.hardware.memory_bytes,
        largest_batch=_largest(lambda n: fits(replace(load, batch=n)), NO_LIMIT),
        longest_context=_largest(
            lambda n: fits(replace(load, context=n)), max(shape.max_position_embeddings, load.context)
        ),
        model_max_context=shape.max_position_embeddings,
    )


def pool_bytes(setting: Setting, num_sequences: int, context: int, page_size: int) -> int:
    """Bytes of whole pages for sequences of `context` tokens, and of the null page, of all devices together."""
    whole = pages_needed(context, page_size) * page_size
    pages = num_sequences * setting.shape.kv_bytes(setting.kv_dtype, whole)
    null = setting.shape.kv_bytes_per_token(setting.kv_dtype) * page_size
    return round((pages + null) * setting.kv_copies)


def row_state_bytes(max_num_seqs: int, max_model_len: int) -> int:
    """Bytes of what running rows keep on a device between steps."""
    state = jax.eval_shape(lambda: sample.init_row_state(max_num_seqs, max_model_len))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _parts(setting: Setting, load: Load, temporaries_bytes: int | None) -> dict[str, int]:
    devices = setting.num_devices
    if temporaries_bytes is None:
        temporaries_bytes = temporaries.estimate(
            setting.shape,
            num_tokens=max(load.batch, load.max_num_batched_tokens),
            num_rows=load.batch,
            platform=setting.hardware.platform,
        )
    return {
        "weights": setting.shape.weights_bytes(quantize=setting.quantize),
        "pool": pool_bytes(setting, load.batch, load.context, load.page_size),
        "row_state": row_state_bytes(load.batch, load.context) * devices,
        "temporaries": temporaries_bytes * devices,
    }


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n in 1..limit that fits, by bisection (more never fits better); 0 if none."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
