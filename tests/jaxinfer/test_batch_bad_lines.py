"""Lines of a batch job that are made to end it: each fails alone, and a resume says the same of it."""

import contextlib
import json
import logging
from pathlib import Path

import pytest
from batch_jobs import OPTIONS, by_id, cached_llm, write_model
from typer.testing import CliRunner

import jaxinfer.llm
from jaxinfer.cli import app

DEEP = b"[" * 3_000 + b"1" + b"]" * 3_000
DEEP_OBJECT = b'{"a":' * 3_000 + b"1" + b"}" * 3_000
MESSAGES = b'"messages": [{"role": "user", "content": "Hi"}]'
BAD = {
    "content": b'"messages": [{"role": "user", "content": %s}]' % DEEP,
    "content_object": b'"messages": [{"role": "user", "content": %s}]' % DEEP_OBJECT,
    "name": b'"messages": [{"role": "user", "content": "Hi", "name": %s}]' % DEEP,
    "role": b'"messages": [{"role": %s, "content": "Hi"}]' % DEEP,
    "calls": b'"messages": [{"role": "assistant", "tool_calls": %s}]' % DEEP,
    "arguments": b'"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "%s"}}]}]'
    % DEEP,
    "message": b'"messages": [%s]' % DEEP_OBJECT,
    "tools": b'%s, "tools": [%s]' % (MESSAGES, DEEP_OBJECT),
    "tools_list": b'%s, "tools": %s' % (MESSAGES, DEEP),
    "variables": b'%s, "chat_template_kwargs": {"a": %s}' % (MESSAGES, DEEP),
    "variables_list": b'%s, "chat_template_kwargs": %s' % (MESSAGES, DEEP),
    "stop": b'%s, "stop": %s' % (MESSAGES, DEEP),
    "bad_words": b'%s, "bad_words": [%s]' % (MESSAGES, DEEP),
    "logit_bias": b'%s, "logit_bias": {"5": %s}' % (MESSAGES, DEEP),
    "temperature": b'%s, "temperature": %s' % (MESSAGES, DEEP_OBJECT),
    "extra_args": b'%s, "extra_args": {"a": %s}' % (MESSAGES, DEEP),
    "prompt": b'"prompt": %s' % DEEP,
    "image": b'"messages": [{"role": "user", "content": [{"type": "%s"}]}]' % (b"x" * 8_000_000),
    "no_role": b'"messages": [{"content": "%s"}]' % (b"x" * 8_000_000),
    "long": b'"messages": [{"role": "user", "content": "%s"}]' % (b"the inn " * 1_000_000),
    "long_prompt": b'"prompt": "%s"' % (b"the inn " * 1_000_000),
    "long_pair": b'"prompt": "%s", "continuation": "a"' % (b"the inn " * 1_000_000),
}
GOOD = b'{"custom_id": "%d", "messages": [{"role": "user", "content": "Hi"}]}'


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loggers = [logging.getLogger(name) for name in (None, "jaxinfer", "jax")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]

    def get(path, **options):
        return contextlib.nullcontext(cached_llm(path, tuple(sorted(options.items()))))

    monkeypatch.setattr(jaxinfer.llm, "LLM", get)
    yield write_model(tmp_path / "planted")
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_no_line_ends_the_job(model, tmp_path: Path) -> None:
    lines = [
        GOOD % 1,
        *(b'{"custom_id": "%s", %s}' % (name.encode(), body) for name, body in BAD.items()),
        GOOD % 2,
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines))
    command = ["batch", str(source), "-o", str(output), "-m", model.path, *OPTIONS]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "Traceback" not in result.stderr, result.stderr[-2_000:]
    found = by_id(output)
    assert found.keys() == {*BAD, "1", "2"}
    for name in ("1", "2"):
        assert found[name]["response"]["body"]["choices"][0]["message"]["content"] == "Dublin."
    for name in BAD:
        error = found[name]["error"]
        assert error is not None, name
        assert 0 < len(error["message"]) < 400, (name, error["message"][:500])
    assert len(json.dumps(list(found.values()))) < 20_000
    assert len(result.stderr) < 20_000
    again = CliRunner().invoke(app, command)  # tries the bad lines once more
    assert again.exit_code == 1 and "Traceback" not in again.stderr
    assert {id_: record["error"] for id_, record in by_id(output).items()} == {
        id_: record["error"] for id_, record in found.items()
    }
