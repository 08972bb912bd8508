"""What a job is, beside its output file: a job goes on only as what it was begun as."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.programs.compile_cache import cpu_features
from jaxinfer.tools.batch_runner.journal import JournalError, replaced

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

FORMAT = 2
_BEGIN = b'{\n  "written_by": "jaxinfer batch",'  # of each manifest
_KINDS: dict[str, Any] = {"asked": dict, "engine": (dict, type(None)), "created": int, "finished": bool}
_WAYS_OUT = "choose another output, or begin anew with --overwrite after looking at it"
SHOWN = 4  # differences that a message lists
SAMPLES, SAMPLE_BYTES = 64, 65536  # of each file of a model


def path_of(output: Path) -> Path:
    return output.with_name(output.name + ".manifest.json")


def load(output: Path) -> dict[str, Any] | None:
    """The manifest of an output file, None if there is none. Raises JournalError if it cannot be read."""
    path = path_of(output)
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or "format" not in content:
        raise JournalError(f"{path} is no manifest, or damaged; {_WAYS_OUT}")
    if content["format"] != FORMAT:
        raise JournalError(f"{path} was written by another version of jaxinfer; use that, or --overwrite")
    for name, kind in _KINDS.items():
        if not isinstance(content.get(name), kind):
            raise JournalError(f"{path} is damaged: its field {name!r} is missing or wrong; {_WAYS_OUT}")
    return content


def is_ours(output: Path) -> bool:
    """Says whether the manifest may be overwritten or deleted: it is not there, or `save` wrote it."""
    path = path_of(output)
    if not path.exists():
        return True
    with path.open("rb") as file:
        return file.read(len(_BEGIN)) == _BEGIN


def save(output: Path, manifest: Mapping[str, Any]) -> None:
    with replaced(path_of(output)) as file:
        content = {"written_by": "jaxinfer batch", "format": FORMAT} | dict(manifest)
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jaxinfer", "jax", "jaxlib")}


def model_hash(path: Path) -> str:
    """Names the model at `path`: names, sizes and SAMPLES evenly spaced pieces of its files, not all bytes."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{'' if file == path else file.relative_to(path)} {size}\n".encode())
        step = max(SAMPLE_BYTES, size // SAMPLES)
        with file.open("rb") as opened:
            for offset in range(0, size, step):
                opened.seek(offset)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def engine_facts(llm: "LLM") -> dict[str, Any]:
    """What of an engine can change a result in its last bits: device, numeric forms, programs."""
    resolved = llm.resolved
    exact = resolved.buckets.tile is not None
    # Exact results are those of one kind of processor: its instructions and the number of CPUs decide how sums round.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "device_kind": resolved.device.device_kind,
        "processor": f"{cpu_features()} x {cpus}" if exact else None,
        "exact": exact,
        "dtype": resolved.config.dtype,
        "weights": dataclasses.asdict(resolved.form),
        "kv_pages": resolved.spec.dtype,
        "page_size": resolved.spec.page_size,
        "implementation": resolved.spec.implementation,
        "max_model_len": resolved.max_model_len,
        "matmul_precision": resolved.matmul_precision,
        "compiler_options": dict(resolved.compiler_options),
        "logprobs_mode": resolved.options.logprobs_mode,
        "enable_prefix_caching": resolved.options.enable_prefix_caching,
        "programs": dataclasses.asdict(resolved.buckets),
    }
    return json.loads(json.dumps(facts, default=str))


def check_same(output: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises JournalError with what differs between the job that began `output` and this one."""
    before, after = _flat(begun), _flat(now)
    differ = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    if not differ:
        return
    shown = [
        f"{name} was {_shown(before.get(name))}, is {_shown(after.get(name))}" for name in differ[:SHOWN]
    ]
    more = f"; and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
    raise JournalError(
        f"{output} was begun by another job: {'; '.join(shown)}{more}. Run that one, choose another output, or "
        "begin anew with --overwrite"
    )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
