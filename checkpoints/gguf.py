"""GGUF files (llama.cpp's single-file format) as a `Checkpoint` with Hugging Face names, rows and keys.

The header is read here and not with `gguf.GGUFReader`, which makes one numpy object per vocabulary entry: 8 s
and 160 MB for a file of 98 MB. Block sizes come from the `gguf` package. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import gguf
import ml_dtypes
import numpy as np

from jaxinfer.checkpoints import gguf_blocks
from jaxinfer.checkpoints.files import GGUF_MAGIC, MIB, CheckpointError, check_is_no_pointer, check_regular
from jaxinfer.checkpoints.gguf_blocks import Blocks, split
from jaxinfer.checkpoints.loading import Checkpoint, TensorSource, check_against_tensors, settle_tied_head
from jaxinfer.checkpoints.token_ids import valid_ids
from jaxinfer.models import MODELS
from jaxinfer.models.hf_config import RANGES, Range, check_values
from jaxinfer.models.hf_layers import ROPE_RANGES
from jaxinfer.models.spec import Leaf
from jaxinfer.text.wording import listed, shown

ARCHITECTURES = ("llama", "qwen3")  # general.architecture, the same word as Hugging Face's model_type

# How llama3 scaling is stored: one divisor per rope frequency, f32[H/2]. It becomes rope_scaling of our own
# type "factors", since the parameters of the rule (factor, low, high, original) are not in the file.
ROPE_FREQS = "rope_freqs.weight"

# "{arch}." + key -> config.json key; these are copied as they are.
HF_CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
# Keys that `_config` translates or checks by hand, and what they may be; any other "{arch}." key is refused by name.
KIND_NAMES: dict[Any, str] = {str: "a text", bool: "true or false"}
CHECKED_KEYS: dict[str, Any] = {
    "vocab_size": RANGES["vocab_size"],
    "attention.key_length": RANGES["head_dim"],
    "attention.value_length": RANGES["head_dim"],
    "rope.dimension_count": RANGES["head_dim"],
    "rope.scale_linear": ROPE_RANGES["factor"],
    "rope.scaling.type": str,
    "rope.scaling.factor": ROPE_RANGES["factor"],
    "rope.scaling.original_context_length": RANGES["max_position_embeddings"],
    "rope.scaling.finetuned": bool,
}

END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))

# Metadata and tensor positions together; the largest published vocabularies take a quarter of it.
MAX_HEADER_BYTES = 64 * MIB
MAX_AXES = 4  # ggml's own

# The type of the array that is read; what the file holds in blocks is dequantized to float32.
READ_DTYPES = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    **dict.fromkeys(gguf_blocks.FORMS, np.dtype(np.float32)),
}

SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies: `shape` in numpy order (slowest axis first), `offset` and `nbytes` in the file."""

    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """All key-value pairs (the tokenizer's included) as Python values, and the tensors by GGUF name."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a GGUF file of one of ARCHITECTURES; CheckpointError names what cannot be translated."""
    header = read_header(path)
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {shown(architecture)} is not one of {', '.join(ARCHITECTURES)}"
        )
    if metadata.get("split.count") not in (None, 0, 1):
        raise CheckpointError(
            f"{path} is one of {shown(metadata['split.count'])} parts; join them with llama.cpp's gguf-split --merge"
        )
    if not header.tensors:
        raise CheckpointError(f"{path} holds a vocabulary but no tensors, so it cannot be used as a model")
    config = _config(path, header)
    tensors, leaves = {}, _leaves(architecture)
    for name, tensor in header.tensors.items():
        if name == ROPE_FREQS:
            continue
        permuted = _permuted_head_dim(name, leaves, config)
        tensors[_hf_name(name, leaves)] = _source(path, name, tensor, permuted)
    check_against_tensors(config, tensors, path)
    settle_tied_head(config, tensors, path)
    end_token_ids = tuple(
        dict.fromkeys(
            id_
            for key in END_KEYS
            for id_ in valid_ids(metadata.get(key), f"{path}: {key}", config["vocab_size"])
        )
    )
    return Checkpoint(config, tensors, None, end_token_ids, path, "gguf", metadata)


