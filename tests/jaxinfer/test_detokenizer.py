"""Text out: streaming equals one decode by `tokenizers`, and stop strings end the text exactly."""

import random
import time
from collections.abc import Callable, Sequence

import pytest
import text_fixtures as fixtures
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from jaxinfer.text.detokenizer import Detokenizer, TextStream, decoder_rules
from jaxinfer.text.stop_strings import StopStrings
from jaxinfer.text.tokenizer import Tokenizer


def wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, None, frozenset(), {}, {})


def without_decoder() -> tokenizers.Tokenizer:
    backend = fixtures.metaspace()
    backend.decoder = None
    return backend


def strip_two() -> tokenizers.Tokenizer:
    backend = fixtures.sentencepiece()
    steps = [decoders.Replace(fixtures.SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 2, 0)])
    return backend


# The added token with a byte-alphabet character is left out here: `tokenizers` itself decodes it to garbage.
MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": fixtures.byte_level,
    "llama": fixtures.sentencepiece,
    "gemma": lambda: fixtures.sentencepiece(strip=False),
    "strip two": strip_two,
    "metaspace": fixtures.metaspace,
    "none": without_decoder,
}
TOKENIZERS = {name: wrap(make()) for name, make in MAKERS.items()}
GARBLED = TOKENIZERS["byte_level"].backend.token_to_id("ilÖveyou")


def groups(ids: Sequence[int], seed: int, largest: int) -> list[list[int]]:
    """`ids` cut into random groups of 0 to `largest`."""
    rng = random.Random(seed)
    cut, start = [], 0
    while start < len(ids):
        size = rng.randint(0, largest)
        cut.append(list(ids[start : start + size]))
        start += size
    return cut


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], *, prompt: Sequence[int] = (), skip: bool, seed: int
) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    pieces = [detokenizer.append(group) for group in groups(ids, seed, largest=4)]
    return "".join(pieces) + detokenizer.finish()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
