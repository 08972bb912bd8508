"""Opens the files of a checkpoint: only regular files inside its folder, only up to a bound, named when damaged.

A checkpoint comes from somebody else. A link out of its folder could bring a file of the user's into a prompt, a FIFO
or a device would block for ever, and a file without bound takes all memory. Links may leave the folder in one case: a
folder of the hub cache (`models--*/snapshots/<commit>`), whose files are links into the `blobs` folder of the same
model. docs/security.md has all limits.
"""

import json
import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

from jaxinfer.text.wording import shown

MIB = 1 << 20
MAX_JSON_BYTES = 16 * MIB  # config.json has some kilobytes, the index of a thousand shards some megabytes
GGUF_MAGIC = b"GGUF"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, in one sentence: which file, what is wrong, what to do."""


def inside(folder: Path, name: str) -> Path:
    """The path of regular file `name` of `folder`.

    Raises CheckpointError if it is missing, is or links to a place outside, or is a folder, a FIFO or a device.
    """
    parts = name.replace("\\", "/").split("/")
    if not name or "\0" in name or ".." in parts or Path(name).is_absolute() or parts[0].endswith(":"):
        raise CheckpointError(
            f"{folder}: file name {name!r} points outside the folder; the checkpoint is refused"
        )
    path = folder / name
    try:
        real, real_folder = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise CheckpointError(f"{path} cannot be followed ({error}); fetch the checkpoint again") from error
    allowed = [real_folder]
    if real_folder.parent.name == "snapshots":  # the hub cache: snapshots/<commit>/x -> ../../blobs/<hash>
        allowed.append(real_folder.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"{path} is a link to {real}, outside the folder; copy the file into the folder"
        )
    check_regular(path)
    return path


def has(folder: Path, name: str) -> bool:
    """Whether `folder` has an entry `name` of any kind, a link to nothing too: `inside` judges it."""
    return os.path.lexists(folder / name)


def check_regular(path: Path) -> None:
    """Raises CheckpointError for what is missing or no regular file (opening a FIFO would wait for ever)."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise CheckpointError(f"{path} is missing; fetch the checkpoint again") from None
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "FIFO, a socket or a device"
        raise CheckpointError(f"{path} is a {kind} instead of a file; the checkpoint is refused")


def is_gguf(path: Path) -> bool:
    """Whether a regular file is meant as GGUF: it begins as such, or is named so. Raises CheckpointError."""
    check_regular(path)
    with open(path, "rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC or path.suffix.lower() == ".gguf"


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file.

    Raises CheckpointError for one that is larger than `max_bytes`, cannot be read, or is a Git LFS pointer.
    """
    check_regular(path)
    try:
        with open(path, "rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    if len(content) > max_bytes:
        raise CheckpointError(
            f"{path} has {os.path.getsize(path):,} bytes, more than the {max_bytes:,} that a file of its kind may have"
        )
    check_is_no_pointer(path, content)
    return content


def check_is_no_pointer(path: Path, start: bytes) -> None:
    """Raises CheckpointError when a file that starts so is what Git leaves in the place of a large one."""
    if start.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{path} is a Git LFS pointer and not the file itself; run `git lfs pull` there"
        )


def read_text(path: Path, max_bytes: int) -> str:
    """The UTF-8 text of a file; CheckpointError as `read_bytes`, and for another encoding or a byte order mark."""
    content = read_bytes(path, max_bytes)
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            raise CheckpointError(
                f"{path} begins with a byte order mark of {encoding}; save it as UTF-8 without one"
            )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text ({error}); fetch it again") from error


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError as `read_text`, and for what is no object or has a key twice."""
    return parse_json(path, read_text(path, max_bytes))


def read_json_of(folder: Path, name: str, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """`read_json` of file `name` of a checkpoint's folder (`inside`), {} where the folder has none."""
    return read_json(inside(folder, name), max_bytes) if has(folder, name) else {}


def parse_json(path: Path, text: str | bytes) -> dict[str, Any]:
    """The JSON object in `text`, which `path` holds; CheckpointError as `read_json`."""
    try:
        value = json.loads(text, object_pairs_hook=partial(_no_duplicates, path))
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{path} is not valid JSON for us: it is nested too deep") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__} instead of an object")
    return value


def _no_duplicates(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise CheckpointError(f"{path}: {shown(twice)} appears twice")
    return result
