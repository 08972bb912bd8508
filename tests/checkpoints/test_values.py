"""Values of files: kinds and ranges are checked when a file is opened, each refused with file, key and value."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import CONFIGS, make_tiny, write_hf

from jaxinfer import checkpoints, models
from jaxinfer.checkpoints import CheckpointError, gguf_tokenizer
from jaxinfer.checkpoints.gguf import MAX_HEADER_BYTES, read_header
from jaxinfer.checkpoints.huggingface import read_safetensors
from jaxinfer.checkpoints.token_ids import valid_id, valid_ids
from jaxinfer.models import hf_config, llama, qwen3

LLAMA = CONFIGS["llama_gqa"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, (2,)),
        ([2, 5, 2], (2, 5)),
        (None, ()),
        (-1, ()),
        ([2, None], (2,)),
        ([-1, 2], (2,)),
        (2**32 - 1, ()),
        ([], ()),
        (0, (0,)),
    ],
)
def test_ids_and_the_ways_to_say_none(value, expected):
    assert valid_ids(value, "f: eos", 10) == expected


@pytest.mark.parametrize(
    "value", [10, -2, 2**40, "2", True, 2.0, [2, "3"], {"a": 1}, [[2]], 10**400, float("nan")]
)
def test_other_ids_are_refused_with_file_key_and_value(value):
    with pytest.raises(CheckpointError, match=r"f\.json: eos_token_id is ") as error:
        valid_ids(value, "f.json: eos_token_id", 10)
    assert len(str(error.value)) < 300
    with pytest.raises(CheckpointError):
        valid_id([1, 2], "f.json: bos_token_id", 10)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("value", "expected"), [(-1, ()), ([-1, 7], (7,)), (None, ()), ([7, None], (7,))])
def test_minus_one_is_no_end_id(tmp_path, file, value, expected):
    # min_tokens banned the last id of the vocabulary.
    config, weights = make_tiny("llama_gqa")
    config = {key: given for key, given in config.items() if key != "eos_token_id"}
    write_hf(tmp_path, config, weights)
    content = (config if file == "config.json" else {}) | {"eos_token_id": value}
    (tmp_path / file).write_text(json.dumps(content))
    assert checkpoints.open_checkpoint(tmp_path).end_token_ids == expected


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [512, [2, 512], "2", -7, 4.5])
def test_end_ids_outside_the_vocabulary_are_named_at_load(tmp_path, file, value):
    config, weights = make_tiny("llama_gqa")
    write_hf(tmp_path, config, weights)
    content = (config if file == "config.json" else {}) | {"eos_token_id": value}
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"{file}: eos_token_id is "):
        checkpoints.open_checkpoint(tmp_path)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_ids(path: Path, **ids: object) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"block_count": 1, "embedding_length": 64, "feed_forward_length": 64}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 4)
    for name, value in ids.items():
        key = f"tokenizer.ggml.{name}_token_id"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value < 0:
            writer.add_int32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    finish(writer)


def test_ids_of_gguf_files(tmp_path):
    path = tmp_path / "m.gguf"
    write_ids(path, eos=-1, eot=2**32 - 1, eom=5, bos=-1)
    assert checkpoints.open_checkpoint(path).end_token_ids == (5,)
    for name in ("eos", "eot", "eom"):
        for value in (8, "2", -3):
            write_ids(path, **{name: value})
            with pytest.raises(CheckpointError, match=rf"m\.gguf: tokenizer\.ggml\.{name}_token_id is "):
                checkpoints.open_checkpoint(path)


WRONG_VALUES = [
    ("num_hidden_layers", 100_000),
    ("num_hidden_layers", -1),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 2.0),
    ("num_hidden_layers", True),
    ("num_hidden_layers", "2"),
    ("num_hidden_layers", [2]),
    ("vocab_size", 10**12),
    ("vocab_size", 10**400),
    ("hidden_size", -64),
    ("num_attention_heads", 0),
    ("num_key_value_heads", 3),
    ("head_dim", 15),
    ("head_dim", {}),
    ("intermediate_size", 10**9),
    ("max_position_embeddings", 2**31),
    ("rms_norm_eps", "1e-5"),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", -1e-5),
    ("rope_theta", float("inf")),
    ("rope_theta", 0.0),
    ("tie_word_embeddings", "false"),
    ("attention_bias", 1),
    ("rope_scaling", "linear"),
    ("rope_parameters", [1]),
    ("text_config", 7),
    ("layer_types", "full_attention"),
    ("sliding_window", -1),
    ("sliding_window", "512"),
]


@pytest.mark.parametrize(("key", "value"), WRONG_VALUES, ids=lambda value: str(value)[:20])
def test_wrong_values_of_a_config_are_refused_before_any_work(tmp_path, key, value, monkeypatch):
    config, weights = make_tiny("llama_gqa")
    write_hf(tmp_path, config, weights)
    text = json.dumps(config | {key: "@"}).replace('"@"', json.dumps(value))
    (tmp_path / "config.json").write_text(text)
    monkeypatch.setattr(llama, "init", None)  # traced by whoever wants to know the shapes
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} ") as error:
        checkpoints.open_checkpoint(tmp_path)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)
    for module in (llama, qwen3):
        with pytest.raises(ValueError, match=key):
            module.Config.from_hf(config | {key: value})


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": float("nan")},
        {"rope_type": "linear", "factor": "4"},
        {"rope_type": ["linear"], "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 64},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"rope_type": "default", "factor": 2.0},
        {"rope_type": "factors", "factors": [1.0] * 7},
        {"rope_type": "factors", "factors": [0.0] * 8},
        {"rope_type": "factors", "factors": "11111111"},
        {"rope_theta": -1.0},
    ],
)
def test_wrong_rope_scaling_is_refused(scaling):
    with pytest.raises(ValueError, match="rope"):
        llama.Config.from_hf(LLAMA | {"rope_parameters": scaling})


@pytest.mark.parametrize(
    "change",
    [
        {"unsloth_version": "2026.1", "_attn_implementation_autoset": True, "_flash_attn_2_enabled": True},
        {
            "text_config": None,
            "max_sequence_length": 2048,
            "model_max_length": 9,
            "gradient_checkpointing": True,
        },
        {"temperature": 0.6, "do_sample": True, "max_length": 20, "num_beams": 1, "early_stopping": False},
        {"hidden_act": "swish"},
        {"sliding_window": 512},  # = max_position_embeddings
        {"sliding_window": 4096, "use_sliding_window": True} | {"use_sliding_window": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
        {"rope_scaling": {"type": "default", "factor": 1.0}},
        {"rope_scaling": {}},
        {"vision_config": None, "pruned_heads": {}, "layer_types": ["full_attention"] * 2},
    ],
)
def test_keys_that_change_nothing_are_accepted(change):
    for kind, module in models.MODELS.items():
        assert module.Config.from_hf({**LLAMA, **change, "model_type": kind}) == module.Config.from_hf(
            {**LLAMA, "model_type": kind}
        )


def test_every_inert_key_has_one_reason():
    keys = [key for keys in hf_config.INERT_KEYS_BY_REASON.values() for key in keys]
    assert len(keys) == len(set(keys))
    assert not set(keys) & set(hf_config.NEUTRAL_VALUES)


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"sliding_window": None}, None),
        ({"sliding_window": 512}, None),
        ({"sliding_window": 4096, "max_position_embeddings": 4096}, None),
        ({"sliding_window": 128}, 128),
        ({"max_position_embeddings": 32768}, 4096),  # the default of its family
        ({}, None),  # these 4096 cover all 512 positions
    ],
)
def test_the_window_of_mistral(change, window):
    hf = {**LLAMA, "model_type": "mistral", **change}
    layers = models.MODELS["mistral"].Config.from_hf(hf).layers
    assert [layer.attention.window for layer in layers] == [window] * 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_hidden_layers": 900}, "num_hidden_layers is 900, but the file has tensors of 2 layers"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1, but"),
        ({"vocab_size": 2**20}, r"vocab_size and hidden_size are 1048576 and 64, but .* is \[512, 64\]"),
        ({"hidden_size": 4096}, "vocab_size and hidden_size are 512 and 4096, but"),
    ],
)
def test_sizes_are_compared_with_the_tensors_of_the_file_first(tmp_path, change, match, monkeypatch):
    config, weights = make_tiny("llama_gqa")
    write_hf(tmp_path, config | change, weights)
    monkeypatch.setattr(llama, "init", None)
    with pytest.raises(CheckpointError, match=match):
        checkpoints.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 10**9),
        ("block_count", 7),
        ("block_count", "two"),
        ("embedding_length", 0),
        ("attention.head_count", [4, 4]),
        ("attention.head_count", 0),
        ("attention.layer_norm_rms_epsilon", "x"),
        ("rope.freq_base", -1.0),
        ("rope.scaling.factor", "4"),
        ("rope.scaling.type", 3),
        ("attention.sliding_window", -1),
    ],
)
def test_wrong_values_of_a_gguf_header(tmp_path, key, value):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    keys = {"block_count": 2, "embedding_length": 64, "feed_forward_length": 64, "attention.head_count": 4}
    for name, given in (keys | {key: value}).items():
        add = {
            int: writer.add_int64,
            str: writer.add_string,
            float: writer.add_float32,
            list: writer.add_array,
        }
        add[type(given)](f"llama.{name}", given)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.zeros(64, np.float32))
    finish(writer)
    hf_key = {"block_count": "(llama.block_count|num_hidden_layers)"}.get(key, f"llama.{key}")
    with pytest.raises(CheckpointError, match=rf"m\.gguf: {hf_key} is ") as error:
        checkpoints.open_checkpoint(tmp_path / "m.gguf")
    assert "\n" not in str(error.value)


def raw_gguf(pairs: bytes = b"", num_pairs: int = 0, infos: bytes = b"", num_tensors: int = 0) -> bytes:
    counts = np.array([num_tensors, num_pairs], "<u8").tobytes()
    return b"GGUF" + np.array([3], "<u4").tobytes() + counts + pairs + infos


def text(value: str) -> bytes:
    return np.array([len(value)], "<u8").tobytes() + value.encode()


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def u64(*values: int) -> bytes:
    return np.array(values, "<u8").tobytes()


def test_nested_arrays_of_gguf_are_refused(tmp_path):
    # 3,000 deep they were a RecursionError.
    path = tmp_path / "m.gguf"
    nested = b"".join(u32(9) + u64(1) for _ in range(3000)) + u32(4) + u64(0)
    path.write_bytes(raw_gguf(text("x.deep") + u32(9) + nested, 1))
    with pytest.raises(CheckpointError, match=r"m\.gguf: 'x\.deep' is an array of arrays"):
        read_header(path)


def info(name: str, shape: tuple[int, ...], offset: int, kind: int = 0) -> bytes:
    return text(name) + u32(len(shape)) + u64(*reversed(shape)) + u32(kind) + u64(offset)


@pytest.mark.parametrize(
    ("infos", "match"),
    [
        ([info("a", (16,), 0), info("b", (16,), 32)], "'a' and 'b' overlap"),
        ([info("a", (16,), 0), info("b", (8,), 68)], "'b' begins at byte 68"),
        ([info("a", (1,) * 5, 0)], "'a' has 5 axes"),
        ([text("a") + u32(2**32 - 1)], "'a' has 4,294,967,295 axes"),
        ([info("a", (2**60, 2**60), 0)], "truncated"),
        ([info("a", (8,), 0, kind=999)], "'a' has the unknown type number 999"),
    ],
)
def test_places_of_gguf_tensors(tmp_path, infos, match):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf(infos=b"".join(infos), num_tensors=len(infos)) + b"\0" * 1024)
    with pytest.raises(CheckpointError, match=match):
        read_header(path)


@pytest.mark.parametrize("alignment", [0, 3, 2**31])
def test_alignments_that_are_none(tmp_path, alignment):
    (tmp_path / "m.gguf").write_bytes(raw_gguf(text("general.alignment") + u32(4, alignment), 1))
    with pytest.raises(CheckpointError, match=r"m\.gguf: general\.alignment is "):
        read_header(tmp_path / "m.gguf")


def test_a_long_gguf_header_is_not_read(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf(text("x") + u32(9, 0) + u64(MAX_HEADER_BYTES), 1))
    with open(path, "r+b") as file:
        file.truncate(4 * MAX_HEADER_BYTES)
    with pytest.raises(CheckpointError, match=r"header is longer than the 67,108,864 bytes"):
        read_header(path)


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ("text", "is 'text', not an object"),
        (None, "not an object"),
        (ENTRY | {"dtype": ["F32"]}, "has dtype"),
        (ENTRY | {"dtype": None}, "has dtype None"),
        (ENTRY | {"shape": "1"}, "has shape '1'"),
        (ENTRY | {"shape": [1.0]}, "has shape"),
        (ENTRY | {"shape": [True]}, "has shape"),
        (ENTRY | {"shape": [-1]}, "has shape"),
        (ENTRY | {"shape": [1] * 99}, "has shape"),
        (ENTRY | {"shape": [2**40, 2**40]}, "is not the size of F32"),
        (ENTRY | {"data_offsets": [0]}, "has data_offsets"),
        (ENTRY | {"data_offsets": {"0": 4}}, "has data_offsets"),
        (ENTRY | {"data_offsets": ["0", "4"]}, "has data_offsets"),
        (ENTRY | {"data_offsets": [4, 0]}, "is not the size"),
        (ENTRY | {"data_offsets": [0, 10**30]}, "has data_offsets"),
    ],
)
def test_entries_of_a_safetensors_header(tmp_path, entry, match):
    header = json.dumps({"layer.weight": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(u64(len(header)) + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor 'layer\.weight' .*{match}"):
        read_safetensors(path)


def test_a_long_safetensors_header_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(u64(85_000_000))
    with open(path, "r+b") as file:
        file.truncate(90_000_000)
    with pytest.raises(CheckpointError, match="header of 85,000,000 bytes, more than the 16,777,216"):
        read_safetensors(path)


def test_an_index_with_files_that_are_no_names(tmp_path):
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": ["a.safetensors"]}})
    )
    with pytest.raises(CheckpointError, match=r"'a' lies in .* which is no file"):
        checkpoints.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokens": "abc"}, r"tokenizer\.ggml\.tokens is a list of text"),
        ({"tokens": [1, 2]}, r"tokenizer\.ggml\.tokens"),
        ({"token_type": ["1"]}, r"tokenizer\.ggml\.token_type"),
        ({"model": 7}, r"tokenizer\.ggml\.model"),
        ({"pre": ["gpt-2"]}, r"tokenizer\.ggml\.pre"),
        ({"merges": [1]}, r"tokenizer\.ggml\.merges"),
        ({"merges": ["zz yy"]}, r"tokenizer\.ggml"),
        ({"add_bos_token": "yes"}, r"tokenizer\.ggml\.add_bos_token"),
        ({"bos_token_id": "1"}, r"tokenizer\.ggml\.bos_token_id"),
        ({"bos_token_id": 10**6, "add_bos_token": True}, r"bos_token_id is 1000000"),
    ],
)
def test_wrong_values_of_a_gguf_vocabulary(change, match):
    import text_fixtures as fixtures

    with pytest.raises(ValueError, match=match):
        gguf_tokenizer.build(fixtures.byte_level_metadata(**change))


LARGE = """
import resource, sys
from jaxinfer.checkpoints import gguf_tokenizer
import text_fixtures as fixtures
kind = sys.argv[1]
tokens, scores, types = fixtures.sentencepiece_vocab()
if kind == "long":
    tokens[300] = "a" * 100_000
