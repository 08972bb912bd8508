"""What is known of a device, as a value: decisions rest on it alone, so they can be made for a chip that is absent."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxinfer.programs.compile_cache import features_line


@dataclass(frozen=True)
class DeviceFacts:
    """One JAX device. Only this module asks a device itself."""

    platform: str  # cpu | gpu | tpu
    device_kind: str
    memory_bytes: int  # that this process can have on it, what it holds already included
    memory_in_use: int = 0  # bytes of them that it holds already
    compute_capability: tuple[int, int] = (0, 0)  # (major, minor) of an NVIDIA GPU
    instruction_sets: frozenset[str] = frozenset()  # of a CPU: avx2, avx512f, ...

    @property
    def memory_free(self) -> int:
        """Bytes that can still be allocated."""
        return self.memory_bytes - self.memory_in_use


def facts_of(device: jax.Device) -> DeviceFacts:
    """The facts of a device that is here, at this moment.

    A device that does not tell its memory shares that of the host.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    known = stats if stats and "bytes_limit" in stats else {"bytes_limit": available_memory()}
    return DeviceFacts(
        platform=device.platform,
        device_kind=device.device_kind,
        memory_bytes=known["bytes_limit"],
        memory_in_use=known.get("bytes_in_use", 0),
        compute_capability=capability(str(getattr(device, "compute_capability", ""))),
        instruction_sets=instruction_sets() if device.platform == "cpu" else frozenset(),
    )


def capability(text: str) -> tuple[int, int]:
    """(major, minor) from "9.0"; (0, 0) from anything else, which is no GPU of NVIDIA."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Names of the instruction sets of this CPU; none where the system does not tell."""
    return frozenset(features_line(cpuinfo).partition(":")[2].split())


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