def _leaves(architecture: str) -> dict[str, Leaf]:
    """The leaves of the model file, by their GGUF names (with "{layer}")."""
    return {leaf.gguf: leaf for leaf in MODELS[architecture].LEAVES.values()}


def _pattern(name: str) -> tuple[str, str]:
    """blk.7.attn_q.weight -> (blk.{layer}.attn_q.weight, 7); without a layer (name, "")."""
    layer = re.match(r"blk\.(\d+)\.", name)
    return (name, "") if layer is None else ("blk.{layer}." + name[layer.end() :], layer.group(1))


def _hf_name(name: str, leaves: Mapping[str, Leaf]) -> str:
    """The Hugging Face name; one that no leaf has stays, and `load_weights` refuses it by name."""
    pattern, layer = _pattern(name)
    return leaves[pattern].hf.replace("{layer}", layer) if pattern in leaves else name


def _permuted_head_dim(name: str, leaves: Mapping[str, Leaf], config: dict[str, Any]) -> int | None:
    """head_dim when the rows of this tensor are stored in llama.cpp's interleaved rope order, else None.

    Each head is reordered by itself, so the number of q or kv heads does not matter here.
    """
    leaf = leaves.get(_pattern(name)[0])
    return config["head_dim"] if leaf is not None and "gguf" in leaf.interleaved else None


