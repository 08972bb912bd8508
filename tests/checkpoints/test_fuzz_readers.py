"""Readers given damaged and invented files: one sentence of CheckpointError, never internals, a hang or much memory.

Each case is a right file with a few values, bytes or tokens of JSON changed, since noise is refused at its first byte.
"""

import json
import math
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import text_fixtures as fixtures
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import make_tiny, write_gguf, write_hf

from jaxinfer import checkpoints, models
from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.huggingface import read_safetensors
from jaxinfer.checkpoints.loading import weight_leaves
from jaxinfer.options.model_source import checkpoint_facts
from jaxinfer.text.tokenizer import load_tokenizer

SECONDS, MEGABYTES = (
    20,
    600,
)  # of one case on a busy machine; the bounds that it guards against are hours and gigabytes
MAX_MESSAGE = 2500


def examples(count: int) -> Callable[..., Any]:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count, deadline=None, suppress_health_check=checks, derandomize=True)


@contextmanager
def one_sentence(allowed: type[Exception] = CheckpointError) -> Iterator[None]:
    """What is inside is right, or raises `allowed` in one bounded line; in bounded time and memory."""
    start, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    except allowed as error:
        assert "\n" not in str(error) and 10 < len(str(error)) < MAX_MESSAGE, str(error)[:500]
    assert time.monotonic() - start < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MEGABYTES * 1024


