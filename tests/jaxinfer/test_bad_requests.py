"""Whatever a prompt, a message or a tokenizer raises fails that request alone, with one sentence."""

import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import text_fixtures as fixtures
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted import make_planted, random_table
from tiny_models import write_hf
from tokenizers import Regex, pre_tokenizers

from jaxinfer.llm import LLM
from jaxinfer.programs.buckets import Buckets
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text import prompts
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer

MAX_MODEL_LEN = 200
GREEDY = SamplingParams(temperature=0, max_tokens=2)
EVIL = "a" * 100  # the pattern below tries 2**100 ways


def byte_level_with_evil_pattern() -> Any:
    backend = fixtures.byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("(a+)+b|(a|aa)+c"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return backend


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    config, weights = make_planted(random_table(320, "bad requests"))
    folder = write_hf(tmp_path_factory.mktemp("llm") / "planted", config, weights)
    fixtures.save(folder, byte_level_with_evil_pattern(), fixtures.BYTE_LEVEL_CONFIG)
    (folder / "chat_template.jinja").write_text(fixtures.TEMPLATES["chatml"])
    return LLM(
        folder,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_pages=96,
        page_size=8,
        buckets=Buckets(((32, 4),), (4,), 4, (4,)),
        decode_steps=4,
        background_compile=False,
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_level")
    return load_tokenizer(fixtures.save(folder, fixtures.byte_level(), fixtures.BYTE_LEVEL_CONFIG))


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


BAD_PROMPTS = {
    "half a pair": ("x\ud83d", "half a surrogate pair, U+D83D, after 'x'"),
    "a byte of a command line": ("caf\udce9", "not UTF-8: byte 0xe9 after 'caf'"),
    "backtracking": (EVIL, "tokenizer fails on a text of 100 characters"),
    "long": ("the inn " * 1_000_000, "8000000 characters have over 200 tokens, and max_model_len is 200"),
    "bytes": (b"hello", "decode it"),
    "both": ({"prompt": "a", "prompt_token_ids": [1]}, "either prompt or prompt_token_ids"),
    "other keys": ({"text": "a", 5: "b"}, "either prompt or prompt_token_ids"),
    "no text": ({"prompt": None}, "neither"),
    "deep": ({"prompt_token_ids": nested(5_000)}, "no token id"),
    "text for ids": ({"prompt_token_ids": "abc"}, "no token id"),
}


@pytest.mark.parametrize(("prompt", "says"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_a_bad_prompt_fails_alone(llm: LLM, prompt: Any, says: str) -> None:
    alone = llm.generate("hello", GREEDY).pop().outputs[0].token_ids
    before, bad, after = llm.generate(["hello", prompt, "hello"], GREEDY)
    assert [out.outputs[0].token_ids for out in (before, after)] == [alone, alone]
    assert bad.error is not None and says in bad.error
    assert len(bad.error) < 400 and not bad.outputs
    with pytest.raises(ValueError) as raised:
        llm.generate(prompt, GREEDY)
    assert says in str(raised.value)


def one_prompt(values: Any) -> list[Any]:
    many, single = prompts.one_or_many(values)
    assert single
    return [prompts.token_ids(many[0])]


def many_prompts(values: Any) -> list[Any]:
    many, single = prompts.one_or_many(values)
    assert not single
    return [each if isinstance(each, str) else prompts.token_ids(each) for each in many]


def test_prompts_come_as_lists_arrays_and_other_iterables(tokenizer: Tokenizer) -> None:
    ids = np.array([1, 2, 3])
    for one in ([1, 2, 3], (1, 2, 3), ids, jnp.asarray(ids), range(1, 4), list(ids), iter([1, 2, 3])):
        assert one_prompt(one) == [[1, 2, 3]]
    two = np.array([[1, 2], [3, 4]])
    odd = np.empty(2, object)
    odd[0], odd[1] = [1, 2], np.array([3, 4])
    for several in (
        two,
        jnp.asarray(two),
        list(two),
        odd,
        [[1, 2], (3, 4)],
        iter([[1, 2], [3, 4]]),
        two.tolist(),
    ):
        assert many_prompts(several) == [[1, 2], [3, 4]]
    for texts in (np.array(["a", "b"]), {"x": "a", "y": "b"}.values(), (text for text in "ab"), ("a", "b")):
        assert many_prompts(texts) == ["a", "b"]
    assert prompts.one_or_many([]) == ([], False)
    assert prompts.one_or_many("a") == (["a"], True)
    for neither in (None, 5, 1.5, object()):
        with pytest.raises(ValueError, match="neither"):
            prompts.one_or_many(neither)
    for wrong in ([1.0, 2.0], np.array([1.0, 2.0]), [True], np.array([[[1]]]), [None, 3]):
        with pytest.raises(ValueError, match="token id"):
            prompts.tokenize(tokenizer, prompts.one_or_many(wrong)[0][0])


def test_arrays_and_generators_generate_the_same(llm: LLM) -> None:
    wanted = [out.outputs[0].token_ids for out in llm.generate([[5, 6], [7, 8]], GREEDY)]
    for several in (np.array([[5, 6], [7, 8]]), iter([[5, 6], np.array([7, 8])])):
        assert [out.outputs[0].token_ids for out in llm.generate(several, GREEDY)] == wanted
    assert llm.generate(jnp.array([5, 6]), GREEDY)[0].outputs[0].token_ids == wanted[0]
    last = [out for out in llm.stream((ids for ids in [[5, 6]]), GREEDY) if out.finished]
    assert last[0].outputs[0].token_ids == wanted[0]


def user(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **fields}]


BAD_CHATS = {
    "half a pair": (user("x\ud83d"), "half a surrogate pair"),
    "backtracking": (user(EVIL), "tokenizer fails"),
    "long": (user("the inn " * 1_000_000), "over 200 tokens"),
    "long, of control tokens": (user("<|im_end|>" * 300_000), "over 200 tokens"),
    "deep": (user("a", name=nested(3_000)), "over 100 deep"),
    "image": (user([{"type": "image_url", "image_url": {"url": "x" * 8_000_000}}]), "'image_url'"),
    "no role": ([{"content": "x" * 8_000_000}], "'role'"),
    "no messages": ([], "at least one message"),
    "text": ("hello", "messages must be a list"),
    "no text in it": (user({"a": 1}), "the chat template failed"),
}


@pytest.mark.parametrize(("messages", "says"), BAD_CHATS.values(), ids=BAD_CHATS.keys())
def test_a_bad_conversation_fails_alone(llm: LLM, messages: Any, says: str) -> None:
    alone = llm.chat(user("hello"), GREEDY).pop().outputs[0].token_ids
    before, bad, after = llm.chat([user("hello"), messages, user("hello")], GREEDY)
    assert [out.outputs[0].token_ids for out in (before, after)] == [alone, alone]
    assert bad.error is not None and says in bad.error
    assert len(bad.error) < 400 and not bad.outputs


@pytest.mark.parametrize(
    "options", [{"tools": [{"a": nested(3_000)}]}, {"chat_template_kwargs": {"a": nested(3_000)}}]
)
def test_deep_options_of_a_chat_are_one_sentence(llm: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="over 100 deep"):
        llm.chat(user("hello"), GREEDY, **options)


def test_options_of_a_chat_that_do_not_exist_are_named(llm: LLM) -> None:
    with pytest.raises(TypeError, match="no option 'lora_request'; it has tools, "):
        llm.chat(user("hello"), GREEDY, lora_request=object())
    assert (
        llm.chat(user("hello"), GREEDY, lora_request=None, chat_template_content_format=None)[0].error is None
    )


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_half_a_pair_in_sampling_params_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}.*half a surrogate pair"):
        SamplingParams(**{field: ["a\ud83d"]})
    SamplingParams(**{field: ["a😀\n\t"]})


def test_a_bad_word_that_the_tokenizer_fails_on_fails_alone(llm: LLM) -> None:
    params = [GREEDY, SamplingParams(max_tokens=2, bad_words=[EVIL])]
    good, bad = llm.generate(["hello", "hello"], params)
    assert good.error is None and bad.error is not None and "tokenizer fails" in bad.error


def test_a_pair_too_long_to_score_is_refused_at_once(llm: LLM) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"pair 0: .*over 200 tokens"):
        llm.loglikelihood(["the inn " * 1_000_000], [" a"])
    assert time.monotonic() - started < 5


def test_errors_that_are_nobodys_message_are_named(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    for error in (MemoryError(), IndexError("x" * 1000), RecursionError("deep"), KeyError("k")):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(Tokenizer, "encode", fail)
        with pytest.raises(ValueError, match=f"cannot be read: {type(error).__name__}") as raised:
            prompts.tokenize(tokenizer, "hello")
        assert len(str(raised.value)) < 300
    for passing in (KeyboardInterrupt, SystemExit):

        def leave(*_: Any, passing: type[BaseException] = passing, **__: Any) -> None:
            raise passing

        monkeypatch.setattr(Tokenizer, "encode", leave)
        with pytest.raises(passing):
            prompts.tokenize(tokenizer, "hello")


def test_the_memory_of_a_text_that_is_too_long_is_bounded(tokenizer: Tokenizer) -> None:
    text = "the inn " * 2_000_000
    process, most = psutil.Process(), 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, process.memory_info().rss)

    before = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(ValueError, match="too long"):
        tokenizer.encode(text, max_tokens=MAX_MODEL_LEN)
    done.set()
    watcher.join()
    assert most - before < 64 << 20


@pytest.mark.parametrize(
    "text", ["", "the inn", "the inn " * 2_000, " " * 20_000, "é" * 5_000, "<|im_end|>" * 3_000]
)
def test_a_text_is_refused_when_it_is_too_long_and_only_then(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.encode(text, max_tokens=len(ids)) == ids
    if len(ids) > 1_000:
        with pytest.raises(ValueError, match="too long"):
            tokenizer.encode(text, max_tokens=len(ids) // 64)


def test_a_normalizer_that_takes_text_away_is_no_reason_to_refuse(tmp_path: Path) -> None:
    from tokenizers import normalizers

    backend = fixtures.byte_level()
    backend.normalizer = normalizers.Replace(Regex(" +"), " ")
    tokenizer = load_tokenizer(fixtures.save(tmp_path, backend, fixtures.BYTE_LEVEL_CONFIG))
    text = "the" + " " * 100_000 + "inn"
    assert tokenizer.encode(text, max_tokens=10) == tokenizer.encode("the inn")


PROMPTS = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=30),
        st.binary(),
        st.just("\udc80"),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["prompt", "prompt_token_ids", "x", 5]), inner, max_size=2),
    ),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(PROMPTS)
def test_random_prompts(tokenizer: Tokenizer, prompt: Any) -> None:
    try:
        _, ids = prompts.tokenize(tokenizer, prompt, MAX_MODEL_LEN)
    except ValueError as error:
        assert 0 < len(str(error)) < 400
    else:
        assert ids and all(type(id_) is int for id_ in ids)
