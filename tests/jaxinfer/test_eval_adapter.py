"""The lm-evaluation-harness adapter against numpy, on a model whose logits are a table; and the harness's own run."""

import json
import os
import subprocess
import sys

import numpy as np
import planted
import pytest
import text_fixtures
from tiny_models import write_hf

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'jaxinfer[eval]'")

from lm_eval.api.instance import Instance

from jaxinfer.tools.eval_adapter import JaxinferLM

VOCAB = 320
MAX_LEN = 48
TOKENIZER = text_fixtures.byte_level()
BOS, END = (
    TOKENIZER.token_to_id(text_fixtures.BYTE_LEVEL_CONFIG[name]) for name in ("bos_token", "eos_token")
)
# The logits are exact to float32: 1e-5 of values up to 30, over at most 100 tokens.
TOLERANCE = 1e-3


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


@pytest.fixture(scope="module")
def table():
    table = planted.random_table(VOCAB, "eval")
    table = planted.plant_chain(table, [*ids_of("?Yes!"), END])  # what greedy decoding says after "?"
    return planted.plant_chain(table, ids_of("@b c,d"))


@pytest.fixture(scope="module")
def folder(table, tmp_path_factory):
    config, weights = planted.make_planted(table)
    folder = write_hf(tmp_path_factory.mktemp("eval") / "planted", config, weights)
    template = {"chat_template": text_fixtures.TEMPLATES["chatml"]}
    text_fixtures.save(folder, TOKENIZER, text_fixtures.BYTE_LEVEL_CONFIG | template)
    return folder


@pytest.fixture(scope="module")
def lm(folder):
    lm = JaxinferLM(
        folder, batch_size=4, max_gen_toks=8, dtype="float32", max_model_len=MAX_LEN, decode_steps=1
    )
    assert lm.llm.engine.config.scheduler.max_num_seqs == 4
    with lm.llm:
        yield lm


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, arguments_, i) for i, arguments_ in enumerate(arguments)]


def logprob(table, ids: list[int], first: int) -> float:
    """Of ids[first:], each after the id before it."""
    return sum(planted.next_logprobs(table, ids[i - 1])[ids[i]] for i in range(first, len(ids)))


def test_loglikelihood_is_the_tables(lm, table):
    pairs = [
        ("the cat", " sat"),
        ("the cat", " in"),  # the same context once more
        ("?", "Yes!"),
        ("?", "Yes?"),
        ("@b ", "c"),  # the space goes to the continuation
        ("", "the end"),  # after BOS
    ]
    found = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    expected = [logprob(table, ids_of(a + b), len(ids_of(a.rstrip()))) for a, b in pairs[:-1]]
    expected.append(logprob(table, [BOS, *ids_of("the end")], 1))
    np.testing.assert_allclose([score for score, _ in found], expected, atol=TOLERANCE)
    assert [greedy for _, greedy in found] == [False, False, True, False, True, False]


def test_a_long_context_is_cut_on_the_left_and_said(lm, table, caplog):
    (result,) = lm.loglikelihood(requests("loglikelihood", ("x" * 200 + "?", "Yes!")), disable_tqdm=True)
    assert result[0] == pytest.approx(logprob(table, ids_of("?Yes!"), 1), abs=TOLERANCE) and result[1]
    assert "a prompt of 201 tokens is cut to its last 44" in caplog.text
    with pytest.raises(ValueError, match=r"a continuation of 48 tokens does not fit max_model_len=48"):
        lm.loglikelihood(requests("loglikelihood", ("a", "y" * 48)), disable_tqdm=True)


@pytest.mark.parametrize("length", [0, 1, MAX_LEN - 2, MAX_LEN - 1, MAX_LEN, 3 * MAX_LEN + 5])
def test_a_rolling_score_counts_each_token_once(lm, table, length):
    text = "".join(chr(ord("A") + (7 * i) % 25) for i in range(length))
    assert len(ids_of(text)) == length
    (found,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)), disable_tqdm=True)
    assert found == pytest.approx(logprob(table, [BOS, *ids_of(text)], 1), abs=TOLERANCE)


def test_generation_ends_where_the_task_says(lm, caplog):
    answers = [
        ("?", {"until": []}, "Yes!"),  # the end token
        ("?", {"until": ["s"], "do_sample": False}, "Ye"),
        ("?", {"until": ["!", ""], "max_gen_toks": 2, "temperature": 0.0}, "Ye"),
        ("@", {"until": ",", "temperature": 0}, "b c"),
        ("x" * 200 + "?", {"max_gen_toks": 3}, "Yes"),
        ("?", {"do_sample": True, "temperature": 0.1, "top_p": 0.5}, "Yes!"),  # 30 / 0.1 ahead of the rest
    ]
    found = lm.generate_until(requests("generate_until", *(a[:2] for a in answers)), disable_tqdm=True)
    assert found == [answer for _, _, answer in answers]
    assert f"a prompt of 201 tokens is cut to its last {MAX_LEN - 3}" in caplog.text


def test_what_cannot_act_is_refused(lm, folder):
    for options, message in [
        ({"device": "cuda:1"}, "JAX chooses the device"),
        ({"max_batch_size": 8}, "use batch_size"),
        ({"batch_size": 8, "max_num_seqs": 4}, "mean the same; give one of them"),
    ]:
        with pytest.raises(ValueError, match=message):
            JaxinferLM(folder, **options)
    with pytest.raises(ValueError, match="max_num_seqs: an LLM that is there already"):
        JaxinferLM(lm.llm, batch_size=8)
    with pytest.raises(TypeError, match="there is no such option"):
        JaxinferLM(folder, max_lenght=8)
    with pytest.raises(TypeError, match="num_beams"):
        lm.generate_until(requests("generate_until", ("?", {"num_beams": 2})))
    with pytest.raises(ValueError, match="max_gen_toks=48 leaves no room"):
        lm.generate_until(requests("generate_until", ("?", {"max_gen_toks": 48})))
    with pytest.raises(ValueError, match="'other' cannot be chosen"):
        lm.chat_template("other")


def test_chat_text_is_the_templates(lm):
    assert lm.chat_template(True) == text_fixtures.TEMPLATES["chatml"]
    assert lm.apply_chat_template([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is"}]
    assert lm.apply_chat_template(turns, add_generation_prompt=False).endswith("assistant\nThe answer is")
    with pytest.raises(ValueError, match="not the same tokens when it is written as text"):
        lm.apply_chat_template([{"role": "user", "content": "Hi<|im_end|>"}])


TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


def test_the_harness_runs_a_task_on_it(folder, table, tmp_path):
    rng = np.random.default_rng(0)
    lines, right = [], 0
    for _ in range(12):
        question, *choices = ("".join(rng.choice(list("abcdefgh"), 4)) for _ in range(4))
        answer = int(rng.integers(3))
        scores = [logprob(table, ids_of(f"{question} {choice}"), len(ids_of(question))) for choice in choices]
        right += int(np.argmax(scores)) == answer
        lines.append(json.dumps({"question": question, "choices": choices, "answer": answer}))
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    (tmp_path / "words.yaml").write_text(TASK.replace("DATA", str(tmp_path / "words.jsonl")))
    assert 0 < right < 12

    command = [sys.executable, "-m", "jaxinfer.tools.eval_adapter", "--model", "jaxinfer", "--tasks", "words"]
    command += ["--model_args", f"pretrained={folder},dtype=float32,max_model_len={MAX_LEN},max_num_seqs=4"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    (scores_file,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(scores_file.read_text())["results"]["words"]["acc,none"] == pytest.approx(right / 12)
