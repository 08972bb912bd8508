"""SentencePiece's tokenizer.model as the `tokenizer.ggml.*` keys that hold the same facts in a GGUF file.

The file is one protobuf message (sentencepiece_model.proto); the few fields that matter are read here, so that neither
protobuf nor sentencepiece has to be installed. GGUF numbers the piece types as this format does.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxinfer.checkpoints.files import MIB, CheckpointError, read_bytes
from jaxinfer.text.wording import shown

MAX_BYTES = 64 * MIB
BPE = 2  # TrainerSpec.model_type
_MODEL_TYPES = {1: "unigram", BPE: "bpe", 3: "word", 4: "char"}


def read_metadata(path: Path) -> dict[str, Any]:
    """The GGUF keys of a byte-fallback BPE model.

    Raises CheckpointError for other kinds, by name, and for broken files.
    """
    content = read_bytes(path, MAX_BYTES)
    tokens, scores, types = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for field, value in _fields(content):
            if field == 1:  # SentencePiece
                piece = dict(_fields(value))
                tokens.append(piece[1].decode())
                scores.append(piece.get(2, 0.0))
                types.append(piece.get(3, 1))
            elif field == 2:
                trainer = dict(_fields(value))
            elif field == 3:
                normalizer = dict(_fields(value))
    except (AttributeError, IndexError, KeyError, TypeError, UnicodeDecodeError, struct.error) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model, or is cut short") from error
    model_type = trainer.get(3, 1)
    if model_type != BPE:
        raise CheckpointError(
            f"{path} is a SentencePiece {_MODEL_TYPES.get(model_type, model_type)!r} model; only 'bpe' is supported"
        )
    if normalizer.get(2):
        raise CheckpointError(
            f"{path} normalizes text by {shown(normalizer.get(1, b''))}; only 'identity' is supported"
        )
    if normalizer.get(4, 1):
        raise CheckpointError(f"{path} removes extra spaces from text, which is not supported")
    ids = {"unknown": trainer.get(40, 0), "bos": trainer.get(41, 1), "eos": trainer.get(42, 2)}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
        **{f"tokenizer.ggml.{name}_token_id": _signed(id_) for name, id_ in ids.items()},
    }


def _signed(value: Any) -> Any:
    """An id that is absent is stored as -1, a varint of 64 bits."""
    return value - (1 << 64) if isinstance(value, int) and value >= 1 << 63 else value


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protobuf message: int, float (32 bits), or bytes."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        match key & 7:
            case 0:
                value, position = _varint(message, position)
                yield key >> 3, value
            case 1:
                yield key >> 3, struct.unpack_from("<d", message, position)[0]
                position += 8
            case 2:
                size, position = _varint(message, position)
                if position + size > len(message):
                    raise IndexError("message is cut short")
                yield key >> 3, message[position : position + size]
                position += size
            case 5:
                yield key >> 3, struct.unpack_from("<f", message, position)[0]
                position += 4
            case wire:
                raise KeyError(f"wire type {wire}")


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = message[position]
        position += 1
        if shift > 63:
            raise IndexError("a number is longer than 64 bits")
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
