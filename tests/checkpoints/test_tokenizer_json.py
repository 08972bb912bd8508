"""tokenizer.json of unknown origin: what could take all memory, or end the process, never reaches the library."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import text_fixtures as fixtures
from tokenizers import Tokenizer

from jaxinfer.checkpoints import CheckpointError, tokenizer_json
from jaxinfer.text.tokenizer import load_tokenizer


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(table: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def template(pieces: list[dict[str, Any]], ids: int = 1) -> dict[str, Any]:
    tokens = {"s": {"id": "s", "ids": [0] * ids, "tokens": ["a"] * ids}}
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": tokens}


A, S = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "s", "type_id": 0}}
DOUBLE = replace({"String": "a"}, "aa")


def sequence(key: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


def write(folder: Path, **changes: Any) -> Path:
    content = json.loads(fixtures.byte_level().to_str()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"normalizer": sequence("normalizers", *[DOUBLE] * 30)}, "normalizer can make a text over 256 times"),
        ({"normalizer": replace({"Regex": "."}, "x" * 300)}, "normalizer can make a text over 256 times"),
        ({"normalizer": replace({"String": "a"}, "x" * 10**6)}, "normalizer can make a text over 256 times"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}}, "normalizer: prepends more than 256"),
        ({"normalizer": charsmap(b"\xff\xff\xff\xff")}, "trie of 4,294,967,295 bytes in 4"),  # ended the process
        ({"normalizer": charsmap(b"\x03\0\0\0abc")}, "trie of 3 bytes in 7"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": 7}}, "not base64"),
        ({"normalizer": "NFC"}, "normalizer is 'NFC', not an object"),
        ({"normalizer": {"type": "Nothing"}}, "the tokenizers library refuses it"),
        ({"normalizer": sequence("normalizers", *[{"type": "NFC"}] * 99)}, "normalizer has 100 steps"),
        ({"post_processor": template([A] * 100_000)}, "post_processor: puts 0 tokens around 100,000 texts"),
        ({"post_processor": template([S] * 60 + [A], ids=10**5)}, "post_processor: puts 6,000,000 tokens"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated"}}, "refuses it"),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a" * 5000}, "behavior": "Isolated"}},
            "regular expression of 5,000 characters",
        ),
        ({"model": None}, "model is None"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}, "refuses it"),  # a panic
        ({"model": {"type": "BPE", "vocab": {"a": 4_000_000_000}, "merges": []}}, "'a' has the id 4000000000"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, "'a' has the id -1"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": [], "dropout": 7}}, "refuses it"),
        ({"added_tokens": [{"id": 10**9, "content": "q"}]}, "'q' has the id 1000000000"),
        ({"added_tokens": [7]}, "added_tokens is not a list of objects"),
    ],
)  # fmt: skip
def test_what_is_over_a_limit_is_refused_by_file_and_part(tmp_path, changes, match):
    with pytest.raises(CheckpointError, match=match) as error:
        load_tokenizer(write(tmp_path, **changes))
    assert str(error.value).startswith(str(tmp_path / "tokenizer.json"))
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("depth", [50, 5000])
def test_parts_nested_without_end_are_refused(tmp_path, depth):
    nested = '{"type": "Sequence", "normalizers": [' * depth + "]}" * depth
    text = json.dumps(json.loads(fixtures.byte_level().to_str()) | {"normalizer": "@"}).replace('"@"', nested)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="nested"):
        load_tokenizer(tmp_path)


def test_published_kinds_of_parts_stay_accepted(tmp_path):
    normalizer = sequence(
        "normalizers",
        {"type": "NFKC"},
        replace({"Regex": " {2,}"}, "▁"),
        replace({"String": "…"}, "..."),
        {"type": "Lowercase"},
    )
    tokenizer = load_tokenizer(write(tmp_path, normalizer=normalizer, post_processor=template([S, A, S])))
    assert tokenizer.encode("the")[0] == 0


def test_the_backend_is_that_of_the_file(tmp_path):
    backend = fixtures.sentencepiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_json.load(tmp_path / "tokenizer.json").to_str() == backend.to_str()


def test_ctrl_c_is_no_error_of_the_library():
    with pytest.raises(KeyboardInterrupt), tokenizer_json.library_errors("x"):
        raise KeyboardInterrupt


def test_a_panic_of_the_library_is_an_error_with_its_place():
    slow = Tokenizer.from_str(fixtures.byte_level().to_str())
    pattern = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    slow = Tokenizer.from_str(json.dumps(json.loads(slow.to_str()) | {"pre_tokenizer": pattern}))
    with pytest.raises(CheckpointError, match=r"here: .*retry-limit"), tokenizer_json.library_errors("here"):
        slow.encode("x" * 3000)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer_config.json", {"eos_token": 7}, r"tokenizer_config\.json: eos_token is 7"),
        ("tokenizer_config.json", {"bos_token": {"content": [1]}}, r"tokenizer_config\.json: bos_token is"),
        ("special_tokens_map.json", {"unk_token": ["a"]}, r"special_tokens_map\.json: unk_token is"),
        ("tokenizer_config.json", {"chat_template": 7}, r"tokenizer_config\.json: chat_template"),
        ("tokenizer_config.json", {"chat_template": [7]}, r"tokenizer_config\.json: chat_template"),
        ("tokenizer_config.json", {"chat_template": [{"name": "a"}]}, r"template 'a' is None"),
        ("tokenizer_config.json", {"chat_template": "x" * (2 << 20)}, r"has 2,097,152 characters, more than"),
        (
            "generation_config.json",
            {"eos_token_id": 10**6},
            r"generation_config\.json: eos_token_id is 1000000",
        ),
        ("config.json", {"eos_token_id": "2"}, r"config\.json: eos_token_id is '2'"),
        (
            "config.json",
            {"vocab_size": 300, "eos_token_id": 300},
            r"config\.json: eos_token_id is 300: .* end at 299",
        ),
        ("config.json", {"vocab_size": 9}, r"tokenizer_config\.json: eos_token is \d+: .* end at 8"),
        ("config.json", {"text_config": {"eos_token_id": [-5]}}, r"text_config: eos_token_id"),
    ],
)
def test_wrong_values_beside_it_are_named_with_their_file(tmp_path, name, content, match):
    fixtures.save(tmp_path, fixtures.byte_level(), fixtures.BYTE_LEVEL_CONFIG)
    if name == "tokenizer_config.json":
        content = fixtures.BYTE_LEVEL_CONFIG | content
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=match) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_minus_one_and_null_are_no_ids(tmp_path):
    backend = fixtures.byte_level()
    files = {"generation_config": {"eos_token_id": [5, None, -1]}, "config": {"eos_token_id": -1}}
    fixtures.save(tmp_path, backend, {"eos_token": "<|im_end|>"}, **files)
    assert load_tokenizer(tmp_path).eos_token_ids == {5, backend.token_to_id("<|im_end|>")}
    path = fixtures.write_gguf(
        tmp_path / "m.gguf", fixtures.byte_level_metadata(eot_token_id=2**32 - 1, bos_token_id=2**32 - 1)
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.bos_token_id is None and "bos_token" not in tokenizer.named_tokens
    assert tokenizer.eos_token_ids == {fixtures.byte_level_metadata()["tokenizer.ggml.eos_token_id"]}