NUMBERS = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 3, 7, 63, 64, 65, 2**31, 2**32 - 1, 2**63, 10**30, 10**9, 100_000]),
    st.sampled_from([0.0, -1.0, 0.5, 1e308, math.inf, math.nan]),
)
VALUES = st.recursive(
    st.one_of(
        NUMBERS, st.none(), st.booleans(), st.text(max_size=6), st.sampled_from(["", "x" * 5000, "silu"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with a few bytes, or 4 or 8 of them as a number, overwritten, removed, or put in twice."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["byte", "u32", "u64", "cut", "remove", "repeat"])):
            case "byte":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "u32":
                data[at : at + 4] = struct.pack(
                    "<I", draw(st.sampled_from([0, 1, 9, 2**16, 2**31, 2**32 - 1]))
                )
            case "u64":
                data[at : at + 8] = struct.pack(
                    "<Q", draw(st.sampled_from([0, 1, 2**20, 2**40, 2**63, 2**64 - 1]))
                )
            case "cut":
                del data[at:]
            case "remove":
                del data[at : at + draw(st.integers(1, 40))]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 200))]
    return bytes(data)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a JSON tree; of long lists the first entries."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:4]) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


@st.composite
def changed(draw: st.DrawFn, content: dict[str, Any], most: int = 40) -> str:
    """JSON text of `content` with one to three values replaced or removed, or keys added."""
    tree = json.loads(json.dumps(content))
    every = list(places(tree))
    # Evenly over names and depths, not by the many entries of a vocabulary.
    every = sorted(every, key=len)[:most] + every[:: max(1, len(every) // most)]
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(every))
        parent = tree
        try:
            for key in path[:-1]:
                parent = parent[key]
            match draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"])):
                case "replace":
                    parent[path[-1]] = draw(VALUES)
                case "remove":
                    del parent[path[-1]]
                case "add":
                    parent[draw(st.text(max_size=8))] = draw(VALUES)
        except (KeyError, IndexError, TypeError):  # gone with a change before
            continue
    return json.dumps(tree)


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    folder = write_hf(tmp_path_factory.mktemp("hf"), *make_tiny("llama_gqa"))
    return fixtures.save(folder, fixtures.byte_level(), fixtures.BYTE_LEVEL_CONFIG)


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory) -> list[bytes]:
    """A model without vocabulary, and vocabularies of both kinds."""
    folder = tmp_path_factory.mktemp("gguf")
    config, weights = make_tiny("llama_rope_llama3")
    write_gguf(folder / "m.gguf", config, weights)
    texts = [fixtures.byte_level_metadata(), fixtures.sentencepiece_metadata()]
    vocabularies = [fixtures.write_gguf(folder / f"{i}.gguf", metadata) for i, metadata in enumerate(texts)]
    return [path.read_bytes() for path in (folder / "m.gguf", *vocabularies)]


def open_and_understand(path: Path) -> None:
    weight_leaves.cache_clear()
    checkpoint_facts(checkpoints.open_checkpoint(path))


def read_gguf(path: Path) -> None:
    """As a start does, and then tensors: their places are those of the header."""
    checkpoint = checkpoints.open_checkpoint(path)
    if checkpoint.metadata and "tokenizer.ggml.tokens" in checkpoint.metadata:
        load_tokenizer(path, checkpoint.metadata)
    for source in checkpoint.tensors.values():
        if source.shape:
            source.read_rows(0, min(2, source.shape[0]))


def check_gguf(data: st.DataObject, files: list[bytes], folder: Path) -> None:
    whole = data.draw(st.sampled_from(files))
    header = whole[: data.draw(st.sampled_from([300, 3000, len(whole)]))]
    path = folder / "m.gguf"
    path.write_bytes(data.draw(damaged(header)) + whole[len(header) :])
    with one_sentence():
        read_gguf(path)
    with one_sentence():
        load_tokenizer(path)


@given(data=st.data())
@examples(150)
def test_gguf(data, gguf_files, tmp_path):
    check_gguf(data, gguf_files, tmp_path)


@pytest.mark.slow
@given(data=st.data())
@examples(5000)
def test_gguf_longer(data, gguf_files, tmp_path):
    check_gguf(data, gguf_files, tmp_path)


GGUF_WRITERS = ["uint8", "int8", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64", "bool"]


def check_gguf_values(data: st.DataObject, folder: Path) -> None:
    """Well-formed files whose keys hold values of any kind and size."""
    metadata = data.draw(st.sampled_from([fixtures.byte_level_metadata(), fixtures.sentencepiece_metadata()]))
    keys = {"llama.block_count": 1, "llama.embedding_length": 64, "llama.feed_forward_length": 64}
    keys |= {"llama.attention.head_count": 4, "llama.context_length": 64, "general.alignment": 32}
    keys |= {"llama.rope.scaling.type": "none", "llama.rope.freq_base": 1e4, "split.count": 1} | metadata
    for key in data.draw(st.lists(st.sampled_from(sorted(keys)), min_size=1, max_size=3)):
        keys[key] = data.draw(VALUES)
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    for key, value in keys.items():
        try:
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int | float):
                getattr(writer, f"add_{data.draw(st.sampled_from(GGUF_WRITERS))}")(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
        except (ValueError, TypeError, KeyError):  # the writer itself refuses it
            continue
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except (struct.error, ValueError, TypeError, KeyError, AssertionError, OverflowError, IndexError):
        return
    finally:
        writer.close()
    with one_sentence():
        read_gguf(folder / "m.gguf")
    with one_sentence():
        load_tokenizer(folder / "m.gguf")


@given(data=st.data())
@examples(100)
def test_gguf_values(data, tmp_path):
    check_gguf_values(data, tmp_path)


@pytest.mark.slow
@given(data=st.data())
@examples(3000)
def test_gguf_values_longer(data, tmp_path):
    check_gguf_values(data, tmp_path)


def check_safetensors(data: st.DataObject, hf: Path, folder: Path) -> None:
    whole = (hf / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    if data.draw(st.booleans()):
        header = data.draw(changed(json.loads(whole[8 : 8 + size]))).encode()
        content = struct.pack("<Q", len(header)) + header + whole[8 + size :]
    else:
        content = data.draw(damaged(whole[: 8 + size])) + whole[8 + size :]
    path = folder / "model.safetensors"
    path.write_bytes(content)
    with one_sentence():
        for source in read_safetensors(path).values():
            source.read()
    shutil.copy(hf / "config.json", folder)
    with one_sentence():
        open_and_understand(folder)


@given(data=st.data())
@examples(120)
def test_safetensors(data, hf, tmp_path):
    check_safetensors(data, hf, tmp_path)


@pytest.mark.slow
@given(data=st.data())
@examples(4000)
def test_safetensors_longer(data, hf, tmp_path):
    check_safetensors(data, hf, tmp_path)


def check_config(data: st.DataObject, hf: Path, folder: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    config |= {
        "model_type": data.draw(st.sampled_from(["llama", "mistral", "qwen3"])),
        "sliding_window": None,
    }
    config |= data.draw(
        st.sampled_from([{}, make_tiny("llama_rope_llama3")[0], make_tiny("llama_rope_linear")[0]])
    )
    text = data.draw(changed(config))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).exists():
            shutil.copy(hf / name, folder)
    (folder / "config.json").write_text(text)
    generation = {"eos_token_id": [2], "temperature": 0.6, "top_k": 50}
    (folder / "generation_config.json").write_text(data.draw(changed(generation)))
    with one_sentence():
        open_and_understand(folder)
    with one_sentence():
        load_tokenizer(folder)
    with one_sentence(ValueError):  # given as a dict, without a file
        hf_config = json.loads(text)
        models.for_config(hf_config).Config.from_hf(hf_config)


@given(data=st.data())
@examples(120)
def test_config(data, hf, tmp_path):
    check_config(data, hf, tmp_path)


@pytest.mark.slow
@given(data=st.data())
@examples(4000)
def test_config_longer(data, hf, tmp_path):
    check_config(data, hf, tmp_path)


TEXT = "the in  erthe 日本\n<|im_start|>'s 12"


def check_tokenizer(data: st.DataObject, folder: Path) -> None:
    backend = data.draw(st.sampled_from([fixtures.byte_level, fixtures.sentencepiece, fixtures.metaspace]))()
    content = json.loads(backend.to_str())
    if data.draw(st.integers(0, 3)) == 0:
        (folder / "tokenizer.json").write_bytes(data.draw(damaged(json.dumps(content).encode())))
    else:
        (folder / "tokenizer.json").write_text(data.draw(changed(content)))
    config = fixtures.BYTE_LEVEL_CONFIG | {"chat_template": "x", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(data.draw(changed(config)))
    with one_sentence():
        tokenizer = load_tokenizer(folder)
        try:
            ids = tokenizer.encode(TEXT)
        except ValueError:  # a vocabulary without a token for unknown words: that text fails
            return
        tokenizer.decode(ids)


@given(data=st.data())
@examples(150)
def test_tokenizer_json(data, tmp_path):
    check_tokenizer(data, tmp_path)


@pytest.mark.slow
@given(data=st.data())
@examples(5000)
def test_tokenizer_json_longer(data, tmp_path):
    check_tokenizer(data, tmp_path)


def check_sentencepiece(data: st.DataObject, folder: Path) -> None:
    whole = (fixtures.DATA / "shakespeare.tokenizer.model").read_bytes()
    (folder / "tokenizer.model").write_bytes(data.draw(damaged(whole)))
    added = {"480": {"content": "<|end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(data.draw(changed({"added_tokens_decoder": added})))
    with one_sentence():
        load_tokenizer(folder)


@given(data=st.data())
@examples(40)
def test_sentencepiece_model(data, tmp_path):
    check_sentencepiece(data, tmp_path)


@pytest.mark.slow
@given(data=st.data())
@examples(2000)
def test_sentencepiece_model_longer(data, tmp_path):
    check_sentencepiece(data, tmp_path)