def test_stream_of_texts_equals_one_decode(name: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    for text in fixtures.TEXTS:
        ids = tokenizer.encode(text)
        expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        pieces = [detokenizer.append([id_]) for id_ in ids]
        assert "".join(pieces) + detokenizer.finish() == expected
        assert stream(tokenizer, ids, skip=skip, seed=len(text)) == expected
        if "\ufffd" not in text and name in ("byte_level", "llama", "gemma"):
            assert not any("\ufffd" in piece for piece in pieces)  # never half a character


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stream_of_any_ids_equals_one_decode(name: str) -> None:
    # Random ids hold broken characters, bytes in every order, special tokens in between, and ids past the end.
    tokenizer = TOKENIZERS[name]
    byte_like = [id_ for id_ in range(tokenizer.vocab_size) if len(tokenizer.id_to_bytes(id_)) == 1]
    rng = random.Random(7)
    for round_ in range(600):
        pool = byte_like if round_ % 2 and byte_like else range(tokenizer.vocab_size + 2)
        ids = [id_ for id_ in rng.choices(pool, k=rng.randint(0, 12)) if id_ != GARBLED]
        for skip in (True, False):
            expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
            assert stream(tokenizer, ids, skip=skip, seed=round_) == expected, ids
            assert tokenizer.decode(ids, skip) == expected


@given(st.binary(max_size=24), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_broken_utf8_gives_the_librarys_replacement_characters(data: bytes, seed: int) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    symbol = {tokenizer.id_to_bytes(id_): id_ for id_ in range(256)}
    ids = [symbol[bytes([byte])] for byte in data]
    assert stream(tokenizer, ids, skip=True, seed=seed) == tokenizer.backend.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompt_and_completion_are_one_text(name: str) -> None:
    # SentencePiece drops a space only at the start of the whole text, not at the start of the completion.
    tokenizer = TOKENIZERS[name]
    texts = ["the inn. there  is", " a\n  b", "你好 the 👩‍👩‍👧 end ", "x", "   "]
    for text in texts:
        ids = tokenizer.encode(text)
        for cut in range(len(ids) + 1):
            prompt, completion = ids[:cut], ids[cut:]
            before = Detokenizer(tokenizer)
            prompt_text = before.append(prompt)
            inside_character = "\ufffd" in before.finish()
            if not inside_character:
                prompt_text = tokenizer.backend.decode(prompt)
            elif name != "byte_level":
                continue  # complete characters of an unfinished byte run belong to the prompt; seen below
            whole = tokenizer.backend.decode(ids)
            assert prompt_text + stream(tokenizer, completion, prompt=prompt, skip=True, seed=cut) == whole


def test_a_prompt_may_end_inside_a_character() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = tokenizer.encode("a你好b")
    start = len(tokenizer.encode("a"))
    for cut, completion in ((1, "你好b"), (2, "你好b"), (3, "好b"), (4, "好b"), (5, "好b"), (6, "b")):
        assert (
            stream(tokenizer, ids[start + cut :], prompt=ids[: start + cut], skip=True, seed=0) == completion
        )


def test_a_generation_may_end_inside_a_character() -> None:
    for name in ("byte_level", "llama"):
        tokenizer = TOKENIZERS[name]
        ids = tokenizer.encode("ab👧")[:-1]
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.append(ids) == "ab"
        assert "ab" + detokenizer.finish() == tokenizer.backend.decode(ids)
        assert detokenizer.finish() == ""


def test_cost_of_a_token_does_not_grow_with_the_text() -> None:
    # Decoding all ids again for each token would make the last tokens about 40 times as dear as the first.
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("the naïve 你好 inn " * 40) * 100
    stream_ = TextStream(tokenizer, stop=["never seen", "nor this"])

    def seconds(part: Sequence[int]) -> float:
        start = time.perf_counter()
        for id_ in part:
            stream_.append([id_])
        return time.perf_counter() - start

    part = len(ids) // 40
    times = [seconds(ids[i * part : (i + 1) * part]) for i in range(40)]
    assert min(times[-3:]) < 5 * min(times[:3])  # min of three: other processes disturb single ones


def test_decoders_that_cannot_be_streamed_are_refused_by_name() -> None:
    for decoder in (
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    ):
        with pytest.raises(ValueError, match="not supported"):
            decoder_rules(decoder)
    assert decoder_rules(decoders.Sequence([decoders.ByteLevel()])).byte_level
    assert len(pre_tokenizers.ByteLevel.alphabet()) == 256


# --- stop strings


def expected_end(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """By str.find: the first end of a stop string; the longest of those that end there."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[:end] if include else text[: end - len(stop)], stop


def run_matcher(text: str, stops: Sequence[str], include: bool, seed: int) -> tuple[str, str | None]:
    rng = random.Random(seed)
    matcher = StopStrings(stops, include=include)
    shown, start = "", 0
    while start < len(text):
        size = rng.randint(0, 4)
        piece, stop = matcher.push(text[start : start + size])
        shown += piece
        if stop is not None:
            return shown, stop
        start += size
    return shown + matcher.finish(), None


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("DE", "ABC"),
        ("CD", "AB"),
        ("BCDEFG", "A"),
        ("H", "ABCDEFG"),
        ("ABC", ""),
        ("ABCDEFGH", ""),
        ("XY", None),
    ],
)
@pytest.mark.parametrize("include", [True, False])
def test_stop_inside_and_across_tokens(stop: str, text: str | None, include: bool) -> None:
    backend = fixtures.byte_level()
    backend.add_tokens(["ABC", "DEF", "GH"])
    tokenizer = wrap(backend)
    ids = tokenizer.encode("ABCDEFGH")
    assert len(ids) == 3
    stream_ = TextStream(tokenizer, stop=[stop], include_stop=include)
    shown = stream_.append(ids)
    shown += stream_.finish()
    assert shown == ("ABCDEFGH" if text is None else text + stop * include)
    assert stream_.stop_reason == (None if text is None else stop)
    end = len("ABCDEFGH") if text is None else len(text + stop)
    assert stream_.num_tokens == (1 if end <= 3 else 2 if end <= 6 else 3)
    if text is not None:
        assert stream_.append(ids) == stream_.finish() == ""  # surplus ids are ignored


@given(
    st.text(alphabet="ab你", max_size=30),
    st.lists(st.text(alphabet="ab你", min_size=1, max_size=5), max_size=4),
    st.booleans(),
    st.integers(0, 9),
)
@settings(max_examples=200, deadline=None)
def test_matcher_equals_str_find(text: str, stops: list[str], include: bool, seed: int) -> None:
    assert run_matcher(text, stops, include, seed) == expected_end(text, stops, include)


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopStrings(["\n\nUser:", "END"])
    assert matcher.push("abc\n") == ("abc", None)
    assert matcher.push("\nE") == ("\n\n", None)
    assert matcher.push("x") == ("Ex", None)
    assert matcher.push("E") == ("", None)
    assert matcher.push("ND tail") == ("", "END")


def test_stop_strings_that_complete_too_early_are_passed_over() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("aXbXcX")
    for min_tokens, text, count in (
        (0, "a", 2),
        (1, "a", 2),
        (2, "aXb", 4),
        (4, "aXbXc", 6),
        (6, "aXbXcX", 6),
    ):
        stream_ = TextStream(tokenizer, stop=["X"], min_tokens=min_tokens)
        assert stream_.append(ids) + stream_.finish() == text
        assert stream_.num_tokens == count
        assert stream_.stop_reason == (None if min_tokens == 6 else "X")
    overlapping = TextStream(tokenizer, stop=["aa"], min_tokens=2)
    assert overlapping.append(tokenizer.encode("aaa")) == "a"
    assert (overlapping.stop_reason, overlapping.num_tokens) == ("aa", 3)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_special_token_as_stop_string(skip: bool, include: bool) -> None:
    # Hidden special tokens have no text that could match, so generation ran on to its length limit.
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("ab<|eot|>cd")
    stream_ = TextStream(tokenizer, skip_special_tokens=skip, stop=["<|eot|>", "bx"], include_stop=include)
    assert stream_.append(ids) + stream_.finish() == "ab" + "<|eot|>" * include
    assert (stream_.stop_reason, stream_.num_tokens) == ("<|eot|>", 3)


@given(
    st.text(alphabet="ab \n你好", max_size=12), st.sampled_from(["\n", "b\n", "好", "你b", "\n\n", "a 你"])
)
@settings(max_examples=200, deadline=None)
def test_a_stop_in_bytes_that_are_held_ends_at_its_own_token(text: str, stop: str) -> None:
    # Newline is a byte token in Llama-2-like vocabularies; the stop must not wait for the token behind it.
    tokenizer = TOKENIZERS["llama"]
    ids = tokenizer.encode("x" + text)
    for include in (True, False):
        stream_ = TextStream(tokenizer, stop=[stop], include_stop=include)
        shown = "".join(stream_.append([id_]) for id_ in ids) + stream_.finish()
        assert (shown, stream_.stop_reason) == expected_end("x" + text, [stop], include)
        if stream_.stop_reason is not None:
            taken = tokenizer.decode(ids[: stream_.num_tokens])
            assert stop in taken and stop not in tokenizer.decode(ids[: stream_.num_tokens - 1])


def test_a_stop_in_bytes_that_turn_out_to_be_broken() -> None:
    tokenizer = TOKENIZERS["llama"]
    newline, broken, letter = tokenizer.encode("\n")[-1], tokenizer.backend.token_to_id("<0xFF>"), "a"
    ids = [*tokenizer.encode(letter), newline, broken, *tokenizer.encode(letter)[1:]]
    stream_ = TextStream(tokenizer, stop=["\n\n", "\na"])
    assert stream_.append(ids) + stream_.finish() == tokenizer.backend.decode(ids)
    for min_tokens, num_tokens in ((2, 3), (3, 5)):  # passed over in the held bytes as in other text
        stream_ = TextStream(tokenizer, stop=["\n"], min_tokens=min_tokens)
        stream_.append([*tokenizer.encode(letter), newline, *tokenizer.encode(letter)[1:], newline])
        assert stream_.num_tokens == num_tokens


@pytest.mark.parametrize("count", [0, 40])
def test_many_and_long_stop_strings(count: int) -> None:
    stops = [f"<{i}>" for i in range(count)] + ["x" * 10_000]
    text = "x" * 9_999 + "<4" + "x" * 9_998
    assert run_matcher(text, stops, False, 0) == (text, None)
    assert run_matcher(text + "x<39>x", stops, False, 0) == expected_end(text + "x<39>x", stops, False)


def test_wrong_stop_strings_are_refused() -> None:
    for stop in ("", ["", "X"]):
        with pytest.raises((ValueError, TypeError), match="stop"):
            StopStrings(stop)
    with pytest.raises(TypeError, match="7"):
        StopStrings([7])  # type: ignore[list-item]
    assert StopStrings([]).push("abc") == ("abc", None)
