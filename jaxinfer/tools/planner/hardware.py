"""Facts of chips: named ones from hardware.toml, a user's own file, or this machine's CPU, measured once.

A `Hardware` is per JAX device, since that is what weights and pages are divided over; a chip may be several.
"""

import json
import os
import platform
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.options.device_facts import DeviceFacts, capability, instruction_sets

FACTS = Path(__file__).parent / "hardware.toml"
PEAK_DTYPES = ("bfloat16", "float16", "float8", "int8", "float32")
NUMBERS = ("memory_bytes", "memory_bandwidth", "interconnect_bandwidth")
REQUIRED = ("title", "platform", "device_kind", "devices_per_chip", "memory_bytes", "memory_bandwidth")


@dataclass(frozen=True)
class Hardware:
    """One JAX device. Peaks are dense FLOP/s by dtype of the operands; bandwidths are bytes/s."""

    name: str
    title: str
    platform: str  # cpu | gpu | tpu
    device_kind: str
    devices_per_chip: int
    memory_bytes: int
    memory_bandwidth: float
    interconnect_bandwidth: float | None  # both directions together
    peaks: Mapping[str, float]
    sources: Mapping[str, str]  # where each number comes from
    compute_capability: tuple[int, int] = (0, 0)  # of an NVIDIA GPU

    @property
    def device_facts(self) -> DeviceFacts:
        """What an engine would take its decisions from, on such a device that is free."""
        facts = DeviceFacts(
            self.platform, self.device_kind, self.memory_bytes, compute_capability=self.compute_capability
        )
        return facts if self.platform != "cpu" else replace(facts, instruction_sets=instruction_sets())

    def peak(self, dtype: str) -> float:
        """FLOP/s of matrix products with operands of `dtype`.

        Raises:
          ValueError: there is no figure for it.
        """
        key = "float8" if dtype.startswith("float8") else dtype
        if key not in self.peaks:
            raise ValueError(
                f"{self.title} has no published peak for {dtype}; known are {', '.join(sorted(self.peaks))}"
            )
        return self.peaks[key]


def names() -> tuple[str, ...]:
    """Names that `load` knows, beside files."""
    return (*_entries(FACTS), "cpu")


def load(name: str) -> Hardware:
    """The facts of a chip by name, "auto" for the device at hand, or from a TOML file with one entry.

    Raises:
      ValueError: the name is unknown, or the file lacks a number or its source.
    """
    if name == "cpu":
        return cpu()
    if name == "auto":
        return attached(jax.devices()[0])
    entries = _entries(FACTS)
    path = Path(name).expanduser()
    if path.suffix == ".toml":
        if not path.is_file():
            raise ValueError(f"hardware file {name} does not exist")
        own = _entries(path)
        if len(own) != 1:
            raise ValueError(
                f"hardware file {name} has {len(own)} entries; give one chip per file, as [name] with its "
                "numbers"
            )
        ((name, entry),) = own.items()
        return _parse(name, _merged(entries.get(name, {}), entry), str(path))
    if name not in entries:
        raise ValueError(
            f"hardware {name!r} is not known; known are {', '.join(names())}, or give a .toml file"
        )
    return _parse(name, entries[name], str(FACTS))


def attached(device: jax.Device) -> Hardware:
    """The facts of the device that this process has.

    Raises:
      ValueError: it is an accelerator without an entry.
    """
    if device.platform == "cpu":
        return cpu()
    for name, entry in _entries(FACTS).items():
        if entry["device_kind"] == device.device_kind:
            return _parse(name, entry, str(FACTS))
    raise ValueError(
        f"no facts are known of the attached {device.device_kind!r}; name one of {', '.join(names())}, or give "
        "a .toml file"
    )


def known(device: jax.Device) -> Hardware | None:
    """Likewise, or None where nothing is known yet: a CPU is not measured for it."""
    if device.platform == "cpu":
        path, machine = _kept_at(None), _machine()
        kept = json.loads(path.read_text()) if path.is_file() else {}
        return cpu() if kept.get("machine") == machine else None
    try:
        return attached(device)
    except ValueError:
        return None


def _entries(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"hardware file {path} is not valid TOML: {error}") from error


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {**base, **own, "peak": {**base.get("peak", {}), **own.get("peak", {})}}


