"""Tokenizer: equal to `tokenizers` and transformers on the same file, and the ends of texts."""

import json
import shutil
from pathlib import Path

import platformdirs
import pytest
import text_fixtures as fixtures
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from jaxinfer.text import chat
from jaxinfer.text.tokenizer import Tokenizer, from_gguf_metadata, load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "text"
SMOLLM2 = "smollm2-135m-instruct"
BACKENDS = {
    "byte_level": (fixtures.byte_level, fixtures.BYTE_LEVEL_CONFIG),
    "sentencepiece": (fixtures.sentencepiece, fixtures.SENTENCEPIECE_CONFIG),
    "metaspace": (fixtures.metaspace, {"unk_token": "<unk>"}),
}


@pytest.fixture(params=BACKENDS)
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, Backend]:
    make, config = BACKENDS[request.param]
    backend = make()
    return load_tokenizer(fixtures.save(tmp_path, backend, config)), backend


def test_ids_and_text_equal_those_of_the_library(loaded: tuple[Tokenizer, Backend]) -> None:
    tokenizer, backend = loaded
    for text in fixtures.TEXTS:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == backend.encode(text, add_special_tokens=special).ids
            assert tokenizer.decode(ids, special) == backend.decode(ids, skip_special_tokens=special)


def test_byte_vocabularies_give_every_text_back() -> None:
    byte_level = from_gguf_metadata(fixtures.byte_level_metadata())
    sentencepiece = from_gguf_metadata(fixtures.sentencepiece_metadata())
    for text in fixtures.TEXTS:
        assert byte_level.decode(byte_level.encode(text)) == text
        if "▁" not in text:  # SentencePiece's own mark for a space comes back as a space
            assert sentencepiece.decode(sentencepiece.encode(text)) == text


def test_bytes_of_tokens_joined_are_the_utf8_of_the_text() -> None:
    # Each part of a character must keep its own bytes; as text they would all be U+FFFD.
    for metadata in (fixtures.byte_level_metadata(), fixtures.sentencepiece_metadata()):
        tokenizer = from_gguf_metadata(metadata)
        for text in [*fixtures.EMOJI, *fixtures.MGSM_LINES]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            joined = b"".join(tokenizer.id_to_bytes(id_) for id_ in ids)
            assert joined.removeprefix(b" ") == text.encode()


def test_added_tokens_with_characters_of_the_byte_alphabet_keep_their_text(tmp_path: Path) -> None:
    # "Ö" is also the symbol of byte 0xD6, so `tokenizers` decodes the added token "ilÖveyou" to garbage.
    backend = fixtures.byte_level()
    tokenizer = load_tokenizer(fixtures.save(tmp_path, backend, fixtures.BYTE_LEVEL_CONFIG))
    text = "a ilÖveyou two words b"
    ids = tokenizer.encode(text)
    assert [backend.token_to_id("ilÖveyou"), backend.token_to_id(" two words")] == ids[2:4]
    assert tokenizer.decode(ids) == text != backend.decode(ids)
    assert tokenizer.id_to_bytes(ids[2]) == "ilÖveyou".encode()


@pytest.mark.parametrize("text", [" ?", "a  b", " 's", "Hello , world !"])
def test_no_spaces_are_cleaned_up(text: str, tmp_path: Path) -> None:
    config = fixtures.BYTE_LEVEL_CONFIG | {"clean_up_tokenization_spaces": True}
    tokenizer = load_tokenizer(fixtures.save(tmp_path, fixtures.byte_level(), config))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_wrong_tokenizer_class_changes_nothing(tmp_path: Path) -> None:
    # transformers once replaced pre-tokenizer and decoder after the class name and lost all spaces.
    config = fixtures.BYTE_LEVEL_CONFIG | {"tokenizer_class": "LlamaTokenizerFast"}
    backend = fixtures.byte_level()
    tokenizer = load_tokenizer(fixtures.save(tmp_path, backend, config))
    for text in fixtures.TRICKY:
        assert tokenizer.encode(text) == backend.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_one_bos_also_when_the_text_begins_with_it() -> None:
    tokenizer = from_gguf_metadata(fixtures.sentencepiece_metadata())
    assert tokenizer.adds_bos
    plain = tokenizer.encode("the inn")
    assert plain[0] == tokenizer.bos_token_id == 1
    assert plain.count(1) == 1
    assert tokenizer.encode("<s>the inn").count(1) == 1
    assert tokenizer.encode("<s>the inn", add_special_tokens=False).count(1) == 1
    assert tokenizer.encode("") == [1]


@pytest.mark.parametrize("add_bos", [True, False])
def test_gguf_add_bos_key_is_followed(add_bos: bool) -> None:
    for metadata in (
        fixtures.byte_level_metadata(add_bos_token=add_bos),
        fixtures.sentencepiece_metadata(add_bos_token=add_bos),
    ):
        tokenizer = from_gguf_metadata(metadata)
        assert tokenizer.encode("a").count(tokenizer.bos_token_id) == add_bos
        assert tokenizer.encode("").count(tokenizer.bos_token_id) == add_bos


@pytest.mark.parametrize("add_bos", [True, False])
def test_config_overrules_what_the_file_adds(add_bos: bool, tmp_path: Path) -> None:
    for name, (make, config) in list(BACKENDS.items())[:2]:  # one adds BOS by itself, the other does not
        folder = fixtures.save(tmp_path / name, make(), config | {"add_bos_token": add_bos})
        tokenizer = load_tokenizer(folder)
        assert tokenizer.encode("a").count(tokenizer.bos_token_id) == add_bos
        assert tokenizer.decode(tokenizer.encode("the inn")) == "the inn"


