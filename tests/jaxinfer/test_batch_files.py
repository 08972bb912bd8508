"""Files of batch jobs: inputs of other kinds, files of other people, and files that were damaged."""

import contextlib
import errno
import gzip
import json
import os
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from batch_jobs import OPTIONS, by_id, cached_llm, mixed, text, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import jaxinfer.llm
from jaxinfer.checkpoints import fetch
from jaxinfer.cli import app
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tools.batch_runner import inputs, journal, manifest
from jaxinfer.tools.batch_runner.index import Index
from jaxinfer.tools.batch_runner.inputs import BadLine
from jaxinfer.tools.batch_runner.journal import JournalError
from jaxinfer.tools.batch_runner.tasks import parse

ASKED = [{"custom_id": "a", "prompt": "is?"}, {"custom_id": "b", "prompt": "was?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("files") / "planted")


@pytest.fixture
def batch(model, tmp_path, monkeypatch):
    """Runs `jaxinfer batch IN -o OUT` in a folder of its own, where both have names; counts loads of the model."""

    def open_llm(path, **options):
        run.loads += 1
        options = {name: value for name, value in options.items() if name not in ("revision", "token")}
        return contextlib.nullcontext(cached_llm(path, tuple(sorted(options.items()))))

    def run(source, *args, output="out.jsonl"):
        command = ["batch", tmp_path / source, "-o", tmp_path / output, "-m", model.path, *OPTIONS, *args]
        result = CliRunner().invoke(app, [str(word) for word in command])
        assert "Traceback" not in result.stderr, result.stderr
        return result

    monkeypatch.setattr(jaxinfer.llm, "LLM", open_llm)
    run.folder, run.loads = tmp_path, 0
    return run


def write_lines(path: Path, lines=ASKED) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows(path: Path, column: str | None = None) -> list:
    return [
        (value.code if isinstance(value, BadLine) else value) for _, value in inputs.read(path, column, False)
    ]


# Inputs


def test_tables_with_tabs_and_compressed_files_are_read(tmp_path):
    (tmp_path / "a.tsv").write_text('custom_id\tq\n1\tis, really?\n2\t"two\nlines"\n')
    assert rows(tmp_path / "a.tsv", "q") == [
        {"prompt": "is, really?", "custom_id": "1"},
        {"prompt": "two\nlines", "custom_id": "2"},
    ]
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write("q\nis?\n")
    assert rows(tmp_path / "a.csv.gz", "q") == [{"prompt": "is?"}]
    for name in ("a.jsonl.gz", "a.jsonl"):  # what it is decides, not the name
        with gzip.open(tmp_path / name, "wt") as file:
            file.write('{"prompt": "is?"}\n')
        assert rows(tmp_path / name) == [{"prompt": "is?"}]


def test_a_folder_of_parquet_files_is_one_table(tmp_path):
    """As Spark writes it: parts in order, with files beside them that are none."""
    folder = tmp_path / "a.parquet"
    folder.mkdir()
    for i in range(3):
        pyarrow.parquet.write_table(pyarrow.table({"q": [f"{i}?"]}), folder / f"part-0000{i}.parquet")
    (folder / "_SUCCESS").touch()
    (folder / "._hidden.parquet").write_bytes(b"junk")
    inputs.check_path(folder)
    assert rows(folder, "q") == [{"prompt": f"{i}?"} for i in range(3)]
    before = inputs.sha256(folder)
    pyarrow.parquet.write_table(pyarrow.table({"q": ["x?"]}), folder / "part-00002.parquet")
    assert inputs.sha256(folder) != before


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"prompt": "é?"}\n'.encode("utf-16"), "is UTF-16 text: write it as UTF-8"),
        ("a.csv", "q\né?\n".encode("utf-16"), "is UTF-16 text: write it as UTF-8"),
        ("a.json", b'[\n  {"prompt": "is?"}\n]\n', "is one JSON array"),
        ("a.jsonl", b'[{"prompt": "is?"}, {"prompt": "was?"}]', "is one JSON array"),
        ("a.json", b'{\n  "prompt": "is?"\n}\n', "is one JSON object over several lines"),
        ("a.jsonl", b"PAR1....PAR1", "is a Parquet file: give it the suffix .parquet"),
        ("a.csv", b"PK\x03\x04....", "is a zip archive or a spreadsheet"),
        ("a.jsonl", b"\x28\xb5\x2f\xfd....", "is compressed with zstd: decompress it first"),
        ("a.parquet", b"no table", "is not a Parquet file, or damaged"),
        ("a.jsonl", gzip.compress(b'{"prompt": "is?"}\n' * 900, mtime=0)[:40], "cannot be read"),
    ],
)
def test_files_of_another_kind_are_named_before_a_model_is_loaded(batch, name, content, says):
    (batch.folder / name).write_bytes(content)
    column = ["--prompt-column", "q"] if name.endswith((".csv", ".parquet")) else []
    result = batch(name, *column)
    assert result.exit_code == 1 and says in result.stderr
    assert batch.loads == 0 and len(result.stderr) < 500


