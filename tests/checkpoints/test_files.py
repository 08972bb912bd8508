"""Files of a checkpoint: links out of the folder, FIFOs, placeholders and encodings are refused by name, never read."""

import json
import os
import shutil
from pathlib import Path

import pytest
import text_fixtures as fixtures
from tiny_models import make_tiny, write_gguf, write_hf

from jaxinfer import checkpoints
from jaxinfer.checkpoints import CheckpointError, files, huggingface
from jaxinfer.checkpoints.fetch import FetchError, resolve
from jaxinfer.options.model_source import named_facts
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.tools.planner import shape

SECRET = "the text of another file"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
READ_BY_TOKENIZER = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
    "config.json",
]
READ_BY_CHECKPOINT = ["config.json", "generation_config.json", "model.safetensors"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = write_hf(tmp_path / "model", *make_tiny("llama_gqa"))
    fixtures.save(
        model,
        fixtures.byte_level(),
        fixtures.BYTE_LEVEL_CONFIG,
        generation_config={},
        special_tokens_map={},
    )
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (model / "chat_template.jinja").write_text("plain")
    return model


def open_all(folder: Path) -> None:
    load_tokenizer(folder)
    checkpoints.open_checkpoint(folder)


def test_the_folder_itself_is_right(folder):
    open_all(folder)
    assert load_tokenizer(folder).chat_templates == {"default": "plain", "tool_use": "tools"}


@pytest.mark.parametrize("name", dict.fromkeys(READ_BY_TOKENIZER + READ_BY_CHECKPOINT))
def test_links_out_of_the_folder_are_refused_for_every_file(folder, tmp_path, name):
    # A secret's text was rendered into the prompt through chat_template.jinja.
    outside = tmp_path / "secret"
    outside.write_bytes((folder / name).read_bytes() if (folder / name).exists() else SECRET.encode())
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match="link to") as error:
        open_all(folder)
    assert str(folder / name) in str(error.value)


@pytest.mark.parametrize("name", dict.fromkeys(READ_BY_TOKENIZER + READ_BY_CHECKPOINT))
@pytest.mark.parametrize("kind", ["fifo", "folder", "nowhere", "circle"])
def test_what_is_no_file_is_refused_and_never_waited_for(folder, name, kind):
    (folder / name).unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(folder / name)
        case "folder":
            (folder / name).mkdir()
        case "nowhere":
            (folder / name).symlink_to(folder / "gone")
        case "circle":
            (folder / name).symlink_to(folder / name)
    with pytest.raises(CheckpointError) as error:
        open_all(folder)
    assert str(folder / name) in str(error.value) and "\n" not in str(error.value)


def test_links_inside_the_hub_cache_work_for_every_file(folder, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(folder, snapshot)
    blobs.mkdir()
    for i, path in enumerate(path for path in list(snapshot.rglob("*")) if path.is_file()):
        path.rename(blobs / str(i))
        path.symlink_to(os.path.relpath(blobs / str(i), path.parent))
    open_all(snapshot)
    assert load_tokenizer(snapshot).chat_templates == {"default": "plain", "tool_use": "tools"}
    assert shape.load(snapshot, "float32").num_layers == 2


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (LFS.encode(), "Git LFS pointer .*git lfs pull"),
        (b"\xef\xbb\xbf{}", "byte order mark of UTF-8"),
        ("{}".encode("utf-16"), "byte order mark of UTF-16"),
        (b"\xff\x00", "not UTF-8"),
        (b"", "not valid JSON"),
        (b"[]", "holds list instead of an object"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_damaged_json_is_named_with_its_file(folder, name, content, match):
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=match) as error:
        open_all(folder)
    assert str(folder / name) in str(error.value) and len(str(error.value)) < 600


def test_placeholders_of_weights_are_named(folder, tmp_path):
    for path in (folder / "model.safetensors", tmp_path / "m.gguf"):
        path.write_text(LFS)
        with pytest.raises(CheckpointError, match="Git LFS pointer"):
            checkpoints.open_checkpoint(folder if path.parent == folder else path)


def test_files_over_their_bound_are_not_read(folder):
    with open(folder / "config.json", "r+b") as file:
        file.truncate(files.MAX_JSON_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"config\.json has 16,777,217 bytes, more than the 16,777,216"):
        huggingface.open_checkpoint(folder)


@pytest.mark.parametrize("name", ["model", "model.GGUF", "model.bin"])
def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path, name):
    path = tmp_path / name
    write_gguf(path, *make_tiny("llama_gqa"))
    assert resolve(path) == path
    assert checkpoints.open_checkpoint(path).kind == "gguf"
    fixtures.write_gguf(path, fixtures.byte_level_metadata())
    assert load_tokenizer(path).vocab_size > 256


def test_other_files_are_not_taken_for_missing(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="neither a GGUF file nor a folder"):
        checkpoints.open_checkpoint(resolve(path))
    os.mkfifo(tmp_path / "fifo.gguf")
    for load in (checkpoints.open_checkpoint, load_tokenizer):
        with pytest.raises(CheckpointError, match="is a FIFO"):
            load(tmp_path / "fifo.gguf")


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_folder(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    for find in (resolve, named_facts):
        with pytest.raises(FetchError, match="name is empty"):
            find(name)


def test_many_keys_with_one_twice_are_found_in_one_pass(tmp_path):
    # 200,000 names were compared with each other: hours.
    names = [f'"{i}": 0' for i in range(200_000)] + ['"7": 1']
    (tmp_path / "config.json").write_text("{" + ",".join(names) + "}")
    with pytest.raises(CheckpointError, match="'7' appears twice"):
        files.read_json(tmp_path / "config.json")


def test_the_sampling_keys_of_an_old_config_act_where_nothing_else_says_so(tmp_path):
    config, weights = make_tiny("llama_gqa")
    old = {"temperature": 0.6, "top_k": 50, "top_p": 1.0, "do_sample": True, "max_length": 20}
    write_hf(tmp_path, config | old, weights)
    assert checkpoints.open_checkpoint(tmp_path).generation_config == {"temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.9}))
    assert checkpoints.open_checkpoint(tmp_path).generation_config == {"top_p": 0.9}
