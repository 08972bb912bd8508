"""Hugging Face folders: bits as in the file; damaged, outside and pickled files are refused before use."""

import json
import os
import pickle
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import make_tiny, write_hf

from jaxinfer.checkpoints import CheckpointError, open_checkpoint
from jaxinfer.checkpoints.huggingface import read_safetensors

BF16 = ml_dtypes.bfloat16
TINY = {"model_type": "llama", "tie_word_embeddings": True}


def write_raw(path, header, data, *, header_length=None):
    """A safetensors file byte by byte, so that it may be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", header_length or len(text)) + text + data)


def entry(start, stop, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize("num_shards", [1, 3])
def test_bits_are_those_of_the_file(tmp_path, num_shards):
    rng = np.random.default_rng(0)
    weights = {
        "bf16": rng.standard_normal((700, 1100)).astype(BF16),  # over 1 MiB
        "f16": rng.standard_normal((3, 5)).astype(np.float16),
        "f32": rng.standard_normal((2, 3, 4)).astype(np.float32),
        "e4m3": rng.standard_normal(6).astype(ml_dtypes.float8_e4m3fn),
        "e5m2": rng.standard_normal(6).astype(ml_dtypes.float8_e5m2),
        "empty": np.zeros((0, 4), np.float32),
    }
    checkpoint = open_checkpoint(write_hf(tmp_path, TINY, weights, num_shards=num_shards))
    for name, value in weights.items():
        source = checkpoint.tensors[name]
        assert (source.shape, source.dtype, source.nbytes) == (value.shape, value.dtype, value.nbytes)
        assert source.read().tobytes() == value.tobytes(), name
    part = checkpoint.tensors["bf16"].read_rows(13, 600)
    assert part.tobytes() == weights["bf16"][13:600].tobytes()
    pieces = [rows for _, rows in checkpoint.tensors["bf16"].chunks()]
    assert np.concatenate(pieces).tobytes() == weights["bf16"].tobytes()


def test_wrong_sizes_name_file_and_both_sizes(tmp_path):
    config, weights = make_tiny("llama_gqa")
    path = write_hf(tmp_path, config, weights) / "model.safetensors"
    whole = path.read_bytes()
    for damaged, word in (
        (whole[: len(whole) // 2], "truncated"),
        (whole[:-1], "truncated"),
        (whole + b"\0", "padded"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=word) as error:
            open_checkpoint(tmp_path)
        for part in (str(path), f"{len(whole):,}", f"{len(damaged):,}"):
            assert part in str(error.value)
    for damaged in (whole[:100], b"1234567", b"", struct.pack("<Q", 2**60) + b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="truncated"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6),  # overlap
        ({"a": entry(0, 4), "b": entry(8, 12)}, 12),  # hole
        ({"a": entry(0, 4, (2,))}, 4),  # shape against bytes
        ({"a": entry(-4, 4, (2,))}, 4),
        (b'{"a":' + json.dumps(entry(0, 4)).encode() + b',"a":' + json.dumps(entry(0, 4)).encode() + b"}", 4),
        ({"a": entry(0, 4, dtype="F99")}, 4),
        ({"a": {"dtype": "F32"}}, 4),
        (b"[]", 0),
        (b"{not json", 0),
        ({"a": "text"}, 0),
    ],
)
def test_invalid_headers_are_refused_by_file_name(tmp_path, header, data_bytes):
    path = tmp_path / "model.safetensors"
    write_raw(path, header, b"\0" * data_bytes)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_safetensors(path)


def test_tensors_without_axes_keep_their_shape(tmp_path):
    write_raw(tmp_path / "m.safetensors", {"a": entry(0, 4, ())}, struct.pack("<f", 3.5))
    value = read_safetensors(tmp_path / "m.safetensors")["a"].read()
    assert value.shape == () and value == 3.5


def test_empty_metadata_is_fine(tmp_path):
    write_raw(tmp_path / "m.safetensors", {"__metadata__": {}, "a": entry(0, 4)}, b"\0" * 4)
    assert list(read_safetensors(tmp_path / "m.safetensors")) == ["a"]


@pytest.mark.parametrize(
    "shard", ["../other/model.safetensors", "a/../../x", "nul\0", "", "..\\x", "C:/x", "/abs"]
)
def test_index_that_points_outside_is_refused_before_opening(tmp_path, shard):
    # Path traversal: another model's weights were read through the index.
    outside = tmp_path / "other"
    outside.mkdir()
    save_file({"a": np.zeros(1, np.float32)}, outside / "model.safetensors")
    if shard == "/abs":
        shard = str(outside / "model.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match="outside the folder") as error:
        open_checkpoint(folder)
    assert repr(shard) in str(error.value)


def test_links_leave_the_folder_only_for_the_hub_caches_blobs(tmp_path):
    config, weights = make_tiny("llama_gqa")
    hub = tmp_path / "models--org--name"
    snapshot, blobs = hub / "snapshots" / "abc", hub / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    elsewhere = write_hf(tmp_path / "elsewhere", config, weights)
    for name in ("config.json", "model.safetensors"):
        (elsewhere / name).rename(blobs / name)
        (snapshot / name).symlink_to(os.path.join("../../blobs", name))
    assert len(open_checkpoint(snapshot).tensors) == len(weights)

    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(blobs / name)
    with pytest.raises(CheckpointError, match="link to"):
        open_checkpoint(folder)


def test_index_and_shards_must_agree(tmp_path):
    config, weights = make_tiny("llama_gqa")
    write_hf(tmp_path, config, weights, num_shards=2)
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    del index["weight_map"]["model.norm.weight"]
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"disagree.*model\.norm\.weight"):
        open_checkpoint(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        open_checkpoint(tmp_path)


def test_pickles_are_refused_and_never_run(tmp_path):
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self):
            return (open, (str(canary), "w"))

    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"pickled weights.*convert them to safetensors"):
        open_checkpoint(tmp_path)
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == {"a"}  # beside safetensors they do not matter
    assert not canary.exists()


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "expected"),
    [(2, None, (2,)), ([2, 5], None, (2, 5)), (2, [7, 8], (7, 8)), (None, 3, (3,)), (None, None, ())],
)
def test_end_token_ids(tmp_path, config_ids, generation_ids, expected):
    write_hf(tmp_path, TINY | {"eos_token_id": config_ids}, {"a": np.zeros(1, np.float32)})
    if generation_ids is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_ids}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.end_token_ids == expected
    assert (checkpoint.generation_config is None) == (generation_ids is None)


def test_other_refusals_say_what_is_wrong(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(CheckpointError, match="quantized with gptq"):
        open_checkpoint(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither a GGUF file"):
        open_checkpoint(tmp_path / "weights.bin")