def _parse(name: str, entry: Mapping[str, Any], where: str) -> Hardware:
    lacking = [key for key in REQUIRED if key not in entry]
    unknown = sorted(set(entry) - set(REQUIRED) - set(NUMBERS) - {"peak", "compute_capability"})
    wrong = sorted(set(entry.get("peak", {})) - set(PEAK_DTYPES))
    if lacking or unknown or wrong or not entry.get("peak"):
        raise ValueError(
            f"hardware {name!r} in {where}: missing {lacking or 'nothing'}, not understood "
            f"{unknown + wrong or 'nothing'}; peaks are given for at least one of {', '.join(PEAK_DTYPES)}"
        )
    facts = {key: entry[key] for key in NUMBERS if key in entry}
    facts |= {f"peak.{dtype}": fact for dtype, fact in entry["peak"].items()}
    for key, fact in facts.items():
        if not isinstance(fact, Mapping) or not fact.get("source") or not fact.get("value", 0) > 0:
            raise ValueError(
                f"hardware {name!r} in {where}: {key} must be {{ value = a positive number, source = where it is "
                "from }"
            )
    share = entry["devices_per_chip"]
    interconnect = facts.get("interconnect_bandwidth")
    return Hardware(
        name=name,
        title=entry["title"],
        platform=entry["platform"],
        device_kind=entry["device_kind"],
        devices_per_chip=share,
        memory_bytes=int(facts["memory_bytes"]["value"]) // share,
        memory_bandwidth=facts["memory_bandwidth"]["value"] / share,
        interconnect_bandwidth=None if interconnect is None else interconnect["value"] / share,
        peaks={dtype: fact["value"] / share for dtype, fact in entry["peak"].items()},
        sources={key: fact["source"] for key, fact in facts.items()},
        compute_capability=capability(entry.get("compute_capability", "")),
    )


# The CPU at hand


def cpu(cache_folder: Path | None = None, *, again: bool = False) -> Hardware:
    """This machine's CPU as JAX uses it: peaks and bandwidth measured once and kept in the user cache folder.

    Args:
      cache_folder: where cpu_peaks.json lies; None takes the user cache folder.
      again: measure although there is a file.
    """
    path, machine = _kept_at(cache_folder), _machine()
    kept = json.loads(path.read_text()) if path.is_file() else {}
    if again or kept.get("machine") != machine:
        kept = {
            "machine": machine,
            "when": datetime.now().isoformat(timespec="seconds"),
            "load_average": os.getloadavg()[0],
            **measure_cpu(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(kept, indent=1))
        os.replace(temporary, path)
    busy = kept["load_average"] > 0.5 * (os.cpu_count() or 1)
    source = (
        (
            "too low, since other programs ran beside it: use --remeasure-cpu on an idle machine; "
            if busy
            else ""
        )
        + f"measured {kept['when']} on this machine ({machine}) at load average {kept['load_average']:.1f}, "
        f"the best of several runs, kept in {path}"
    )
    return Hardware(
        name="cpu",
        title=f"this CPU ({machine})",
        platform="cpu",
        device_kind="cpu",
        devices_per_chip=1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_bandwidth=kept["memory_bandwidth"],
        interconnect_bandwidth=None,
        peaks=kept["peaks"],
        sources={"memory_bytes": "physical memory of this machine"}
        | dict.fromkeys(["memory_bandwidth", *(f"peak.{dtype}" for dtype in kept["peaks"])], source),
    )


def measure_cpu(
    sizes: tuple[int, ...] = (512, 1024), stream_bytes: int = 128 << 20, seconds: float = 0.5
) -> dict[str, Any]:
    """{"peaks": FLOP/s by dtype, "memory_bandwidth": bytes/s} of JAX's CPU device.

    Args:
      sizes: of the square matrices that are multiplied; the best one counts.
      stream_bytes: of the matrix that a vector is multiplied with (what decoding does); far over the caches.
      seconds: spent on each figure; the best run counts, so that what else the machine does matters less.
    """
    device = jax.devices("cpu")[0]
    peaks = {}
    for dtype in ("float32", "bfloat16", "int8"):
        out = "int32" if dtype == "int8" else "float32"
        multiply = jax.jit(partial(jnp.dot, precision="highest", preferred_element_type=out))
        squares = [jax.device_put(np.ones((size, size), jnp.dtype(dtype)), device) for size in sizes]
        peaks[dtype] = max(2 * len(x) ** 3 / _best_time(multiply, (x, x), seconds) for x in squares)
    matrix = jax.device_put(np.ones((stream_bytes // 4096, 1024), np.float32), device)
    vector = jax.device_put(np.ones(1024, np.float32), device)
    bandwidth = matrix.nbytes / _best_time(jax.jit(jnp.dot), (matrix, vector), seconds)
    return {"peaks": peaks, "memory_bandwidth": bandwidth}


def _best_time(function: Callable[..., jax.Array], arguments: tuple[Any, ...], seconds: float) -> float:
    function(*arguments).block_until_ready()  # compiles
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        function(*arguments).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best


def _kept_at(cache_folder: Path | None) -> Path:
    if cache_folder is None:
        import platformdirs  # here: device checks run where it is not installed

        cache_folder = platformdirs.user_cache_path("jaxinfer")
    return cache_folder / "cpu_peaks.json"


def _machine() -> str:
    return f"{_cpu_name()}, {os.cpu_count()} CPUs, jaxlib {version('jaxlib')}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
