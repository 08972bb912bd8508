"""`jaxinfer batch` and `jaxinfer merge`: nothing lost, nothing twice, bad lines alone, resumable anywhere."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import random
import resource
import signal
import time
from types import SimpleNamespace

import planted
import pytest
from batch_jobs import OPTIONS, ROWS, by_id, cached_llm, ids_of, mixed, records, text, write_model
from typer.testing import CliRunner

import jaxinfer.llm
from jaxinfer.cli import app
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tools.batch_runner import journal, runner
from jaxinfer.tools.batch_runner.window import Window


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("batch") / "planted")


@pytest.fixture(autouse=True)
def one_llm(model, monkeypatch):
    """All jobs that ask for the same engine get the same one; `loads` counts how often one was asked for."""
    state = SimpleNamespace(loads=0)

    def get(path, **options):
        state.loads += 1
        state.llm = cached_llm(path, tuple(sorted(options.items())))
        return contextlib.nullcontext(state.llm)

    monkeypatch.setattr(jaxinfer.llm, "LLM", get)
    yield state


@pytest.fixture(autouse=True)
def untouched_logging():
    """A command sets up the logs of its process, which here is the one of all tests."""
    loggers = [logging.getLogger(name) for name in (None, "jaxinfer", "jax")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture
def batch(model, tmp_path):
    """Runs `jaxinfer batch` on lines (dicts, or bytes as they are) in a folder of its own."""

    def run(lines=None, *args, output="out.jsonl", name="in.jsonl"):
        if lines is not None:
            raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
            (tmp_path / name).write_bytes(b"\n".join(raw))
        command = ["batch", tmp_path / name, "-o", tmp_path / output, "-m", model.path, *OPTIONS, *args]
        result = CliRunner().invoke(app, [str(word) for word in command])
        assert "Traceback" not in result.stderr, result.stderr
        return result

    run.folder = tmp_path
    return run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, model):
    """(input lines, output file) of a job of 40 lines that ran through; its folder has the manifest too."""
    folder = tmp_path_factory.mktemp("whole")
    lines = mixed(40)
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.MonkeyPatch.context() as patch:
        options = {}
        patch.setattr(jaxinfer.llm, "LLM", lambda path, **given: options.update(given) or fake(path, given))

        def fake(path, given):
            return contextlib.nullcontext(cached_llm(path, tuple(sorted(given.items()))))

        command = ["batch", folder / "in.jsonl", "-o", folder / "out.jsonl", "-m", model.path, *OPTIONS]
        result = CliRunner().invoke(app, [str(word) for word in command])
    assert result.exit_code == 0, result.stderr
    return lines, folder / "out.jsonl"


# Answers


def test_answers_in_openai_form(batch, model):
    body = {"prompt": "ok?", "logprobs": 2, "user": "u", "stream": True, "model": "gpt"}
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body},
        {
            "custom_id": "b\n😀",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": "Capital?"}],
                "logprobs": True,
                "top_logprobs": 1,
                "max_completion_tokens": 3,
                "seed": None,
            },
        },
        {"prompt": "(", "max_tokens": 3, "n": 2, "echo": True},
        {"prompt": ids_of(model.tokenizer, "is?"), "detokenize": False},
    ]
    result = batch(lines)
    assert result.exit_code == 0, result.stderr
    found = by_id(batch.folder / "out.jsonl")
    assert set(found) == {"a", "b\n😀", "line-3", "line-4"}
    for record in found.values():
        assert record["error"] is None and record["response"]["status_code"] == 200
        assert record["response"]["body"]["model"] == model.path

    completion = found["a"]["response"]["body"]
    assert completion["object"] == "text_completion"
    assert completion["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    (choice,) = completion["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" Yes!", "stop")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*" Yes!", "<|im_end|>"] and logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    expected = planted.next_logprobs(model.table, ids_of(model.tokenizer, "?")[0])
    space = ids_of(model.tokenizer, " ")[0]
    assert abs(logprobs["token_logprobs"][0] - expected[space]) <= 1e-4
    assert len(logprobs["top_logprobs"][0]) == 2

    chat = found["b\n😀"]["response"]["body"]
    assert chat["object"] == "chat.completion"
    (choice,) = chat["choices"]
    assert (
        choice["message"] == {"role": "assistant", "content": "Dub"} and choice["finish_reason"] == "length"
    )
    first = choice["logprobs"]["content"][0]
    assert first["token"] == "D" and first["bytes"] == [68] and len(first["top_logprobs"]) == 1

    samples = found["line-3"]["response"]["body"]["choices"]
    assert [(sample["index"], sample["text"]) for sample in samples] == [(0, "()()"), (1, "()()")]
    (choice,) = found["line-4"]["response"]["body"]["choices"]
    end = model.tokenizer.token_to_id("<|im_end|>")
    assert choice["token_ids"] == [*ids_of(model.tokenizer, " Yes!"), end]
    for name in ("user", "stream", "model"):
        assert f"no effect  {name} in 1 lines" in result.stderr


def test_a_seed_is_a_hash_or_the_line_s_own(batch, one_llm):
    """And draws what LLM.generate draws with it, whatever runs beside it."""
    lines = [{"custom_id": f"s{i}", "prompt": "x y", "temperature": 1, "max_tokens": 6} for i in range(6)]
    lines[5]["seed"] = 2**64 - 1
    lines[4]["seed"] = -1
    lines = [line | {"return_token_ids": True} for line in lines]
    assert batch(lines, "--seed", "7").exit_code == 0
    for custom_id, record in by_id(batch.folder / "out.jsonl").items():
        digest = hashlib.blake2b(f"7 {custom_id}".encode(), digest_size=8).digest()
        seed = 2**64 - 1 if custom_id == "s5" else int.from_bytes(digest, "big")
        assert record["seed"] == seed
        params = SamplingParams(temperature=1, max_tokens=6, seed=seed)
        (alone,) = one_llm.llm.generate(["x y"], params, use_tqdm=False)
        assert record["response"]["body"]["choices"][0]["token_ids"] == alone.outputs[0].token_ids


def test_echo_scores_the_prompt(batch, model):
    """As lm-evaluation-harness asks for it: max_tokens 0, echo, logprobs; and the labels that were asked for."""
    lines = [
        {"custom_id": "score", "prompt": "ok? yes", "echo": True, "max_tokens": 0, "logprobs": 1},
        {"custom_id": "more", "prompt": "ok?", "echo": True, "max_tokens": 2, "logprobs": 0},
        {"custom_id": "labels", "prompt": "ok?", "max_tokens": 1, "logprob_token_ids": [3, 5]},
    ]
    result = batch(lines)
    assert result.exit_code == 0, result.stderr
    found = by_id(batch.folder / "out.jsonl")
    (choice,) = found["score"]["response"]["body"]["choices"]
    assert choice["text"] == "ok? yes" and "".join(choice["logprobs"]["tokens"]) == "ok? yes"
    assert choice["logprobs"]["text_offset"] == list(range(7))
    ids = ids_of(model.tokenizer, "ok? yes")
    assert choice["logprobs"]["token_logprobs"][0] is None and choice["logprobs"]["top_logprobs"][0] is None
    for i in range(1, len(ids)):
        expected = planted.next_logprobs(model.table, ids[i - 1])
        assert abs(choice["logprobs"]["token_logprobs"][i] - expected[ids[i]]) <= 1e-4
        (top,) = choice["logprobs"]["top_logprobs"][i].values()
        assert abs(top - expected.max()) <= 1e-4
    (choice,) = found["more"]["response"]["body"]["choices"]
    assert choice["text"] == "ok? Y" and len(choice["logprobs"]["token_logprobs"]) == 5
    (choice,) = found["labels"]["response"]["body"]["choices"]
    expected = planted.next_logprobs(model.table, ids_of(model.tokenizer, "?")[0])
    values = sorted(choice["logprobs"]["top_logprobs"][0].values())
    assert values == pytest.approx(sorted(expected[[3, 5]]), abs=1e-4)


def test_loglikelihood(batch, model, one_llm):
    """The numbers of the table, and of `LLM.loglikelihood`."""
    url = "/v1/loglikelihood"
    pairs = [("ok?", " Yes!"), ("ok?", " no"), ("ok? ", "Yes"), ("a", "b")]
    lines = [
        {"custom_id": f"{i}", "url": url, "body": {"prompt": prompt, "continuation": continuation}}
        for i, (prompt, continuation) in enumerate(pairs)
    ]
    lines[3] = {"custom_id": "3", "prompt": ids_of(model.tokenizer, "a"), "continuation": [7]}
    bad = [
        {"custom_id": "empty", "prompt": "a", "continuation": ""},
        {"custom_id": "sampling", "prompt": "a", "continuation": "b", "temperature": 1},
        {"custom_id": "kinds", "prompt": "a", "continuation": [1]},
    ]
    assert batch([*lines, *bad]).exit_code == 1
    found = by_id(batch.folder / "out.jsonl")
    assert {found[line["custom_id"]]["error"]["code"] for line in bad} == {"refused", "unknown_field"}
    bodies = [found[str(i)]["response"]["body"] for i in range(4)]
    assert [body["is_greedy"] for body in bodies] == [True, False, True, False]
    for body, (prompt, continuation) in zip(bodies[:3], pairs, strict=False):
        ids = ids_of(model.tokenizer, prompt + continuation)
        start = len(prompt.rstrip())
        expected = [planted.next_logprobs(model.table, ids[i - 1])[ids[i]] for i in range(start, len(ids))]
        assert body["token_logprobs"] == pytest.approx(expected, abs=1e-4)
        assert body["logprob"] == pytest.approx(sum(expected), abs=1e-4 * len(ids))
    prompts, continuations = zip(*pairs[:3], strict=True)
    theirs = one_llm.llm.loglikelihood(list(prompts), list(continuations), use_tqdm=False)
    assert [body["logprob"] for body in bodies[:3]] == pytest.approx([o.logprob for o in theirs], abs=1e-6)


def test_options_are_for_what_a_line_leaves_out(batch):
    lines = [
        {"custom_id": "own", "prompt": "(", "max_tokens": 2},
        {"custom_id": "null", "prompt": "(", "max_tokens": None},
        {"custom_id": "none", "prompt": "(", "top_p": 0.5},
    ]
    result = batch(lines, "--max-tokens", "5")
    found = by_id(batch.folder / "out.jsonl")
    assert {name: len(text(record)) for name, record in found.items()} == {"own": 2, "null": 5, "none": 5}
    assert "no effect  top_p without a temperature in 1 lines" in result.stderr


# Bad lines


def test_a_bad_line_fails_alone(batch):
    bad = {
        b"": "empty_line",
        b"[1]": "not_an_object",
        b'"x"': "not_an_object",
        b"null": "not_an_object",
        b'{"prompt": "a': "invalid_json",
        b"[" * 100_000: "invalid_json",
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}": "invalid_json",
        b'\xff{"prompt": "a"}': "invalid_utf8",
        b'{"prompt": "\\ud800"}': "invalid_utf8",
        b'\xef\xbb\xbf{"prompt": "a"}': "invalid_json",
        b'{"url": "/v1/completions", "body": {"prompt": "a"}}': "missing_custom_id",
        b'{"custom_id": 5, "prompt": "a"}': "invalid_custom_id",
        b'{"custom_id": "body", "url": "/v1/completions", "body": "x"}': "invalid_request",
        b'{"custom_id": "url", "url": "/v1/audio", "body": {}}': "unknown_url",
        b'{"custom_id": "unknown", "prompt": "a", "temprature": 1}': "unknown_field",
        b'{"prompt": "a", "guided_decoding": {}}': "unknown_field",
        b'{"custom_id": "both", "prompt": "a", "messages": []}': "invalid_request",
        b'{"prompt": "a", "max_tokens": -1}': "invalid_value",
        b'{"prompt": "a", "temperature": "1"}': "invalid_value",
        b'{"prompt": "a", "top_p": NaN}': "invalid_value",
        b'{"prompt": ["a", "b"]}': "invalid_value",
        b'{"messages": [{"content": "no role"}]}': "refused",
        b'{"prompt": "a", "max_tokens": 1000000000}': "refused",
        b'{"prompt": [999]}': "refused",
        b'{"prompt": []}': "refused",
        json.dumps({"custom_id": "long", "prompt": "x" * 1_000_000}).encode(): "refused",
    }
    lines, expected = [], {}
    for i, (line, code) in enumerate(bad.items()):
        lines += [{"custom_id": f"good {i}", "prompt": "ok?"}, line]
        expected[len(lines)] = code
    lines[0] = b"\xef\xbb\xbf" + json.dumps(lines[0]).encode()  # a BOM, and CRLF
    lines[2] = json.dumps(lines[2]).encode() + b"\r"
    result = batch(lines)
    assert result.exit_code == 1
    found = by_id(batch.folder / "out.jsonl")
    failed = {record["line"]: record for record in found.values() if record["error"] is not None}
    assert {line: record["error"]["code"] for line, record in failed.items()} == expected
    for line, record in failed.items():
        assert record["response"]["status_code"] == 400
        assert record["response"]["body"]["error"].items() >= record["error"].items()
        assert record["error"]["line"] == line and len(record["error"]["message"]) < 300
    assert {"body", "url", "unknown", "both", "long"} <= {record["custom_id"] for record in failed.values()}
    good = [record for name, record in found.items() if name.startswith("good")]
    assert len(good) == len(bad) and all(text(record) == " Yes!" for record in good)
    summary = [line.split(maxsplit=1) for line in result.stderr.splitlines()]
    assert ["lines", f"{len(lines)}, {len(good)} done"] in summary
    assert any(
        name == "failed" and rest.startswith("4 invalid_value, such as line 36: max_tokens=-1 must")
        for name, rest in summary
    )


def test_errors_go_to_their_own_file(batch):
    lines = [{"custom_id": "a", "prompt": "?"}, b"{", {"custom_id": "c", "prompt": "?"}]
    for _ in range(2):  # again: what failed is tried again, and is there once
        result = batch(lines, "--errors", batch.folder / "errors.jsonl")
        assert result.exit_code == 1
        assert set(by_id(batch.folder / "out.jsonl")) == {"a", "c"}
        assert set(by_id(batch.folder / "errors.jsonl")) == {"line-2"}


def test_max_failures_stops_a_hopeless_job(batch):
    lines = [{"custom_id": str(i), "prompt": "?"} | ({"typo": 1} if i % 2 else {}) for i in range(40)]
    result = batch(lines, "--max-failures", "3")
    assert result.exit_code == 1
    assert "Error: more than 3 lines failed, the last one: line 8: there is no field 'typo'" in result.stderr
    assert len(records(batch.folder / "out.jsonl")) < 20


def test_duplicate_ids_are_refused_before_work(batch, one_llm):
    lines = [*mixed(6), {"custom_id": "id 2", "prompt": "x"}, {"custom_id": "id 3", "prompt": "x"}]
    result = batch(lines)
    assert result.exit_code == 1
    assert "must be there once: 'id 2' is on lines 3 and 7, and 1 more" in result.stderr
    assert one_llm.loads == 0 and not (batch.folder / "out.jsonl").exists()


# Going on


def begin(batch, uninterrupted, data: bytes):
    """A folder as a killed job leaves it: its input, its manifest, and `data` of its output."""
    _, whole = uninterrupted
    for name in ("in.jsonl", "out.jsonl.manifest.json"):
        (batch.folder / name).write_bytes((whole.parent / name).read_bytes())
    (batch.folder / "out.jsonl").write_bytes(data)


def assert_finished(batch, uninterrupted):
    """The file equals that of the job that ran through, but for the order of its lines."""
    ours = (batch.folder / "out.jsonl").read_bytes().splitlines()
    assert sorted(ours) == sorted(uninterrupted[1].read_bytes().splitlines())


def test_resume_after_a_cut_anywhere(batch, uninterrupted):
    """The output is only appended to, so a kill leaves a beginning of it, cut in the middle of a line or not."""
    data = uninterrupted[1].read_bytes()
    chance = random.Random(0)
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in [0, ends[3], ends[5] - 1, *(chance.randrange(len(data)) for _ in range(9))]:
        begin(batch, uninterrupted, data[:cut])
        result = batch()
        assert result.exit_code == 0, result.stderr
        assert_finished(batch, uninterrupted)
        done_before = data[:cut].count(b"\n")
        assert (
            (batch.folder / "out.jsonl")
            .read_bytes()
            .startswith(data[: ends[done_before - 1]] if cut else b"")
        )


def test_a_finished_job_loads_no_model(batch, uninterrupted, one_llm):
    begin(batch, uninterrupted, uninterrupted[1].read_bytes())
    result = batch(None, "--resume")
    assert result.exit_code == 0 and one_llm.loads == 0
    assert "40, 40 done, 40 by earlier runs" in result.stderr


def test_damage_is_done_again(batch, uninterrupted):
    """Blocks of zeros, as a power cut leaves them, a failed line, and a line that is there twice."""
    lines = uninterrupted[1].read_bytes().splitlines(keepends=True)
    failed = json.loads(lines[2]) | {"error": {"code": "refused", "message": "", "line": 3}}
    lines[1:3] = [b"\0" * 100 + b"\n", json.dumps(failed).encode() + b"\n", lines[0]]
    begin(batch, uninterrupted, b"".join(lines))
    assert batch().exit_code == 0
    assert_finished(batch, uninterrupted)


def test_a_result_that_was_not_asked_for_is_refused(batch, uninterrupted):
    foreign = journal.sealed(b'{"custom_id": "nobody", "line": 1, "error": null}')
    begin(batch, uninterrupted, foreign)
    result = batch()
    assert result.exit_code == 1 and "'nobody', which is not in the input" in result.stderr
    assert (batch.folder / "out.jsonl").read_bytes() == foreign


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--temperature", "0.5"], "sampling.temperature was 0.0, is 0.5"),
        (["--seed", "1"], "seed was 0, is 1"),
        (["--shard", "1/2"], 'shard was "1/1", is "1/2"'),
        (["--max-model-len", "128"], "max_model_len was 160, is 128"),
        (["--decode-steps", "2"], "programs.decode_steps was 1, is 2"),
    ],
)
def test_another_job_does_not_go_on(batch, uninterrupted, args, says):
    data = uninterrupted[1].read_bytes().splitlines(keepends=True)
    begin(batch, uninterrupted, b"".join(data[:20]))
    result = batch(None, *args)
    assert result.exit_code == 1 and says in result.stderr
    assert (batch.folder / "out.jsonl").read_bytes() == b"".join(data[:20])


def test_changed_input_or_model_does_not_go_on(batch, uninterrupted, model):
    begin(batch, uninterrupted, b"")
    result = batch(mixed(41))
    assert result.exit_code == 1 and "input_sha256 was" in result.stderr
    begin(batch, uninterrupted, b"")
    result = batch(None, "-m", write_model(batch.folder / "other").path)
    assert result.exit_code == 1 and "model was" in result.stderr and "model_hash" not in result.stderr


def test_files_of_others_are_left_alone(batch, one_llm):
    (batch.folder / "out.jsonl").write_text("my thesis\n")
    lines = [{"custom_id": "a", "prompt": "?"}]
    assert "exists and is of no batch job" in batch(lines).stderr
    assert (batch.folder / "out.jsonl").read_text() == "my thesis\n"
    assert "there is nothing to resume" in batch(lines, "--resume").stderr
    assert one_llm.loads == 0
    result = batch(lines, "--overwrite")
    assert result.exit_code == 1 and "is of no batch job: --overwrite leaves it alone" in result.stderr
    assert (batch.folder / "out.jsonl").read_text() == "my thesis\n"
    assert "is used twice" in batch(lines, output="in.jsonl").stderr


def test_an_output_on_another_disk_stays_there(batch):
    """OUT may be a link: what is replaced is the file behind it."""
    elsewhere = batch.folder / "elsewhere"
    elsewhere.mkdir()
    (batch.folder / "out.jsonl").symlink_to(elsewhere / "real.jsonl")
    lines = [*mixed(6), b"bad"]
    for _ in range(2):  # the second run takes the failure out first
        assert batch(lines, "--ordered").exit_code == 1
    assert (batch.folder / "out.jsonl").is_symlink()
    assert len(records(elsewhere / "real.jsonl")) == 7


def test_an_input_that_grows_meanwhile_is_noticed(batch, monkeypatch):
    """Else there would be results that the next run finds foreign."""
    step = Window.step

    def step_and_append(self):
        with (batch.folder / "in.jsonl").open("a") as file:
            file.write('\n{"custom_id": "new", "prompt": "?"}')
        return step(self)

    monkeypatch.setattr(Window, "step", step_and_append)
    result = batch(mixed(20))
    assert result.exit_code == 1 and "was changed at line 21 while the job ran" in result.stderr
    assert len(records(batch.folder / "out.jsonl")) <= 20


def test_a_second_process_is_refused(batch, uninterrupted):
    begin(batch, uninterrupted, b"")
    with (batch.folder / "out.jsonl.lock").open("a+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write(journal.LOCK_MARK.decode() + "1234\n")
        held.flush()
        result = batch()
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: process 1234 is writing ")
    assert batch().exit_code == 0


# Interruption


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_interruption(batch, uninterrupted, monkeypatch, signum, code):
    """Stops admitting, keeps what is finished, says how to go on."""
    step, steps = Window.step, []

    def interrupted_step(self):
        steps.append(time.monotonic())
        if len(steps) == 10:
            os.kill(os.getpid(), signum)
        return step(self)

    begin(batch, uninterrupted, b"")
    monkeypatch.setattr(Window, "step", interrupted_step)
    result = batch()
    assert result.exit_code == code
    assert result.stderr.splitlines()[-1].endswith("the same command goes on.")
    assert len(steps) == 10
    assert 0 < len(records(batch.folder / "out.jsonl")) < 40
    monkeypatch.setattr(Window, "step", step)
    assert batch().exit_code == 0
    assert_finished(batch, uninterrupted)


def test_a_failing_device_loses_nothing(batch, uninterrupted, monkeypatch, one_llm):
    """What was finished stays, the error is one sentence, and the engine is fit for the next run."""
    begin(batch, uninterrupted, b"")
    batch(None, "--shard", "1/40")  # refused, but the engine is there now
    take = journal.Journal.append

    def append(self, line):
        take(self, line)
        if self._size > 2000:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore lines")

    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "append", append)
        result = batch()
    assert result.exit_code == 1
    assert "Error: RESOURCE_EXHAUSTED: out of memory\n" in result.stderr
    assert len(records(batch.folder / "out.jsonl")) > 0
    assert batch().exit_code == 0
    assert_finished(batch, uninterrupted)
    assert not one_llm.llm._loop.records and not one_llm.llm.engine.has_unfinished


def test_a_full_disk_stops_the_job(batch, uninterrupted):
    """A limit on the size of files stands in for the end of the disk: both write a part and then refuse."""
    begin(batch, uninterrupted, b"")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    try:
        result = batch()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.exit_code == 1
    (sentence,) = [line for line in result.stderr.splitlines() if line.startswith("Error")]
    assert "File too large" in sentence and "the same command goes on" in sentence
    assert 0 < len(records(batch.folder / "out.jsonl")) < 40
    assert batch().exit_code == 0
    assert_finished(batch, uninterrupted)


def test_an_output_that_cannot_be_written(batch):
    (batch.folder / "out.jsonl").mkdir()
    result = batch(mixed(2))
    assert result.exit_code == 1 and "Error: " in result.stderr
    result = batch(mixed(2), output="nowhere/out.jsonl")
    assert result.exit_code == 1 and "there is no folder" in result.stderr
    result = batch(name="missing.jsonl")
    assert result.exit_code == 1 and "there is no file" in result.stderr


# Order, memory, shards


def test_order(batch):
    """By completion, or with --ordered by input line, failures and lines of a second run included."""
    lines = [
        {"custom_id": f"{i}", "prompt": "(", "max_tokens": 20 if i % ROWS == 0 else 2} for i in range(12)
    ]
    lines[5] = b"bad"
    batch(lines)
    numbers = [record["line"] for record in records(batch.folder / "out.jsonl")]
    assert numbers != sorted(numbers)
    for _ in range(2):
        batch(lines, "--ordered", output="ordered.jsonl")
        assert [record["line"] for record in records(batch.folder / "ordered.jsonl")] == list(range(1, 13))


def test_the_window_is_bounded(batch, monkeypatch):
    """No more lines are read than twice the rows that run, and the long line does not hold up the others."""
    add, open_ = Window.add, []

    def counted(self, task):
        refusal = add(self, task)
        open_.append(sum(task.params.n for task in self._under_way.values()))
        return refusal

    monkeypatch.setattr(Window, "add", counted)
    lines = [{"custom_id": "long", "prompt": "(", "max_tokens": 100}, *mixed(60)]
    assert batch(lines).exit_code == 0
    assert max(open_) == 2 * ROWS
    assert records(batch.folder / "out.jsonl")[20]["custom_id"] != "long"


def test_shards_and_merge(batch, uninterrupted):
    def merge(*parts):
        command = ["merge", *(batch.folder / part for part in parts), "-o", batch.folder / "all.jsonl"]
        return CliRunner().invoke(app, [str(word) for word in command])

    lines, whole = uninterrupted
    parts = [f"part{i}.jsonl" for i in (1, 2, 3)]
    for i, part in enumerate(parts, 1):
        assert batch(lines, "--shard", f"{i}/3", output=part).exit_code == 0
        assert records(batch.folder / part)
    assert "3/3 is missing" in merge(*parts[:2]).stderr
    assert "is missing" in merge(parts[0], parts[0], parts[1]).stderr
    assert merge(*parts[::-1]).exit_code == 0
    merged = records(batch.folder / "all.jsonl")
    assert [record["line"] for record in merged] == list(range(1, 41))
    for ours, theirs in zip(merged, sorted(records(whole), key=lambda record: record["line"]), strict=True):
        ours["response"]["body"]["created"] = theirs["response"]["body"]["created"]
        assert ours == theirs
    assert "exists" in merge(*parts).stderr
    (batch.folder / "all.jsonl").unlink()
    batch(lines, "--shard", "1/3", "--seed", "3", "--overwrite", output=parts[0])
    assert "seed was" in merge(*parts).stderr
    assert not (batch.folder / "all.jsonl").exists()


def test_an_unfinished_shard_is_not_merged(batch, uninterrupted):
    begin(batch, uninterrupted, b"")
    manifest = json.loads((batch.folder / "out.jsonl.manifest.json").read_bytes())
    assert manifest["finished"]
    path = batch.folder / "out.jsonl.manifest.json"
    path.write_text(json.dumps(manifest | {"finished": False}))
    result = CliRunner().invoke(
        app, ["merge", str(batch.folder / "out.jsonl"), "-o", str(batch.folder / "a")]
    )
    assert result.exit_code == 1 and "is not finished" in result.stderr


# Tables, numbers


def test_tables(batch, monkeypatch):
    import importlib.util

    import pyarrow
    import pyarrow.parquet

    (batch.folder / "in.csv").write_bytes(
        b'custom_id,question,other\na,"first, ok?",1\nb,"two\nlines?",2\n,bad \xff,3\n'
    )
    result = batch(None, "--prompt-column", "question", name="in.csv", output="csv.jsonl")
    assert result.exit_code == 1
    found = by_id(batch.folder / "csv.jsonl")
    assert text(found["a"]) == text(found["b"]) == " Yes!"
    assert found["line-3"]["error"]["code"] == "invalid_utf8"
    batch(None, "--prompt-column", "question", "--chat", name="in.csv", output="answers.jsonl")
    assert text(by_id(batch.folder / "answers.jsonl")["b"]) == "Dublin."
    assert "name the column" in batch(None, name="in.csv").stderr
    result = batch(None, "--prompt-column", "questions", name="in.csv", output="new.jsonl")
    assert "has no column 'questions'; it has 'custom_id', 'question', 'other'" in result.stderr

    chats = [[{"role": "user", "content": f"{i}"}] for i in range(3)]
    columns = {"text": ["ok?", None, "("], "chat": chats, "n": [1, 2, 3]}
    pyarrow.parquet.write_table(pyarrow.table(columns), batch.folder / "in.parquet")
    batch(None, "--prompt-column", "chat", name="in.parquet", output="chat.jsonl")
    assert [text(record) for record in records(batch.folder / "chat.jsonl")] == ["Dublin."] * 3
    batch(None, "--prompt-column", "text", name="in.parquet", output="text.jsonl")
    found = by_id(batch.folder / "text.jsonl")
    assert text(found["line-1"]) == " Yes!" and text(found["line-3"]) == ")()()()("
    assert found["line-2"]["error"]["code"] == "invalid_value"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = batch(None, "--prompt-column", "text", name="in.parquet", output="new.jsonl")
    assert result.stderr.endswith("which is not installed; pip install 'jaxinfer[batch]'\n")


def test_metrics(batch):
    metrics = batch.folder / "metrics.json"
    lines = [{"custom_id": "a", "prompt": "ab(", "max_tokens": 4, "user": "u"}, b"bad"]
    result = batch(lines, "--metrics-json", metrics, "--price-per-hour", "3.6")
    found = json.loads(metrics.read_text())
    counts = {"lines": 2, "done": 1, "failed": 1, "left": 0, "prompt_tokens": 3, "output_tokens": 4}
    assert found.items() >= counts.items()
    assert found["failures"] == {"invalid_json": 1} and found["inert_fields"] == {"user": 1}
    assert found["cost"] == pytest.approx(found["seconds"] * 0.001)
    assert found["cost_per_million_tokens"] == pytest.approx(found["cost"] / 7 * 1e6)
    assert "per million tokens" in result.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--shard", "3/2"], "--shard 3/2 must be i/n"),
        (["--resume", "--overwrite"], "give one of them"),
        (["--prompt-column", "text"], "--prompt-column is for tables (.csv, .tsv, .parquet)"),
        (["--chat"], "--chat is for tables (.csv, .tsv, .parquet)"),
    ],
)
def test_wrong_usage(batch, one_llm, args, says):
    result = batch(mixed(2), *args)
    assert result.exit_code in (1, 2) and says in " ".join(result.stderr.split())
    assert one_llm.loads == 0 and not (batch.folder / "out.jsonl").exists()


def test_the_library_call_needs_no_terminal(batch, one_llm, model):
    """`runner.run` outside the command: in any thread, no signals, counts in the totals."""
    (batch.folder / "in.jsonl").write_text('{"prompt": "?"}\n')
    job = runner.Job(
        input=batch.folder / "in.jsonl",
        output=batch.folder / "out.jsonl",
        model="planted",
        model_hash="0",
        defaults=SamplingParams(temperature=0),
    )
    totals = runner.Totals()
    runner.run(job, lambda: jaxinfer.llm.LLM(model.path, max_num_seqs=ROWS, **LIBRARY), totals)
    assert totals.num_done == 1 and totals.num_left == 0


LIBRARY = {
    "max_num_batched_tokens": 16,
    "decode_steps": 1,
    "page_size": 16,
    "num_pages": 64,
    "max_model_len": 160,
    "background_compile": False,
}
