"""What is known of a device, as a value: decisions rest on it alone, so they can be made for a chip that is absent."""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxinfer.programs.compile_cache import features_line

NO_LIMIT = 2**60  # bytes: what version 1 of cgroups says where there is no limit is more


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


def available_memory(
    meminfo: Path = Path("/proc/meminfo"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    own_cgroups: Path = Path("/proc/self/cgroup"),
) -> int:
    """Bytes of memory that this process can still use: of the host, or of a container or job where that is less.

    Limits of cgroups hold for all below them, so each from this process's own up to the root counts: systemd and Slurm
    set them on inner ones. Both versions are read (docs.kernel.org/admin-guide/cgroup-v2.html, cgroup-v1/memory.html).
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # macOS tells the total only
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    left = [_left_in_cgroup(folder) for folder in _cgroups(cgroup, own_cgroups)]
    return max(0, min([available, *(size for size in left if size is not None)]))


def _cgroups(root: Path, own: Path) -> list[Path]:
    """Folders of this process's memory cgroups and of all above them, of both versions."""
    paths = {
        "": "/",
        "memory": "/",
    }  # controller -> path; in a container it is often the root that is mounted
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():  # number:controllers:path, with no controllers in version 2
            _, controllers, path = line.split(":", 2)
            for name in controllers.split(","):
                if name in paths:
                    paths[name] = path
    folders = []
    for controller, path in paths.items():
        inner = root / controller / path.lstrip("/")
        top = root / controller
        folders += [folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents]
    return folders


def _left_in_cgroup(folder: Path) -> int | None:
    """Bytes up to the limit of one cgroup; None where it has none, or is not there."""
    for limit_name, used_name, files in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, used = ((folder / name).read_text().strip() for name in (limit_name, used_name))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit == "max" or int(limit) >= NO_LIMIT:
            return None
        # Pages of files that were read count as used, and the kernel takes them back when memory is asked for.
        return int(limit) - (int(used) - int(stat.get(files, 0)))
    return None