def _config(path: Path, header: GGUFHeader) -> dict[str, Any]:
    architecture = header.metadata["general.architecture"]
    prefix = architecture + "."
    keys = {key.removeprefix(prefix): v for key, v in header.metadata.items() if key.startswith(prefix)}
    unknown = sorted(set(keys) - set(HF_CONFIG_KEYS) - set(CHECKED_KEYS))
    if unknown:
        raise CheckpointError(f"{path}: not supported: {listed([prefix + key for key in unknown])}")
    _check_values(path, prefix, keys)
    config: dict[str, Any] = {"model_type": architecture, "hidden_act": "silu"}
    for key, hf_key in HF_CONFIG_KEYS.items():
        if key in keys:
            config[hf_key] = keys[key]
    required = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
    lacking = [prefix + key for key in required if key not in keys]
    lacking += [name for name in ("token_embd.weight",) if name not in header.tensors]
    if lacking:
        raise CheckpointError(f"{path} lacks {', '.join(lacking)}")
    if config.get("sliding_window") == 0:  # llama.cpp's word for none
        config["sliding_window"] = None
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    config["head_dim"] = keys.get("attention.key_length", config["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, config["head_dim"]) != config["head_dim"]:
            raise CheckpointError(
                f"{path}: {prefix}{key} {keys[key]} is not the head_dim {config['head_dim']}: not supported"
            )
    embedding = header.tensors["token_embd.weight"].shape
    if len(embedding) != 2:
        raise CheckpointError(
            f"{path}: token_embd.weight has shape {list(embedding)}, not [vocabulary, width]"
        )
    config["vocab_size"] = embedding[0]
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["rope_theta"] = config.get("rope_theta", 10000.0)  # llama.cpp's default for both architectures
    config["rope_scaling"] = _rope_scaling(path, header, keys, config)
    try:
        check_values(config)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return config


def _check_values(path: Path, prefix: str, keys: dict[str, Any]) -> None:
    """Raises CheckpointError for a key of the architecture whose value has a wrong kind or range, by its GGUF name."""
    for key, value in keys.items():
        bounds = CHECKED_KEYS[key] if key in CHECKED_KEYS else RANGES[HF_CONFIG_KEYS[key]]
        if key == "attention.sliding_window" and value == 0:
            continue
        if isinstance(bounds, Range):
            problem = bounds.problem(value)
        else:
            problem = None if isinstance(value, bounds) else f"is {shown(value)}, not {KIND_NAMES[bounds]}"
        if problem:
            raise CheckpointError(f"{path}: {prefix}{key} {problem}")


def _rope_scaling(
    path: Path, header: GGUFHeader, keys: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any] | None:
    """config.json's rope_scaling, from the scaling keys or from the tensor ROPE_FREQS."""
    kind = keys.get("rope.scaling.type", "linear" if "rope.scale_linear" in keys else "none")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    if ROPE_FREQS in header.tensors:
        if kind != "none":
            raise CheckpointError(
                f"{path} has {ROPE_FREQS} and rope scaling {kind!r}: not supported together"
            )
        divisors = _source(path, ROPE_FREQS, header.tensors[ROPE_FREQS], None).read()  # f32[H/2]
        if divisors.shape != (config["head_dim"] // 2,):
            raise CheckpointError(
                f"{path}: {ROPE_FREQS} has shape {list(divisors.shape)}, not [{config['head_dim'] // 2}]"
            )
        if not (np.isfinite(divisors) & (divisors > 0)).all():
            raise CheckpointError(f"{path}: {ROPE_FREQS} holds divisors that are not finite or not over 0")
        return {"rope_type": "factors", "factors": divisors.astype(np.float32).tolist()}
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if "rope.scaling.original_context_length" in keys:
        scaling["original_max_position_embeddings"] = keys["rope.scaling.original_context_length"]
    return scaling


def _source(path: Path, name: str, tensor: GGUFTensor, permuted_head_dim: int | None) -> TensorSource:
    if tensor.type not in READ_DTYPES:
        raise CheckpointError(
            f"{path}: {name} has type {tensor.type.name}; supported are "
            f"{', '.join(t.name for t in READ_DTYPES)}"
        )
    read_rows = partial(_read_rows, path, tensor)
    blocks = read_blocks = None
    if tensor.type in gguf_blocks.FORMS and len(tensor.shape) == 2:
        blocks = gguf_blocks.shapes((tensor.shape[0], tensor.shape[1]), tensor.type)
        read_blocks = partial(_read_blocks, path, tensor, permuted_head_dim)
    if permuted_head_dim is not None:
        read_rows = partial(_read_rope_rows, path, tensor, permuted_head_dim)
    return TensorSource(tensor.shape, READ_DTYPES[tensor.type], tensor.nbytes, read_rows, blocks, read_blocks)


def _read_rows(path: Path, tensor: GGUFTensor, start: int, stop: int) -> np.ndarray:
    raw = _read_raw(path, tensor, start, stop)
    if tensor.type in gguf_blocks.FORMS:
        values = split(raw, tensor.type).values()
    else:
        values = raw.view(READ_DTYPES[tensor.type])
    return values.reshape(stop - start, *tensor.shape[1:])


def _read_raw(path: Path, tensor: GGUFTensor, start: int, stop: int) -> np.ndarray:
    """Bytes of rows, uint8 [rows, bytes per row]."""
    # Plain reads, no memory map: pages of a mapped file count as resident memory until the system drops them.
    rows = tensor.shape[0] if tensor.shape else 1
    row_bytes = tensor.nbytes // max(1, rows)
    raw = np.fromfile(path, np.uint8, (stop - start) * row_bytes, offset=tensor.offset + start * row_bytes)
    return raw.reshape(stop - start, row_bytes)


def _read_rope_rows(path: Path, tensor: GGUFTensor, head_dim: int, start: int, stop: int) -> np.ndarray:
    """Rows in the published order."""
    first = start // head_dim * head_dim
    last = -(-stop // head_dim) * head_dim
    rows = _read_rows(path, tensor, first, last)  # whole heads
    return rows[_published_order(last - first, head_dim)][start - first : stop - first]


def _read_blocks(path: Path, tensor: GGUFTensor, permuted_head_dim: int | None) -> Blocks:
    blocks = split(_read_raw(path, tensor, 0, tensor.shape[0]), tensor.type)
    if permuted_head_dim is None:
        return blocks
    return blocks.take(_published_order(tensor.shape[0], permuted_head_dim))


def _published_order(num_rows: int, head_dim: int) -> np.ndarray:
    """Which rows of the file stand where: [N, H/2, 2, D] in the file is [N, 2, H/2, D] with Hugging Face."""
    return np.arange(num_rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def read_header(path: Path) -> GGUFHeader:
    """Reads metadata and tensor positions; CheckpointError for a file that is not whole and valid GGUF."""
    check_regular(path)
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        check_is_no_pointer(path, file.read(64))
        file.seek(0)
        reader = _Reader(path, file, size)
        if reader.take(4) != GGUF_MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: it does not start with the letters GGUF")
        version = reader.scalar("I")
        if version not in (2, 3):
            raise CheckpointError(
                f"{path}: GGUF version {version} (or byte order) is not supported; 2 and 3 are"
            )
        tensor_count, pair_count = reader.scalar("Q"), reader.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = reader.string()
            if key in metadata:
                raise CheckpointError(f"{path}: metadata key {shown(key)} appears twice")
            metadata[key] = reader.value(key)
        infos = [reader.tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= MIB or alignment & (alignment - 1):
            raise CheckpointError(
                f"{path}: general.alignment is {shown(alignment)}, not a power of 2 from 1 to {MIB:,}"
            )
        data_start = -(-file.tell() // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {shown(name)} appears twice")
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block:
            raise CheckpointError(
                f"{path}: {shown(name)} has rows of {shape[-1]}, not a multiple of {kind.name}'s {block}"
            )
        if offset % alignment:
            raise CheckpointError(
                f"{path}: {shown(name)} begins at byte {offset:,} of the data, no multiple of the alignment {alignment}"
            )
        nbytes = math.prod(shape) // block * block_bytes
        tensors[name] = GGUFTensor(shape, kind, data_start + offset, nbytes)
    _check_places(path, size, tensors)
    return GGUFHeader(metadata, tensors)


def _check_places(path: Path, size: int, tensors: dict[str, GGUFTensor]) -> None:
    """Raises CheckpointError for tensors that overlap or end behind the file."""
    end, last = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset < end:
            raise CheckpointError(
                f"{path}: the tensors {shown(last)} and {shown(name)} overlap; fetch it again"
            )
        end, last = tensor.offset + tensor.nbytes, name
    if size < end:
        raise CheckpointError(
            f"{path} is truncated: its header says {end:,} bytes, the file has {size:,}; fetch it again"
        )


@dataclass(frozen=True)
class _Reader:
    """Little-endian reads that never ask for more than the file, or a header, may hold."""

    path: Path
    file: BinaryIO
    size: int

    def take(self, count: int) -> bytes:
        if count <= self.size and self.file.tell() + count <= MAX_HEADER_BYTES:
            data = self.file.read(count)
            if len(data) == count:
                return data
        self.refuse(count)

    def refuse(self, count: int) -> NoReturn:
        if MAX_HEADER_BYTES < self.file.tell() + count <= self.size:
            raise CheckpointError(
                f"{self.path}: its header is longer than the {MAX_HEADER_BYTES:,} bytes that are read"
            )
        raise CheckpointError(
            f"{self.path} is truncated: its header goes on for {count:,} bytes, "
            f"the file has {self.size:,} in all; fetch it again"
        )

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(int.from_bytes(self.take(8), "little")).decode("utf-8", errors="replace")

    def value(self, key: str) -> Any:
        """The kind of a value and the value; arrays of arrays, which no key that is read has, are refused."""
        kind = self.scalar("I")
        if kind in SCALAR_FORMATS:
            return self.scalar(SCALAR_FORMATS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise CheckpointError(f"{self.path}: {shown(key)} has the unknown metadata type {kind}")
        item_kind, count = self.scalar("I"), self.scalar("Q")
        if item_kind in SCALAR_FORMATS:
            code = np.dtype(SCALAR_FORMATS[item_kind]).newbyteorder("<")
            return np.frombuffer(self.take(count * code.itemsize), code).tolist()
        if item_kind == STRING:  # a vocabulary and its merges are 100,000 of them
            return [self.string() for _ in range(count)]
        kind_name = "arrays" if item_kind == ARRAY else f"the unknown metadata type {item_kind}"
        raise CheckpointError(f"{self.path}: {shown(key)} is an array of {kind_name}, which is not supported")

    def tensor_info(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        name, axes = self.string(), self.scalar("I")
        if axes > MAX_AXES:
            raise CheckpointError(
                f"{self.path}: {shown(name)} has {axes:,} axes, more than the {MAX_AXES} of GGUF"
            )
        shape = tuple(reversed([self.scalar("Q") for _ in range(axes)]))
        kind = self.scalar("I")
        try:
            ggml_type = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise CheckpointError(f"{self.path}: {shown(name)} has the unknown type number {kind}") from None
        return name, shape, ggml_type, self.scalar("Q")
