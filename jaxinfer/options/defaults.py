"""What "auto" means: small tables by platform, with the reason beside each choice. Nothing is timed here."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.options.device_facts import DeviceFacts
from jaxinfer.pallas_kernels.quantized_matmul import gpu_schedule
from jaxinfer.pallas_kernels.quantized_matmul.tuning import w8a8_products
from jaxinfer.pallas_kernels.ragged_paged_attention.gpu_tuning import DECODE_LIMITS
from jaxinfer.programs.tiles import TILE

# platform of a jax device -> dtype of weights and activations
DTYPES = {"cpu": "float32", "gpu": "bfloat16", "tpu": "bfloat16"}
# platform -> tokens per page
PAGE_SIZES = {"cpu": 64, "gpu": 64, "tpu": 128}
# instruction set of a CPU -> form of the matrices for few rows, where it was measured (log/cpu-products.md)
FEW_ROWS = {"avx2": "packed"}
# instruction set of a CPU -> options of XLA's compiler for it, where that was measured (log/cpu-products.md)
COMPILER_OPTIONS = {"avx512f": {"xla_cpu_prefer_vector_width": 512}}
# On a CPU, when nothing else is said: this share of the available memory, and not more than so many bytes (pages
# that nothing was written to take none yet).
CPU_MEMORY_SHARE, CPU_POOL_BYTES = 0.25, 2 << 30
ACCELERATOR_MEMORY_SHARE = 0.9  # of the device, for weights, pool and temporaries together
TEMPORARIES_SHARE = 0.05  # of an accelerator's memory, kept free for a step's own arrays


@dataclass(frozen=True)
class Choice:
    """A setting and the reason for it, to be said once in the log."""

    value: Any
    reason: str


def implementation(name: str, device: DeviceFacts, dtype: str, head_dim: int) -> Choice:
    """Which kernels write and read pages: `name`, or for "auto" the fastest that can run here.

    Raises ValueError for kernels of another accelerator; on a CPU all of them can be interpreted.
    """
    foreign = {"tpu": ("cpu", "gpu", "gpu_xla"), "gpu": ("cpu", "tpu")}.get(device.platform, ())
    if name in foreign:
        raise ValueError(
            f"implementation={name!r} has no kernels for {device.device_kind}, a {device.platform.upper()}: use "
            f"'auto', 'xla' or {device.platform!r}"
        )
    if name != "auto":
        return Choice(name, "asked for by name")
    if device.platform == "cpu":
        return Choice("cpu", "the device is a CPU")
    if device.platform == "tpu":
        if dtype == "float16":
            return Choice("xla", "the TPU kernels do not take float16")
        return Choice("tpu", "the device is a TPU")
    capability = "{}.{}".format(*device.compute_capability)
    if device.compute_capability not in DECODE_LIMITS:
        return Choice("xla", f"the GPU kernels are not written for compute capability {capability}")
    if dtype == "float32" or head_dim % 16 or not 32 <= head_dim <= 256:
        return Choice("xla", f"the GPU kernels do not take {dtype} with head_dim={head_dim}")
    if device.compute_capability != (9, 0):
        return Choice(
            "gpu_xla", f"decode has a kernel for compute capability {capability}, prefill for 9.0 only"
        )
    return Choice("gpu", "the device is a GPU of compute capability 9.0")


def dtype(name: str, platform: str) -> Choice:
    """dtype of weights and activations."""
    if name == "auto":
        return Choice(DTYPES[platform], f"the device is a {platform.upper()}")
    return Choice(name, "asked for by name")


def matmul_precision(name: str | None, dtype: str) -> Choice:
    """Precision of products: `name`, or such that float32 means float32 on every device."""
    check_matmul_precision(name)
    if name is not None:
        return Choice(name, "asked for by name")
    if dtype == "float32":
        return Choice("highest", "float32 means float32 on every device")
    return Choice(None, f"products are in {dtype}")


def check_matmul_precision(name: str | None) -> None:
    """Raises ValueError for a precision that JAX does not have."""
    try:
        jax.default_matmul_precision(name)
    except ValueError:
        raise ValueError(
            f"matmul_precision={name!r} is not known to JAX; give default, high, highest or None"
        ) from None


def products(device: DeviceFacts) -> Choice:
    """What products of weights and activations in int8 are computed in: the `w8a8` of quantized_matmul."""
    value = w8a8_products(device.device_kind)
    if value == "int8":
        return Choice(value, "exact sums in int32")
    return Choice(value, f"the matrix unit of {device.device_kind} has no int8 products")


def plain_matmul(device: DeviceFacts) -> Choice:
    """The kernels that multiply by plain matrices: a key of dense_matmul.IMPLEMENTATIONS and gated_mlp's."""
    if device.platform == "cpu":
        return Choice("cpu", "the device is a CPU")
    return Choice("xla", f"XLA's own products are the fast ones on a {device.platform.upper()}")


