"""Standard streams and arguments of commands: other encodings, bytes that are no text, closed and full."""

import json
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import planted
import pytest
import text_fixtures
from tiny_models import write_hf

COMMAND = f"{shlex.quote(sys.executable)} -c 'from jaxinfer.cli import main; main()'"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder whose model answers a chat with "Dublin." and continues "(" with "()()..." for ever."""
    tokenizer = text_fixtures.byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    dublin = [tokenizer.token_to_id(char) for char in "ĊDublin."]
    table = planted.plant_chain(planted.random_table(320, "streams"), [*dublin, end])
    table = planted.plant_chain(table, [tokenizer.token_to_id(char) for char in "()("])
    config, weights = planted.make_planted(table)
    folder = write_hf(tmp_path_factory.mktemp("streams") / "planted", config, weights)
    template = {"chat_template": text_fixtures.TEMPLATES["chatml"]}
    text_fixtures.save(folder, tokenizer, text_fixtures.BYTE_LEVEL_CONFIG | template)
    return SimpleNamespace(path=str(folder))


def shell(model, line, **environment):
    """A line of bash in which `J` is the command and $M its model."""
    return subprocess.run(
        ["bash", "-c", f'J() {{ {COMMAND} "$@"; }}; {line}'],
        env=os.environ | {"M": model.path} | environment,
        capture_output=True,
        timeout=120,
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_in_an_encoding_without_the_characters_is_escaped(model, encoding):
    prompt = "日é😀"
    plain = shell(model, f"J generate -m $M '{prompt}' --max-tokens 4", PYTHONIOENCODING=encoding)
    assert plain.returncode == 0, plain.stderr
    as_json = shell(model, f"J generate -m $M '{prompt}' --max-tokens 4 --json", PYTHONIOENCODING=encoding)
    assert as_json.returncode == 0, as_json.stderr
    assert json.loads(as_json.stdout.decode(encoding))["prompt"] == prompt
    answer = json.loads(as_json.stdout)["text"] + "\n"
    assert plain.stdout == answer.encode(encoding, errors="backslashreplace")


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("J generate -m nowhere $'caf\\xe9'", 1, "the prompt is not UTF-8: byte 0xe9 after 'caf'"),
        ("J generate -m nowhere --chat $'caf\\xe9'", 1, "the message is not UTF-8"),
        (
            "J generate -m nowhere --chat a --system $'\\xe9'",
            1,
            "--system is not UTF-8: byte 0xe9 at its beginning",
        ),
        ("J chat -m nowhere --system $'\\xe9'", 1, "--system is not UTF-8"),
        ("J generate -m nowhere a --stop $'caf\\xe9'", 2, "stop is not UTF-8"),
        ("printf 'caf\\xe9' | J generate -m nowhere -", 1, "standard input is not UTF-8 text: byte 3"),
        ("J generate -m nowhere a >&-", 1, "standard output is closed"),
        ("J info nowhere >&-", 1, "standard output is closed"),
        ("J generate -m $M '(' --max-tokens 1 >/dev/full", 1, "No space left on device"),
        ("J generate -m $M '(' --max-tokens 1 --json >/dev/full", 1, "No space left on device"),
    ],
)
def test_streams_and_arguments_that_hold_no_text(model, line, code, says):
    result = shell(model, line)
    assert (result.returncode, result.stdout) == (code, b"")
    stderr = result.stderr.decode()
    assert says in stderr and "Traceback" not in stderr and "Exception" not in stderr


def test_closed_streams_that_are_not_needed_change_nothing(model):
    plain = shell(model, "J generate -m $M '(' --max-tokens 4")
    assert plain.returncode == 0 and plain.stdout
    for closed in ("<&-", "2>&-", "<&- 2>&-"):
        result = shell(model, f"J generate -m $M '(' --max-tokens 4 {closed}")
        assert (result.returncode, result.stdout) == (0, plain.stdout)
    closed, empty = (
        shell(model, f"J generate -m $M - --max-tokens 4 {stdin}") for stdin in ("<&-", "</dev/null")
    )
    assert (closed.returncode, closed.stdout) == (0, empty.stdout)


@pytest.mark.parametrize(
    "command", ["generate -m $M '(' --json", "generate -m $M '(' -n 2 --temperature 1", "info $M"]
)
def test_a_reader_that_left_is_no_traceback(model, command):
    result = shell(model, f"J {command} | true")
    assert result.stderr.decode().count("Traceback") == 0 and b"Exception" not in result.stderr


def test_chat_takes_lines_in_utf8_alone(model):
    result = shell(model, "printf 'caf\\xe9\\nHi\\n日本\\n' | J chat -m $M", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stdout) == (1, b"Dublin.\n" * 2)
    errors = [line for line in result.stderr.decode().splitlines() if line.startswith("Error")]
    assert errors == ["Error: line 1 is not UTF-8 text: byte 3 is wrong"]
