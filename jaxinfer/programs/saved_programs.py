"""Compiled programs in a folder: saved on one machine, run on another that has the chip, without compiling.

A folder has `programs.json` and one file per program, the executable as XLA serializes it. JAX's own
`serialize_executable` pickles its trees; here nothing is pickled: the arguments are leaves of the tree of arguments,
by their numbers, and the structure of the result is found by abstract evaluation. An executable is machine code all the
same: only load folders that you trust as you trust a program. A folder or file that others can write to, or that
belongs to somebody else, is refused. The hash of a file lies beside it: it finds damage, not forgery.

Where a compiler cannot serialize, the folder has JAX's persistent compilation cache instead, warmed: an engine
compiles through it, and finds there what JAX takes for the same program on the same device.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jaxlib import _jax

from jaxinfer.programs import compile_cache
from jaxinfer.text.wording import first_line

logger = logging.getLogger(__name__)

MANIFEST = "programs.json"
CACHE = "cache"  # JAX's persistent compilation cache, a folder inside; of programs that cannot be serialized
_CACHED = "*-cache"  # what JAX's persistent cache calls its entries
# platform -> the distributions whose versions an executable depends on
COMPILED_BY = {
    "cpu": ("jaxlib",),
    "tpu": ("jaxlib", "libtpu"),
    "gpu": ("jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
}


def facts(platform: str, device_kind: str) -> dict[str, str]:
    """What must be equal where programs are saved and where they run."""
    found = {"device": device_kind, "source of jaxinfer": _source_hash()}
    if platform == "cpu":
        found["processor"] = compile_cache.cpu_features()
    return found | {name: _version(name) for name in COMPILED_BY[platform]}


def identity(*parts: Any) -> str:
    """A hash of what a program is compiled from: anything with a faithful repr, and the shapes in trees."""
    leaves, structure = jax.tree.flatten(parts[-1])
    shapes = [(x.shape, str(x.dtype)) for x in leaves]
    return hashlib.sha256(repr((*parts[:-1], shapes, str(structure))).encode()).hexdigest()


class Unserializable(RuntimeError):
    """A compiled program cannot be written to a file; the message has the compiler's reason."""


def serialize(executable: Any) -> bytes:
    """The bytes of an executable of XLA, from `jax.stages.Compiled.runtime_executable()`.

    Raises:
      Unserializable: the compiler of this platform cannot.
    """
    try:
        return executable.serialize()
    except (AttributeError, RuntimeError) as error:  # some compilers' executables have no such method
        raise Unserializable(first_line(error)) from None


def used_arguments(compiled: jax.stages.Compiled) -> list[int]:
    """Which leaves of its arguments an executable takes, by their numbers: jax leaves those out that nothing reads."""
    used = jax.tree.map(lambda _, place: place is not None, compiled.args_info, compiled.input_shardings)
    return [i for i, is_used in enumerate(jax.tree.leaves(used)) if is_used]


