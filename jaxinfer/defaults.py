"""What "auto" means: small tables by platform, with the reason beside each choice. Nothing is timed here."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxinfer.pallas_kernels.ragged_paged_attention.gpu_tuning import DECODE_LIMITS
from jaxinfer.programs.compile_cache import features_line
from jaxinfer.tiles import TILE

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


class Device(Protocol):
    """What is asked of a `jax.Device` here; a GPU has `compute_capability` too."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...

    def memory_stats(self) -> dict[str, int] | None: ...


@dataclass(frozen=True)
class Choice:
    """A setting and the reason for it, to be said once in the log."""

    value: Any
    reason: str


def implementation(name: str, device: Device, dtype: str, head_dim: int) -> Choice:
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
    capability = compute_capability(device)
    said = "{}.{}".format(*capability)
    if capability not in DECODE_LIMITS:
        return Choice("xla", f"the GPU kernels are not written for compute capability {said}")
    if dtype == "float32" or head_dim % 16 or not 32 <= head_dim <= 256:
        return Choice("xla", f"the GPU kernels do not take {dtype} with head_dim={head_dim}")
    if capability != (9, 0):
        return Choice("gpu_xla", f"decode has a kernel for compute capability {said}, prefill for 9.0 only")
    return Choice("gpu", "the device is a GPU of compute capability 9.0")


def compute_capability(device: Device) -> tuple[int, int]:
    """(major, minor) of an NVIDIA GPU; (0, 0) of everything else, where nothing looks at it."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def dtype(name: str, device: Device) -> str:
    """dtype of weights and activations."""
    if name == "auto":
        return DTYPES[device.platform]
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={name!r} must be auto, float32, bfloat16 or float16")
    return name


def matmul_precision(name: str | None, dtype: str) -> str | None:
    """Precision of products: `name`, or such that float32 means float32 on every device."""
    return "highest" if name is None and dtype == "float32" else name


def compiler_options(device: Device) -> dict[str, Any]:
    """Options of XLA's compiler for the programs of an engine on `device`."""
    features = cpu_features() if device.platform == "cpu" else frozenset()
    return next((options for feature, options in COMPILER_OPTIONS.items() if feature in features), {})


def few_rows(name: str, device: Device, plain: bool, has_blocks: bool) -> Choice:
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
    features = cpu_features()
    for feature, value in FEW_ROWS.items():
        if feature in features:
            return Choice(
                value, f"that was the faster one on a CPU with {feature}: exact values, float32 sums"
            )
    return Choice("full", f"on a CPU with none of {', '.join(FEW_ROWS)} nothing was measured")


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Names of the instruction sets of this CPU; none where the system does not tell."""
    return frozenset(features_line(cpuinfo).partition(":")[2].split())


def tile(batch_invariant: bool, device: Device, implementation: str, quantize: str | None) -> int | None:
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


def page_size(value: int | str, device: Device, max_model_len: int) -> int:
    """Tokens per page; never more than the smallest power of two that holds a whole sequence, or 8."""
    if value != "auto":
        return int(value)
    return min(PAGE_SIZES[device.platform], max(8, 1 << math.ceil(math.log2(max_model_len))))


def memory_budget(device: Device, utilization: float | None, weights_bytes: int) -> tuple[float, str]:
    """(bytes for the pool, where the number comes from), when `weights_bytes` are still to be loaded."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        share = ACCELERATOR_MEMORY_SHARE if utilization is None else utilization
        _check_share(share)
        # bytes_in_use: what this process holds already, on a second start the weights of the first engine too.
        used = stats["bytes_in_use"] + weights_bytes
        return stats["bytes_limit"] * (share - TEMPORARIES_SHARE) - used, f"gpu_memory_utilization={share:g}"
    available = available_memory()
    if utilization is not None:
        _check_share(utilization)
        return available * utilization - weights_bytes, f"gpu_memory_utilization={utilization:g}"
    budget = min(available * CPU_MEMORY_SHARE, CPU_POOL_BYTES)
    return budget, f"{CPU_MEMORY_SHARE:.0%} of the available memory, at most {CPU_POOL_BYTES >> 30} GiB"


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization={share} must be in (0, 1]")


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process can still use: of the host, or of its container where that is less."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # macOS tells the total only
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    try:
        limit, current = ((cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:  # no container, or none with cgroups of version 2
        return available
    if limit == "max":
        return available
    # Pages of files that were read count as used, and the kernel takes them back when memory is asked for.
    used = int(current) - int(stat["inactive_file"])
    return max(0, min(available, int(limit) - used))