def test_end_ids_are_united_from_all_files(tmp_path: Path) -> None:
    backend = fixtures.byte_level()
    eos = backend.token_to_id("<|im_end|>")
    folder = fixtures.save(
        tmp_path,
        backend,
        fixtures.BYTE_LEVEL_CONFIG,
        generation_config={"eos_token_id": [5, 7]},
        config={"eos_token_id": 9, "text_config": {"eos_token_id": [11]}},
    )
    assert load_tokenizer(folder).eos_token_ids == {eos, 5, 7, 9, 11}
    tokenizer = from_gguf_metadata(fixtures.byte_level_metadata(eot_token_id=5, eom_token_id=7))
    assert tokenizer.eos_token_ids == {eos, 5, 7}


def test_named_tokens_may_be_serialized_objects(tmp_path: Path) -> None:
    config = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    tokenizer = load_tokenizer(fixtures.save(tmp_path, fixtures.sentencepiece(), config))
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})


def test_truncation_saved_by_a_training_run_does_not_cut_prompts(tmp_path: Path) -> None:
    backend = fixtures.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = load_tokenizer(fixtures.save(tmp_path, backend, fixtures.BYTE_LEVEL_CONFIG))
    assert (
        tokenizer.decode(tokenizer.encode("a longer text than four tokens"))
        == "a longer text than four tokens"
    )
    assert len(tokenizer.encode("ab")) == 2


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    # Models pad their embedding rows; `tokenizers` skips such ids too.
    tokenizer = from_gguf_metadata(fixtures.byte_level_metadata())
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.vocab_size, 10**6]) == "a"
    assert tokenizer.id_to_bytes(tokenizer.vocab_size) == b""


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_plain_encoding_never_gives_an_added_token(name: str, tmp_path: Path) -> None:
    make, config = BACKENDS[name]
    tokenizer = load_tokenizer(fixtures.save(tmp_path, make(), config))
    for token in tokenizer.added_tokens.values():
        if token.content == "<unk>":
            continue
        ids = tokenizer.encode_plain(token.content)
        assert not set(ids) & tokenizer.added_tokens.keys()
        assert tokenizer.decode(ids) == token.content


def test_chat_templates_are_found_in_every_place(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = fixtures.save(tmp_path, fixtures.byte_level(), {"chat_template": named})
    assert load_tokenizer(folder).chat_templates == {"default": "D", "tool_use": "T"}
    (folder / "chat_template.jinja").write_text("J")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert load_tokenizer(folder).chat_templates == {"default": "J", "tool_use": "T", "rag": "R"}
    assert load_tokenizer(folder).chat_template == "J"


def test_what_cannot_be_loaded_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
        load_tokenizer(tmp_path / "absent.gguf")
    wordpiece = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        load_tokenizer(fixtures.save(tmp_path / "wordpiece", wordpiece, {}))


def sentencepiece_folder(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copy(fixtures.DATA / "shakespeare.tokenizer.model", folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_sentencepiece_model_equals_the_sentencepiece_library(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_folder(tmp_path, {}))
    for case in json.loads((GOLDEN / "sentencepiece.json").read_text(encoding="utf-8")):
        assert tokenizer.encode(case["text"]) == [1, *case["ids"]], case["text"]
        assert tokenizer.decode(case["ids"]) == case["decoded"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_sentencepiece_model_takes_the_tokens_of_its_config(tmp_path: Path) -> None:
    added = {"480": {"content": "<|end|>", "special": True}, "481": {"content": "<tool>", "special": False}}
    config = {"added_tokens_decoder": added, "eos_token": "<|end|>", "add_bos_token": False}
    tokenizer = load_tokenizer(sentencepiece_folder(tmp_path, config))
    assert tokenizer.encode("<tool><|end|>") == [481, 480]
    assert tokenizer.decode([481, 480]) == "<tool>"
    assert tokenizer.eos_token_ids == {480}
    with pytest.raises(ValueError, match="999"):
        load_tokenizer(sentencepiece_folder(tmp_path, {"added_tokens_decoder": {"999": {"content": "<x>"}}}))


def test_broken_sentencepiece_models_are_refused(tmp_path: Path) -> None:
    whole = (fixtures.DATA / "shakespeare.tokenizer.model").read_bytes()
    for size in range(0, len(whole), 501):
        (tmp_path / "tokenizer.model").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"tokenizer\.model|tokenizer\.ggml"):
            load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    file = platformdirs.user_cache_path("jaxinfer") / "models" / SMOLLM2 / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.exists():
        pytest.skip(f"{SMOLLM2} is not in the cache; run `jaxinfer fetch {SMOLLM2}`")
    return load_tokenizer(file)


def test_smollm2_gguf_equals_transformers(smollm2: Tokenizer) -> None:
    for case in json.loads((GOLDEN / "smollm2.json").read_text(encoding="utf-8")):
        if "text" in case:
            assert smollm2.encode(case["text"]) == case["ids"], case["text"]
            assert smollm2.decode(case["ids"]) == case["text"]
        else:
            messages = fixtures.CONVERSATIONS[case["conversation"]]
            assert chat.render(smollm2, messages, **case["options"]) == case["ids"], case


def test_smollm2_ends_and_specials(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.vocab_size) == (1, {2}, 49152)
    assert not smollm2.adds_bos
    assert len(smollm2.special_tokens) == 17