@dataclass(frozen=True)
class Folder:
    """Where programs of one model with one set of options are saved for one kind of device.

    facts: from `facts`, of the device that the programs are for.
    model, options: of `LLM`, to build the same programs.
    """

    path: Path
    facts: Mapping[str, str]
    model: str
    options: Mapping[str, Any]

    def check(self) -> None:
        """Raises ValueError if the folder has programs for another device, version, model or options."""
        self._manifest()

    def add(self, name: str, identity: str, data: bytes, arguments: list[int]) -> int:
        """Writes one serialized executable, and its entry in the manifest. Returns its bytes.

        Args:
          name, identity: what `SavedPrograms.load` will ask for.
          data: from `serialize`.
          arguments: from `used_arguments`.
        """
        digest = hashlib.sha256(data).hexdigest()
        file = f"{digest[:16]}.bin"
        manifest = self._manifest()
        (self.path / file).write_bytes(data)
        self._write(
            manifest,
            name,
            {"file": file, "sha256": digest, "bytes": len(data), "arguments": arguments},
            identity,
        )
        return len(data)

    def add_cached(self, name: str, identity: str, compile_: Callable[[], Any], why: str) -> int:
        """Compiles a program that cannot be serialized, with JAX's persistent cache in the folder.

        Args:
          compile_: compiles the program anew.
          why: the reason, for the manifest.

        Returns:
          the bytes that the cache keeps of it.

        Raises:
          Unserializable: the cache keeps nothing of it either.
        """
        manifest, cache = self._manifest(), self.path / CACHE
        before = set(cache.glob(_CACHED))
        compile_cache.enable(cache)
        jax.clear_caches()  # or what was compiled a moment ago would be taken from memory
        try:
            compile_()
        finally:
            compile_cache.enable(None)
        new = [path.name for path in set(cache.glob(_CACHED)) - before]
        present = manifest["programs"].get(name, {})
        if not new and present.get("identity") == identity:  # found in the cache
            new = [file for file in present.get("cached", ()) if (cache / file).exists()]
        if not new:
            raise Unserializable(f"{why}; and the persistent cache does not keep it")
        self._write(manifest, name, {"cached": sorted(new), "why": why}, identity)
        return sum((cache / file).stat().st_size for file in new)

    def _manifest(self) -> dict[str, Any]:
        self.path.mkdir(parents=True, exist_ok=True)
        manifest: dict[str, Any] = {
            "facts": dict(self.facts),
            "model": self.model,
            "options": dict(self.options),
            "programs": {},
        }
        if not (self.path / MANIFEST).exists():
            return manifest
        present = _read(self.path)
        for key in ("facts", "model", "options"):
            if present[key] != manifest[key]:
                raise ValueError(
                    f"{self.path} holds programs of other {key} ({present[key]}, not {manifest[key]}); give "
                    "another folder, or remove it"
                )
        return present

    def _write(self, manifest: dict[str, Any], name: str, entry: dict[str, Any], identity: str) -> None:
        manifest["programs"][name] = entry | {"identity": identity}
        temporary = self.path / f"{MANIFEST}.{os.getpid()}"
        temporary.write_text(json.dumps(manifest, indent=1, sort_keys=True))
        temporary.replace(self.path / MANIFEST)


def options(folder: str | Path) -> dict[str, Any]:
    """The options of `LLM` for which the programs of a folder were compiled."""
    return dict(_read(Path(folder).expanduser())["options"])


