"""Hugging Face folders (config.json beside safetensors, sharded or not) as a `Checkpoint`.

Only safetensors are read; pickled weights are refused, since unpickling runs code from the file. Every file
must lie inside the folder (files.py).
"""

import math
import os
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxinfer.checkpoints.files import (
    LFS_POINTER,
    MIB,
    CheckpointError,
    check_is_no_pointer,
    check_regular,
    has,
    inside,
    parse_json,
    read_json,
    read_json_of,
)
from jaxinfer.checkpoints.loading import Checkpoint, TensorSource, check_against_tensors, settle_tied_head
from jaxinfer.checkpoints.token_ids import valid_ids
from jaxinfer.models.hf_config import check_values
from jaxinfer.text.wording import listed, shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_HEADER_BYTES = 16 * MIB  # about 150,000 tensors in one file
MAX_AXES = 8

# transformers once kept the defaults of sampling in config.json, and wrote these values into it for every model.
SAMPLING_DEFAULTS = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "max_new_tokens": None,
}

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

    Raises CheckpointError for missing, damaged, outside and pickled files, and for values out of range.
    """
    config = read_config(folder / "config.json", inside(folder, "config.json"))
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{folder}: weights quantized with {method or 'an unnamed method'} are not supported; use the original "
            "model"
        )
    tensors: dict[str, TensorSource] = {}
    for shard, expected_names in _shards(folder).items():
        found = read_safetensors(inside(folder, shard))
        if expected_names is not None and expected_names != set(found):
            differing = listed(sorted(expected_names ^ set(found)))
            raise CheckpointError(
                f"{folder / INDEX} and {shard} disagree about which tensors it holds: {differing}"
            )
        tensors.update(found)
    check_against_tensors(config, tensors, folder)
    settle_tied_head(config, tensors, folder)
    ends = end_token_ids(folder, config)
    return Checkpoint(config, tensors, _generation_config(folder, config), ends, folder, "huggingface")


def read_config(path: Path, real: Path | None = None) -> dict[str, Any]:
    """A config.json, its values checked for kind and range. Raises CheckpointError naming `path` and the key."""
    config = read_json(real or path)
    try:
        check_values(config)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return config


def end_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """End ids of generation_config.json (as transformers does), or of config.json if that has none.

    Raises CheckpointError for ids outside the vocabulary, in either file.
    """
    nested = config.get("text_config")
    sources = (
        ("generation_config.json", read_json_of(folder, "generation_config.json")),
        ("config.json", config),
        ("config.json: text_config", nested if isinstance(nested, dict) else {}),
    )
    ids = [
        valid_ids(source.get("eos_token_id"), f"{folder / name}: eos_token_id", config.get("vocab_size"))
        for name, source in sources
    ]
    return next((found for found in ids if found), ())


def _generation_config(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """generation_config.json; without it the sampling keys of an old config.json that are no defaults; or None."""
    if has(folder, "generation_config.json"):
        return read_json_of(folder, "generation_config.json")
    return {
        k: config[k] for k, default in SAMPLING_DEFAULTS.items() if config.get(k, default) != default
    } or None


def read_safetensors(path: Path) -> dict[str, TensorSource]:
    """The tensors of one safetensors file, by name. Trailing bytes are refused, like missing ones.

    The header is judged here, so that messages name what is wrong, and then by the `safetensors` package.
    """
    check_regular(path)
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(len(LFS_POINTER))
        check_is_no_pointer(path, start)
        header_bytes = int.from_bytes(start[:8], "little")
        if size < 8 or header_bytes > size - 8:
            raise CheckpointError(
                f"{path} is truncated: its header needs {8 + header_bytes:,} bytes, the file has {size:,}; "
                "fetch it again"
            )
        if header_bytes > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path} has a header of {header_bytes:,} bytes, more than the {MAX_HEADER_BYTES:,} that are read; "
                "save the model in several files"
            )
        file.seek(8)
        raw_header = file.read(header_bytes)
    header = parse_json(path, raw_header)
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    sources = {name: _source(path, name, entry, data_start) for name, entry in header.items()}
    expected = data_start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
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
    return sources


def _source(path: Path, name: str, entry: dict[str, Any], data_start: int) -> TensorSource:
    """The tensor that an entry of the header describes. Raises CheckpointError naming what of it is wrong."""
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} is {shown(entry)}, not an object with dtype, shape and data_offsets")
    kind, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(kind, str) or kind not in READ_DTYPES:
        raise CheckpointError(f"{where} has dtype {shown(kind)}; supported are {', '.join(READ_DTYPES)}")
    if not _are_sizes(shape) or len(shape) > MAX_AXES:
        raise CheckpointError(f"{where} has shape {shown(shape)}, not a list of at most {MAX_AXES} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has data_offsets {shown(offsets)}, not a beginning and an end")
    dtype, (start, stop) = np.dtype(READ_DTYPES[kind]), offsets
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{where} lies from {start:,} to {stop:,}, which is not the size of {kind} {shown(shape)}; fetch it again"
        )
    return TensorSource(
        tuple(shape), dtype, stop - start, partial(_read_rows, path, data_start + start, tuple(shape), dtype)
    )


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 62 for x in value)


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
    if has(folder, SINGLE):
        return {SINGLE: None}
    if has(folder, INDEX):
        weight_map = read_json_of(folder, INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / INDEX} has no weight_map; fetch it again")
        shards: dict[str, set[str]] = {}
        for tensor, shard in weight_map.items():
            if not isinstance(shard, str):
                raise CheckpointError(
                    f"{folder / INDEX}: {shown(tensor)} lies in {shown(shard)}, which is no file"
                )
            if shard not in shards:
                inside(folder, shard)
            shards.setdefault(shard, set()).add(tensor)
        return dict(shards)
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickled:
        raise CheckpointError(
            f"{folder} has only pickled weights ({pickled[0]}), never loaded since they can run code; "
            "convert them to safetensors (save_pretrained of transformers writes them)"
        )
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")