def test_pipes_and_folders_are_named(batch):
    os.mkfifo(batch.folder / "pipe")
    (batch.folder / "folder").mkdir()
    assert "is a pipe or device" in batch("pipe").stderr
    assert "is a folder without .parquet files" in batch("folder").stderr
    assert "there is no file" in batch("nothing").stderr
    with pytest.raises(ValueError, match="which standard input cannot be"):
        inputs.check_path(Path("-"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('custom_id,q\n1,"is?\n2,was?\n3,be?\n', "unexpected end of data, in the row that begins on line 2"),
        ('custom_id,q\n1,is?\n2,"was"?\n3,be?\n', "expected after .*, in the row that begins on line 3"),
    ],
)
def test_csv_with_wrong_quotes_is_refused_with_the_line(tmp_path, content, says):
    """An unclosed quote swallowed every row behind it into one prompt."""
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ValueError, match=says):
        rows(tmp_path / "a.csv", "q")


def test_a_csv_row_of_the_wrong_width_fails_alone_and_keeps_its_id(batch):
    content = "custom_id,q\none,is?\ntwo,was?,more\nthree\n\nfour,is?\n"
    (batch.folder / "a.csv").write_text(content)
    assert batch("a.csv", "--prompt-column", "q").exit_code == 1
    found = by_id(batch.folder / "out.jsonl")
    assert {name: record["error"] is None for name, record in found.items()} == {
        "one": True, "two": False, "three": False, "four": True
    }  # fmt: skip
    assert "row on line 3 of the file has 3 fields, and the header 2" in found["two"]["error"]["message"]
    assert "row on line 4 of the file has 1 fields" in found["three"]["error"]["message"]


# Fields


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"parallel_tool_calls": True},
        {"suffix": None},
        {"functions": None},
        {"best_of": 1},
        {"modalities": ["text"]},
        {"use_beam_search": False},
        {"structured_outputs": None},
    ],
)
def test_values_that_ask_for_nothing_are_accepted_and_counted(fields):
    task = parse({"prompt": "is?"} | fields, 1, SamplingParams(max_tokens=4), 0)
    assert set(fields) <= set(task.inert)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": {"type": "json_object"}}, r'only {"type": "text"} or null can be given'),
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "none", "tools": [{}]}, "tool_choice"),
    ],
)
def test_values_that_ask_for_something_else_are_refused(fields, says):
    with pytest.raises(BadLine, match=says):
        parse({"messages": [{"role": "user", "content": "?"}]} | fields, 1, SamplingParams(), 0)


def test_whole_numbers_may_be_written_with_a_point():
    task = parse({"prompt": "?", "max_tokens": 100.0, "n": 2.0}, 1, SamplingParams(), 0)
    assert (task.params.max_tokens, task.params.n) == (100, 2)
    chat = {"messages": [{"role": "user", "content": "?"}], "logprobs": True, "top_logprobs": 3.0}
    assert parse(chat | {"max_completion_tokens": 7.0}, 1, SamplingParams(), 0).params.max_tokens == 7
    with pytest.raises(BadLine, match="max_tokens"):
        parse({"prompt": "?", "max_tokens": 100.5}, 1, SamplingParams(), 0)


# Files of other people