def quantized_matmul(device: DeviceFacts, shapes: Iterable[tuple[int, int]]) -> Choice:
    """The kernels that multiply by quantized matrices, one name for all of them.

    Args:
      shapes: (F, D), outputs and inputs of each matrix.
    """
    if device.platform in ("cpu", "tpu"):
        return Choice(device.platform, f"the device is a {device.platform.upper()}")
    for out_dim, in_dim in shapes:
        if refusal := gpu_schedule.refusal(out_dim, in_dim, device.compute_capability):
            return Choice("xla", refusal)
    return Choice("gpu", "the device is a GPU of compute capability 9.0")


def compiler_options(device: DeviceFacts) -> Choice:
    """Options of XLA's compiler for the programs of an engine on `device`."""
    for name, options in COMPILER_OPTIONS.items():
        if name in device.instruction_sets:
            return Choice(options, f"that was faster on a CPU with {name}")
    return Choice({}, "none was measured to be faster there")


def few_rows(name: str, device: DeviceFacts, plain: bool, has_blocks: bool) -> Choice:
    """How few rows are multiplied: "packed" by the codes of the file, or "full" by the matrices as all others.

    Raises ValueError for "packed" where it cannot be.
    """
    if name == "full":
        return Choice("full", "asked for by name")
    obstacle = None
    if device.platform != "cpu":
        obstacle = f"codes are read on CPUs alone, not on {device.platform}"
    elif not has_blocks:
        obstacle = "the model is no GGUF file with matrices in Q4_0, Q4_1 or Q8_0"
    elif not plain:
        obstacle = "quantize and batch_invariant multiply in one way alone"
    if name == "packed":
        if obstacle is not None:
            raise ValueError(f"few_rows='packed' cannot be: {obstacle}; leave it out")
        return Choice("packed", "asked for by name")
    if obstacle is not None:
        return Choice("full", obstacle)
    for feature, value in FEW_ROWS.items():
        if feature in device.instruction_sets:
            return Choice(
                value, f"that was the faster one on a CPU with {feature}: exact values, float32 sums"
            )
    return Choice("full", f"on a CPU with none of {', '.join(FEW_ROWS)} nothing was measured")


def tile(batch_invariant: bool, device: DeviceFacts, implementation: str, quantize: str | None) -> int | None:
    """Tokens that a step works on together, None for all. Raises ValueError where invariance is not proven."""
    if not batch_invariant:
        return None
    if quantize is not None:
        raise ValueError(
            f"batch_invariant=True is not proven with quantize={quantize!r}: leave one of them out"
        )
    if device.platform != "cpu" or implementation != "cpu":
        raise ValueError(
            "batch_invariant=True is proven on CPUs with implementation='cpu' alone, not on "
            f"{device.platform} with {implementation!r}: leave it out"
        )
    return TILE


def page_size(value: int | str, platform: str, max_model_len: int) -> Choice:
    """Tokens per page; never more than the smallest power of two that holds a whole sequence, or 8."""
    if value != "auto":
        return Choice(int(value), "asked for by number")
    whole = max(8, 1 << math.ceil(math.log2(max_model_len)))
    if whole < PAGE_SIZES[platform]:
        return Choice(whole, f"a page holds a whole sequence of {max_model_len} tokens")
    return Choice(PAGE_SIZES[platform], f"the device is a {platform.upper()}")


def memory_budget(device: DeviceFacts, utilization: float | None, weights_bytes: int) -> tuple[float, str]:
    """(bytes for the pool, where the number comes from), when `weights_bytes` are still to be loaded."""
    if device.platform != "cpu":
        share = ACCELERATOR_MEMORY_SHARE if utilization is None else utilization
        _check_share(share)
        # memory_in_use: what this process holds already, on a second start the weights of the first engine too.
        used = device.memory_in_use + weights_bytes
        return device.memory_bytes * (share - TEMPORARIES_SHARE) - used, f"gpu_memory_utilization={share:g}"
    if utilization is not None:
        _check_share(utilization)
        return device.memory_free * utilization - weights_bytes, f"gpu_memory_utilization={utilization:g}"
    budget = min(device.memory_free * CPU_MEMORY_SHARE, CPU_POOL_BYTES)
    return budget, f"{CPU_MEMORY_SHARE:.0%} of the available memory, at most {CPU_POOL_BYTES >> 30} GiB"


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization={share} must be in (0, 1]")
