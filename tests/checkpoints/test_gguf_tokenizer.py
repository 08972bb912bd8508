"""The tokenizer inside a GGUF file."""

from itertools import pairwise
from pathlib import Path

import pytest
import text_fixtures as fixtures
from tokenizers import pre_tokenizers

from jaxinfer.checkpoints import gguf_tokenizer
from jaxinfer.text.tokenizer import from_gguf_metadata, load_tokenizer

SPACE = "\u2581"


def test_byte_level_ids_equal_the_tokenizer_json_of_the_same_vocabulary() -> None:
    built, original = gguf_tokenizer.build(fixtures.byte_level_metadata()), fixtures.byte_level()
    for text in [*fixtures.TEXTS, "<|im_start|>user\n<think> ilÖveyou<|im_end|>"]:
        assert built.encode(text).tokens == original.encode(text).tokens


# What the published pre-tokenizers cut this text into, by hand from their regular expressions.
TEXT = "I'VE 1234 don't\n\n  a!?\tb"
CUTS = {
    "gpt-2": ["I", "'", "VE", " 1234", " don", "'t", "\n\n ", " a", "!?", "\t", "b"],
    "smollm": ["I", "'", "VE", " ", "1", "2", "3", "4", " don", "'t", "\n\n ", " a", "!?", "\t", "b"],
    "llama-bpe": ["I", "'VE", " ", "123", "4", " don", "'t", "\n\n", " ", " a", "!?", "\tb"],
    "qwen2": ["I", "'VE", " ", "1", "2", "3", "4", " don", "'t", "\n\n", " ", " a", "!?", "\tb"],
    "default": ["I", "'", "VE", " ", "123", "4", " don", "'", "t", "\n\n ", " a", "!?", "\t", "b"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_pre_tokenizers_cut_as_published(pre: str) -> None:
    pre_tokenizer = gguf_tokenizer.build(fixtures.byte_level_metadata(pre=pre)).pre_tokenizer
    cuts = [TEXT[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(TEXT)]
    assert cuts == CUTS[pre]


@pytest.mark.parametrize("pre", gguf_tokenizer.PRE_TOKENIZERS)
def test_pre_tokenizers_lose_nothing(pre: str) -> None:
    tokenizer = from_gguf_metadata(fixtures.byte_level_metadata(pre=pre))
    for text in fixtures.TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text


def test_gpt2_cuts_equal_the_librarys_own() -> None:
    ours = gguf_tokenizer.build(fixtures.byte_level_metadata()).pre_tokenizer
    theirs = pre_tokenizers.ByteLevel(add_prefix_space=False)
    smollm = gguf_tokenizer.build(fixtures.byte_level_metadata(pre="smollm")).pre_tokenizer
    published = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), theirs])
    for text in fixtures.TEXTS:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)
        assert smollm.pre_tokenize_str(text) == published.pre_tokenize_str(text)


def test_whole_words_are_taken_without_merging_in_llama3_vocabularies() -> None:
    metadata = fixtures.byte_level_metadata(pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "hello"]  # no merges lead to it
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    assert gguf_tokenizer.build(metadata).encode("hello").tokens[-1] == "hello"
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert gguf_tokenizer.build(metadata).encode("hello").tokens[-1] != "hello"


def reference_sentencepiece(text: str) -> list[str]:
    """SentencePiece's BPE (Kudo and Richardson, 2018): join the pair with the best score, leftmost first, until none
    is left; characters without a token become bytes."""
    tokens, scores, types = fixtures.sentencepiece_vocab()
    score_of = {token: score for token, score, type_ in zip(tokens, scores, types, strict=True) if type_ == 1}
    pieces = list(SPACE + text.replace(" ", SPACE)) if text else []
    while True:
        pairs = [(-score_of[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in score_of]
        if not pairs:
            break
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    as_bytes = [[p] if p in score_of else [f"<0x{byte:02X}>" for byte in p.encode()] for p in pieces]
    return [token for group in as_bytes for token in group]


def test_sentencepiece_ids_equal_the_algorithm() -> None:
    built = gguf_tokenizer.build(fixtures.sentencepiece_metadata())
    for text in [*fixtures.TEXTS, "the inn there  is a    tin", "  the", "hethe erth"]:
        if "<" in text:
            continue  # byte names and added tokens are cut out first; the next test
        assert built.encode(text, add_special_tokens=False).tokens == reference_sentencepiece(text), text


def test_control_and_user_defined_tokens_are_whole() -> None:
    tokenizer = from_gguf_metadata(fixtures.sentencepiece_metadata())
    tokens = tokenizer.backend.encode("a<|user|>the<think>b</s>", add_special_tokens=False).tokens
    # llama.cpp puts the prefix space before each text that follows a special token.
    assert tokens == [SPACE + "a", "<|user|>", SPACE + "the", "<think>", SPACE, "b", "</s>"]
    ids = tokenizer.encode("a<|user|>b<think>")
    assert tokenizer.decode(ids) == "a b<think>"  # only control tokens are hidden
    assert tokenizer.special_tokens.keys() == {"<s>", "</s>", "<|user|>"}


def test_no_prefix_space_where_the_file_says_so() -> None:
    tokenizer = from_gguf_metadata(fixtures.sentencepiece_metadata(add_space_prefix=False))
    assert tokenizer.backend.encode("the in", add_special_tokens=False).tokens == ["the", SPACE, "in"]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_file_written_by_the_gguf_package(kind: str, tmp_path: Path) -> None:
    metadata = getattr(fixtures, f"{kind}_metadata")()
    file = fixtures.write_gguf(tmp_path / "vocab.gguf", metadata, chat_template="{{ messages[0].content }}")
    tokenizer, expected = load_tokenizer(file), from_gguf_metadata(metadata)
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert tokenizer.backend.to_str() == expected.backend.to_str()
    assert tokenizer.eos_token_ids == expected.eos_token_ids
    assert tokenizer.named_tokens == expected.named_tokens


def test_a_header_that_was_read_is_not_read_again(tmp_path: Path) -> None:
    metadata = fixtures.byte_level_metadata()
    (tmp_path / "vocab.gguf").touch()  # nothing to read
    tokenizer = load_tokenizer(tmp_path / "vocab.gguf", metadata)
    assert tokenizer.backend.to_str() == from_gguf_metadata(metadata).backend.to_str()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": "bert"}, "'bert' is not supported"),
        ({"model": "t5"}, "'t5' is not supported"),
        ({"pre": "superbpe"}, "'superbpe' is not supported"),
        ({"tokens": None}, "no tokenizer"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"tokens": ["a", "a"], "token_type": None}, "'a' more than once"),
        ({"merges": ["abc"]}, "'abc'"),
        ({"bos_token_id": 10**6, "add_bos_token": True}, "bos_token_id is 1000000"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        gguf_tokenizer.build(fixtures.byte_level_metadata(**change))


def test_sentencepiece_without_scores_or_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="scores"):
        gguf_tokenizer.build(fixtures.sentencepiece_metadata(scores=[0.0]))
    with pytest.raises(ValueError, match="byte tokens"):
        gguf_tokenizer.build(fixtures.sentencepiece_metadata(tokens=["a"], scores=[0.0], token_type=[1]))