def test_a_lock_of_another_program_is_left_alone(batch):
    """`-o poetry` beside a poetry.lock."""
    write_lines(batch.folder / "in.jsonl")
    (batch.folder / "poetry.lock").write_text("# Poetry's\n")
    result = batch("in.jsonl", output="poetry")
    assert result.exit_code == 1 and "poetry.lock is no lock of a batch job" in result.stderr
    assert (batch.folder / "poetry.lock").read_text() == "# Poetry's\n" and batch.loads == 0
    (batch.folder / "poetry.lock").write_bytes(b"\xff\xfe no UTF-8")
    result = batch("in.jsonl", output="poetry")
    assert result.exit_code == 1 and "poetry.lock is no lock of a batch job" in result.stderr
    (batch.folder / "poetry.lock").unlink()
    os.mkfifo(batch.folder / "poetry.lock")
    result = batch("in.jsonl", output="poetry")
    assert result.exit_code == 1 and "poetry.lock is no file" in result.stderr and batch.loads == 0


def test_an_empty_lock_is_taken_over_and_loses_nothing(tmp_path):
    """A job that is killed between making its lock and writing to it leaves one."""
    (tmp_path / "out.jsonl.lock").touch()
    with journal.locked(tmp_path / "out.jsonl"):
        assert (tmp_path / "out.jsonl.lock").read_bytes() == journal.LOCK_MARK + b"%d\n" % os.getpid()


def test_the_input_may_have_no_name_of_the_job(batch):
    for name in ("out.jsonl", "out.jsonl.early", "out.jsonl.manifest.json", "out.jsonl.lock"):
        source = write_lines(batch.folder / name)
        before = source.read_bytes()
        for args in ([], ["--overwrite"]):
            result = batch(name, *args)
            assert result.exit_code == 1 and "must be different files" in result.stderr, result.stderr
        assert source.read_bytes() == before
        source.unlink()
    source = write_lines(batch.folder / "in.jsonl")
    os.link(source, batch.folder / "out.jsonl")  # by another name, without a link that could be resolved
    assert "must be different files" in batch("in.jsonl", "--overwrite").stderr
    assert source.read_text() == (batch.folder / "out.jsonl").read_text() != ""


def test_overwrite_deletes_only_what_a_job_wrote(batch):
    write_lines(batch.folder / "in.jsonl")
    for name, what in (
        ("out.jsonl", "thesis"),
        ("out.jsonl.manifest.json", '{"format": 2}'),
        ("out.jsonl.early", "x"),
        ("errors.jsonl", "notes"),
    ):
        (batch.folder / name).write_text(what)
        result = batch("in.jsonl", "--overwrite", "--errors", batch.folder / "errors.jsonl")
        assert result.exit_code == 1 and "--overwrite leaves it alone" in result.stderr, result.stderr
        assert (batch.folder / name).read_text() == what
        (batch.folder / name).unlink()
    folder = batch.folder / "out.jsonl.dump"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    assert "--overwrite leaves it alone" in batch("in.jsonl", "--overwrite").stderr
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_overwrite_of_a_job_leaves_what_others_put_beside_its_dump(batch):
    write_lines(batch.folder / "in.jsonl")
    assert batch("in.jsonl", "--dump-topk", "1").exit_code == 0
    other = batch.folder / "out.jsonl.dump" / "model.safetensors"
    other.write_bytes(b"weights")
    assert batch("in.jsonl", "--dump-topk", "1", "--overwrite").exit_code == 0
    assert other.read_bytes() == b"weights" and len(by_id(batch.folder / "out.jsonl")) == 2


def test_errors_of_another_kind_are_left_alone(batch):
    write_lines(batch.folder / "in.jsonl")
    assert batch("in.jsonl", "--errors", batch.folder / "errors.jsonl").exit_code == 0
    (batch.folder / "errors.jsonl").write_text("notes\n")
    result = batch("in.jsonl", "--errors", batch.folder / "errors.jsonl")
    assert result.exit_code == 1 and "is of no batch job" in result.stderr
    assert (batch.folder / "errors.jsonl").read_text() == "notes\n"


# Locks


