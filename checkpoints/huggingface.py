"""Hugging Face folders (config.json beside safetensors, sharded or not) as a `Checkpoint`.

Only safetensors are read; pickled weights are refused, since unpickling runs code from the file. Every file
must lie inside the folder. Links may leave it in one case: a folder of the hub cache
(`models--*/snapshots/<commit>`), whose files are links into the `blobs` folder of the same model.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxinfer.checkpoints.loading import Checkpoint, CheckpointError, TensorSource, settle_tied_head

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

READ_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens a folder with config.json and safetensors; checks every header, reads no tensor.

    Raises CheckpointError for missing, damaged, outside and pickled files.
    """
    config = _read_json(folder, "config.json")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "an unnamed method")
        raise CheckpointError(
            f"{folder}: weights quantized with {method} are not supported; use the original model"
        )
    tensors: dict[str, TensorSource] = {}
    for shard, expected_names in _shards(folder).items():
        found = read_safetensors(inside(folder, shard))
        if expected_names is not None and expected_names != set(found):
            differing = ", ".join(sorted(expected_names ^ set(found)))
            raise CheckpointError(
                f"{folder / INDEX} and {shard} disagree about which tensors it holds: {differing}"
            )
        tensors.update(found)
    settle_tied_head(config, tensors, folder)
    generation_config = None
    if (folder / "generation_config.json").is_file():
        generation_config = _read_json(folder, "generation_config.json")
    return Checkpoint(
        config, tensors, generation_config, _end_token_ids(config, generation_config), folder, "huggingface"
    )


def inside(folder: Path, name: str) -> Path:
    """The path of file `name` of `folder`. Raises CheckpointError if it is, or links to, a place outside."""
    parts = name.replace("\\", "/").split("/")
    if not name or "\0" in name or ".." in parts or Path(name).is_absolute() or parts[0].endswith(":"):
        raise CheckpointError(
            f"{folder}: file name {name!r} points outside the folder; the checkpoint is refused"
        )
    path = folder / name
    real, real_folder = path.resolve(), folder.resolve()
    allowed = [real_folder]
    if real_folder.parent.name == "snapshots":  # the hub cache: snapshots/<commit>/x -> ../../blobs/<hash>
        allowed.append(real_folder.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"{path} is a link to {real}, outside the folder; copy the file into the folder"
        )
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; fetch the checkpoint again")
    return path


def read_safetensors(path: Path) -> dict[str, TensorSource]:
    """The tensors of one safetensors file, by name. Trailing bytes are refused, like missing ones.

    The `safetensors` package judges the header (overlaps, holes, shapes against bytes); the sizes are checked
    first, so that the message can name them.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > size - 8:
            raise CheckpointError(
                f"{path} is truncated: its header needs {8 + header_bytes:,} bytes, the file has {size:,}; "
                "fetch it again"
            )
        raw_header = file.read(header_bytes)
    try:
        header = json.loads(raw_header, object_pairs_hook=partial(_no_duplicates, path))
        header.pop("__metadata__", None)
        expected = 8 + header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} has no valid safetensors header ({error}); fetch it again") from error
    if size != expected:
        what = "truncated" if size < expected else "padded"
        raise CheckpointError(
            f"{path} is {what}: its header says {expected:,} bytes, the file has {size:,}; fetch it again"
        )
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a valid safetensors file ({error}); fetch it again") from error
    return {name: _source(path, name, entry, 8 + header_bytes) for name, entry in header.items()}


def _source(path: Path, name: str, entry: dict[str, Any], data_start: int) -> TensorSource:
    if entry["dtype"] not in READ_DTYPES:
        raise CheckpointError(
            f"{path}: {name} has dtype {entry['dtype']}; supported are {', '.join(READ_DTYPES)}"
        )
    dtype, shape = np.dtype(READ_DTYPES[entry["dtype"]]), tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    return TensorSource(
        shape, dtype, stop - start, partial(_read_rows, path, data_start + start, shape, dtype)
    )


def _read_rows(
    path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype, start: int, stop: int
) -> np.ndarray:
    # Plain reads, no memory map: pages of a mapped file count as resident memory until the system drops them.
    row = int(np.prod(shape[1:]))
    count = (stop - start) * row
    values = np.fromfile(path, dtype, count, offset=offset + start * row * dtype.itemsize)
    return values.reshape(stop - start, *shape[1:])


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """File names, each with the tensors that the index promises for it (None without an index)."""
    if (folder / SINGLE).exists():
        return {SINGLE: None}
    if (folder / INDEX).exists():
        weight_map = _read_json(folder, INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / INDEX} has no weight_map; fetch it again")
        shards: dict[str, set[str] | None] = {}
        for tensor, shard in weight_map.items():
            inside(folder, str(shard))
            names = shards.setdefault(str(shard), set())
            assert names is not None
            names.add(tensor)
        return shards
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickled:
        raise CheckpointError(
            f"{folder} has only pickled weights ({pickled[0]}), never loaded since they can run code; "
            "convert them to safetensors (save_pretrained of transformers writes them)"
        )
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = inside(folder, name)
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=partial(_no_duplicates, path))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__} instead of an object")
    return value


def _no_duplicates(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"{path}: {', '.join(twice)} appears twice")
    return result


def _end_token_ids(config: dict[str, Any], generation_config: dict[str, Any] | None) -> tuple[int, ...]:
    """End ids of generation_config.json (as transformers does), or of config.json if that has none."""
    ids = (generation_config or {}).get("eos_token_id")
    if ids is None:
        ids = config.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