elif kind == "many":
    more = [f"piece{i}" for i in range(150_000)]
    tokens, scores, types = tokens + more, scores + [-1.0] * len(more), types + [1] * len(more)
elif kind == "twice":
    more = [f"piece{i}" for i in range(150_000)] + ["piece149999"]
    tokens, scores, types = tokens + more, scores + [-1.0] * len(more), types + [1] * len(more)
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
try:
    print(gguf_tokenizer.build(fixtures.sentencepiece_metadata(tokens=tokens, scores=scores, token_type=types)))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("long", "of 100,000 characters; a piece of SentencePiece has at most 256"),
        ("many", "Tokenizer"),
        ("twice", "more than once"),
    ],
)
def test_large_vocabularies_take_bounded_time_and_memory(kind, said):
    # One token of 100 KB took 9.7 GB; 150,000 pieces were compared with each other.
    tests = Path(__file__).parents[1]
    child = subprocess.run(
        [sys.executable, "-c", LARGE, kind], cwd=tests, capture_output=True, text=True, timeout=300,
        env={"PYTHONPATH": f"{tests.parent}:{tests}", "PATH": "", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    assert said in child.stdout, child.stdout[:300]


@pytest.mark.parametrize("key", ["a\nb", "k" * 5000, "\u2028"])
def test_keys_that_would_break_the_sentence_are_quoted(key):
    for change in ({key: 1}, {"rope_parameters": {"rope_type": "default", key: 1}}):
        with pytest.raises(ValueError, match=r"not handle|not understood") as error:
            llama.Config.from_hf(LLAMA | change)
        assert "\n" not in str(error.value) and len(str(error.value)) < 600