def test_a_deleted_lock_lets_nobody_write_beside_a_running_job(tmp_path):
    output = tmp_path / "out.jsonl"
    with journal.locked(output) as check, journal.Journal(output):
        check()
        journal.lock_path(output).unlink()
        with pytest.raises(JournalError, match=r"is writing .* now"), journal.locked(output):
            pass
        with pytest.raises(JournalError, match="another process writes it"):
            journal.Journal(output)
        with pytest.raises(JournalError, match="was deleted while this job held it"):
            check()
    with journal.locked(output):
        pass


def test_a_full_disk_names_the_lock(tmp_path, monkeypatch):
    def full(file, name, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal, "_take_lock", full)
    with (
        pytest.raises(JournalError, match=r"cannot write .*out\.jsonl\.lock: No space left on device"),
        journal.locked(tmp_path / "out.jsonl"),
    ):
        pass


# Damage


def finished(batch, lines) -> bytes:
    write_lines(batch.folder / "in.jsonl", lines)
    assert batch("in.jsonl").exit_code == 0
    return (batch.folder / "out.jsonl").read_bytes()


def test_flipped_bits_are_found_line_by_line_and_answered_again(batch):
    whole = finished(batch, mixed(12))
    rng = random.Random(0)
    for _ in range(30):
        damaged = bytearray(whole)
        bits = rng.sample(range(8 * len(damaged)), rng.choice([1, 1, 2, 5]))
        for bit in bits:
            damaged[bit // 8] ^= 1 << bit % 8
        (batch.folder / "out.jsonl").write_bytes(damaged)
        result = batch("in.jsonl")
        assert result.exit_code == 0, result.stderr
        assert "damaged" in result.stderr or bytes(damaged).count(b"\n") != whole.count(b"\n")
        again = (batch.folder / "out.jsonl").read_bytes()
        assert sorted(again.splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize(
    "record",
    [
        b'{"custom_id": "id 1", "error": null}\n',
        b"[" * 200_000 + b"\n",
        b'{"custom_id": "\\ud800", "line": 1, "error": null}\n',
        b'{"custom_id": "id 1", "line": 1180591620717411303424, "error": null}\n',
        b'{"custom_id": "id 1", "line": "2", "error": null}\n',
        b"\x00" * 4096 + b"\n",
    ],
)
@pytest.mark.parametrize("seal", [False, True])
def test_odd_records_are_said_and_answered_again(batch, record, seal):
    whole = finished(batch, mixed(4))
    lines = whole.splitlines(keepends=True)
    odd = journal.sealed(record[:-1]) if seal else record
    (batch.folder / "out.jsonl").write_bytes(lines[0] + odd + b"".join(lines[2:]))
    if b'"custom_id": "id 1", "error": null' in odd and seal:  # no line number
        assert journal.load_record(odd) is None
    result = batch("in.jsonl")
    assert result.exit_code == 0 and "1 lines of earlier runs, answered again" in result.stderr
    assert sorted((batch.folder / "out.jsonl").read_bytes().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"[" * 100_000, b'"x"', b'{"format": 2}', b'{"format": 2, "asked": 1}']
)
def test_a_damaged_manifest_is_one_sentence_with_a_way_out(batch, content):
    finished(batch, ASKED)
    (batch.folder / "out.jsonl.manifest.json").write_bytes(content)
    result = batch("in.jsonl")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "manifest" in result.stderr and "choose another output" in result.stderr


def test_the_hash_of_the_model_is_of_its_revision(batch, monkeypatch, tmp_path):
    """The same command with another --revision is another job, and --token reaches the hub."""
    asked = []

    def resolve(model, revision=None, token=None):
        if revision is None:  # by the engine of these tests
            return Path(model)
        asked.append((model, revision, token))
        (tmp_path / revision).write_text(f"weights of {revision}")
        return tmp_path / revision

    monkeypatch.setattr(fetch, "resolve", resolve)
    write_lines(batch.folder / "in.jsonl")
    assert batch("in.jsonl", "--revision", "v1", "--token", "secret").exit_code == 0
    assert asked and {each[1:] for each in asked} == {("v1", "secret")}
    begun = json.loads((batch.folder / "out.jsonl.manifest.json").read_text())
    assert begun["asked"]["model_hash"] == manifest.model_hash(tmp_path / "v1")
    assert "secret" not in json.dumps(begun)
    before = (batch.folder / "out.jsonl").read_bytes()
    result = batch("in.jsonl", "--revision", "v2", "--token", "secret")
    assert result.exit_code == 1 and "model_hash was" in result.stderr
    assert (batch.folder / "out.jsonl").read_bytes() == before


def test_a_finished_job_is_not_done_under_other_options(batch):
    finished(batch, ASKED)
    for args, says in (
        (["--exact"], "exact was false, is true"),
        (["--dtype", "bfloat16"], "engine_options"),
    ):
        result = batch("in.jsonl", *args)
        assert result.exit_code == 1 and says in result.stderr, result.stderr


def test_long_bad_values_are_not_quoted_whole(batch):
    lines = [{"custom_id": "a", "prompt": "is?", "temperature": "x" * 4_000_000}, ASKED[1]]
    write_lines(batch.folder / "in.jsonl", lines)
    result = batch("in.jsonl")
    assert result.exit_code == 1 and len(result.stderr) < 2000
    assert (batch.folder / "out.jsonl").stat().st_size < 5000
    assert text(by_id(batch.folder / "out.jsonl")["b"]) == " Yes!"


# Fuzz: whatever files hold, one sentence or a whole answer; never a traceback.

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
GOOD = b'{"custom_id": "a", "prompt": "is?"}\n{"messages": [{"role": "user", "content": "x"}], "n": 2}\n'


def mutated(draw, data: bytes) -> bytes:
    """Bytes cut, doubled, overwritten or put in anywhere."""
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = draw(st.integers(begin, min(len(data), begin + 40)))
        middle = draw(st.one_of(st.binary(max_size=12), st.just(data[begin:end] * 2), st.just(b"")))
        data = data[:begin] + middle + data[end:]
    return data


@FUZZ
@given(st.data())
def test_fuzzed_input_gives_lines_or_one_sentence(tmp_path, data):
    suffix = data.draw(st.sampled_from([".jsonl", ".csv", ".tsv", ".parquet"]))
    content = mutated(data.draw, GOOD if suffix == ".jsonl" else b'custom_id,q\n1,"is,\n?"\n2,was?\n')
    path = tmp_path / f"in{suffix}"
    path.write_bytes(content)
    try:
        for number, value in inputs.read(path, None if suffix == ".jsonl" else "q"):
            key = inputs.key_of(value, number)
            assert 0 < len(key.encode()) <= 4 * inputs.MAX_ID_CHARS
            with contextlib.suppress(BadLine):
                parse(value, number, SamplingParams(), 0)
    except ValueError as error:
        assert str(path) in str(error) or "cannot be read" in str(error)


@FUZZ
@given(st.data())
def test_fuzzed_results_lose_and_double_nothing(tmp_path, data):
    """After any damage what is kept is what was written, once; the rest is to be done again."""
    lines = [
        journal.sealed(
            json.dumps({"custom_id": f"id {i}", "line": i, "error": None, "text": "é" * i}).encode()
        )
        for i in range(1, 8)
    ]
    path = tmp_path / "out.jsonl"
    path.write_bytes(mutated(data.draw, b"".join(lines)))
    index = Index()
    for i in range(1, 8):
        index.add(f"id {i}", i)
    count, _ = journal.recover(path, index)
    kept = path.read_bytes().splitlines(keepends=True)
    assert len(kept) == len(set(kept)) == count and set(kept) <= set(lines)
    assert [i for i in range(1, 8) if index.offset(f"id {i}") is not None] == sorted(
        json.loads(line)["line"] for line in kept
    )
    index.close()


@FUZZ
@given(st.data())
def test_fuzzed_manifests_are_read_or_refused(tmp_path, data):
    output = tmp_path / "out.jsonl"
    manifest.save(output, {"asked": {"a": 1}, "engine": None, "created": 1, "finished": True})
    path = manifest.path_of(output)
    path.write_bytes(mutated(data.draw, path.read_bytes()))
    try:
        begun = manifest.load(output)
        manifest.check_same(output, begun["asked"], {"a": 1})
    except JournalError as error:
        assert str(output) in str(error)