class SavedPrograms:
    """The programs of a folder, for one device that is here.

    `cache` is the folder of JAX's persistent cache through which the engine must compile, where the programs could
    not be serialized; None where they are executables. Which it is, is said in the log.

    Raises:
      ValueError: the folder has none, others can write to it, or they were compiled for another device, version or
        source.
    """

    def __init__(self, folder: str | Path, device: jax.Device) -> None:
        self._folder, self._device = Path(folder).expanduser(), device
        manifest = _read(self._folder)
        for name in ("", MANIFEST):
            _trusted(self._folder, name)
        for name, here in facts(device.platform, device.device_kind).items():
            if manifest["facts"].get(name) != here:
                raise ValueError(
                    f"the programs in {folder} were compiled for {name} {manifest['facts'].get(name)!r}, and "
                    f"here it is {here!r}: compile them again with `jaxinfer compile --save`"
                )
        self._programs, self._options = manifest["programs"], manifest["options"]
        cached = [entry["why"] for entry in self._programs.values() if "cached" in entry]
        self.cache = self._folder / CACHE if cached else None
        if cached:
            _trusted(self._folder, CACHE)
            logger.warning(
                "%d of the %d programs in %s are no executables, since their compiler could not serialize them (%s): "
                "they are compiled here, through the persistent cache in %s",
                len(cached), len(self._programs), self._folder, cached[0], self.cache,
            )  # fmt: skip

    def check(self, name: str, identity: str) -> None:
        """Raises ValueError if a program of that name was compiled from other settings."""
        entry = self._programs.get(name)
        if entry is not None and entry["identity"] != identity:
            raise ValueError(
                f"program {name} in {self._folder} was compiled from another model or other settings; they were "
                f"{', '.join(f'{k}={v!r}' for k, v in self._options.items())}"
            )

    def load(
        self, name: str, identity: str, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Callable[..., Any] | None:
        """The executable of a program, to be called like the compiled `function`; None if it must be compiled:
        it was not saved, which is said in the log, or it is in `cache`.

        Raises:
          ValueError: it was compiled from other settings, or its file is damaged, or the device does not take it.
        """
        entry = self._programs.get(name)
        if entry is None:
            logger.warning("%s has no program %s; compiling it", self._folder, name)
            return None
        self.check(name, identity)
        if "cached" in entry:
            return None
        data = _trusted(self._folder, entry["file"]).read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ValueError(f"{self._folder / entry['file']} is damaged: compile it again")
        devices = _jax.DeviceList((self._device,))
        try:
            executable = self._device.client.deserialize_executable(data, devices, None)
        except RuntimeError as error:
            raise ValueError(
                f"{self._device.device_kind} does not take program {name} of {self._folder}: {first_line(error)}; "
                "compile it again with `jaxinfer compile --save`, or leave the folder out"
            ) from error
        structure = jax.tree.structure(jax.eval_shape(function, *arguments))
        return _Executable(executable, entry["arguments"], structure, self._device)


class _Executable:
    """Calls an XLA executable with those leaves of its arguments that it takes."""

    def __init__(self, executable: Any, used: list[int], structure: Any, device: jax.Device) -> None:
        self._executable, self._used, self._structure, self._device = executable, used, structure, device

    def __call__(self, *arguments: Any) -> Any:
        leaves = jax.tree.leaves(arguments)
        used = [leaves[i] for i in self._used]
        arrays = [x if isinstance(x, jax.Array) else jax.device_put(x, self._device) for x in used]
        results = self._executable.execute_sharded(arrays).disassemble_into_single_device_arrays()
        return jax.tree.unflatten(self._structure, [result for (result,) in results])


def _read(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        _check_manifest(manifest)
    except OSError:
        raise ValueError(
            f"{folder} has no {MANIFEST}: make one with `jaxinfer compile --save {folder}`"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return manifest


def _check_manifest(manifest: Any) -> None:
    """Raises ValueError for what `Folder` does not write. Files have names, not paths: nothing leads out of it."""
    if not isinstance(manifest, dict) or {"facts", "model", "options", "programs"} - set(manifest):
        raise ValueError("entries are missing")
    for key in ("facts", "options", "programs"):
        if not isinstance(manifest[key], dict):
            raise ValueError(f"{key} is {type(manifest[key]).__name__}, not an object")
    for name, entry in manifest["programs"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("identity"), str):
            raise ValueError(f"program {name} has no identity")
        files = entry.get("cached", [entry.get("file")])
        if not isinstance(files, list) or not all(map(_is_plain_name, files)):
            raise ValueError(f"program {name} names {files}, and no file in this folder")
        numbers = entry.get("arguments")
        is_list = isinstance(numbers, list) and all(type(i) is int and i >= 0 for i in numbers)
        if "cached" not in entry and (not is_list or not isinstance(entry.get("sha256"), str)):
            raise ValueError(f"program {name} has no sha256, or no numbers of its arguments")


def _is_plain_name(file: Any) -> bool:
    return isinstance(file, str) and Path(file).name == file and file not in ("", "..") and "\0" not in file


def _trusted(folder: Path, name: str = "") -> Path:
    """A file of the folder, or the folder itself. Raises ValueError if it may hold machine code of somebody else."""
    path = folder / name
    try:
        if name and path.resolve(strict=True).parent != folder.resolve():
            raise ValueError(
                f"{path} is a link out of its folder: programs are machine code; put the file there"
            )
        problem = compile_cache.why_untrusted(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if problem is not None:
        raise ValueError(f"{problem}; programs are machine code, and run as you")
    return path


@cache
def _source_hash() -> str:
    """Of every source file from which programs are traced; taken once, since what was imported stays."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for package in (root, root / "pallas_kernels"):
        package = package.resolve()  # the second is a link in a checkout
        for path in sorted(package.rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
