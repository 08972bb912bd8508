"""`--dump-topk` and `--dump`: exact arrays for every line, each once, whatever happens in between."""

import contextlib
import json
import random
import re
from pathlib import Path

import numpy as np
import planted
import pytest
import safetensors
from batch_jobs import OPTIONS, VOCAB, by_id, cached_llm, ids_of, mixed, text, write_model
from typer.testing import CliRunner

import jaxinfer.llm
from jaxinfer.cli import app
from jaxinfer.request import TopK
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tools.batch_runner import dumps, runner
from jaxinfer.tools.batch_runner.window import Window

TOP = TopK(20, 20)
TOLERANCE = 1e-4  # float32 logits of at most 30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("dumps") / "planted")


@pytest.fixture
def run(model, tmp_path):
    """Runs a job in a folder of its own; `lines` are kept between runs."""

    def run(lines=None, dump=TOP, output="out.jsonl"):
        if lines is not None:
            (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
        names = (name[2:].replace("-", "_") for name in OPTIONS[:-2:2])
        options = dict(zip(names, map(int, OPTIONS[1:-2:2]), strict=True))
        job = runner.Job(
            input=tmp_path / "in.jsonl",
            output=tmp_path / output,
            model="planted",
            model_hash="0",
            defaults=SamplingParams(temperature=0, max_tokens=8),
            dump=dump,
        )
        totals = runner.Totals()
        llm = cached_llm(model.path, tuple(sorted(options.items())))
        runner.run(job, lambda: contextlib.nullcontext(llm), totals)
        return totals

    run.folder = tmp_path
    return run


def read(folder) -> list[tuple[str, dict, list[dict]]]:
    """(custom_id, arrays of the prompt, arrays of each sample) of all shards, by the documented format alone."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, "numpy") as shard:
            ids = json.loads(shard.metadata()["custom_ids"])
            arrays = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        assert len(ids) == len(arrays["lines"])

        def part(kind, i, arrays=arrays):
            begin, end = arrays[f"{kind}_offsets"][i : i + 2]
            names = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")
            return {name: arrays[f"{kind}_{name}"][begin:end] for name in names}

        for i, custom_id in enumerate(ids):
            prompt = part("prompt", i) if "prompt_offsets" in arrays else {}
            samples = []
            if "output_offsets" in arrays:
                samples = [part("output", s) for s in np.flatnonzero(arrays["output_results"] == i)]
            found.append((custom_id, prompt, samples))
    return found


def check(part, table, before, first=0):
    """The arrays of tokens that follow `before` (None: the first has no logprob) say what the table says."""
    tokens = part["token_ids"].tolist()
    for i, token in enumerate(tokens):
        last = before if i == 0 else tokens[i - 1]
        if last is None or i < first:
            assert np.isnan(part["logprobs"][i]) and part["ranks"][i] == 0
            assert (part["top_ids"][i] == -1).all() and np.isnan(part["top_logprobs"][i]).all()
            continue
        exact = planted.next_logprobs(table, last)
        best = np.argsort(-exact, kind="stable")[: part["top_ids"].shape[1]]
        assert part["top_ids"][i].tolist() == best.tolist()
        np.testing.assert_allclose(part["top_logprobs"][i], exact[best], atol=TOLERANCE)
        assert abs(part["logprobs"][i] - exact[token]) <= TOLERANCE
        assert part["ranks"][i] == 1 + (exact > exact[token]).sum()


def test_every_token_of_every_line(run, model):
    lines = [
        *mixed(24),
        {"custom_id": "two", "prompt": "a b", "n": 2, "temperature": 1.0, "max_tokens": 5},
        {"custom_id": "stopped", "prompt": "ok?", "stop": ["e"]},
        {"custom_id": "scored", "prompt": "ok?", "max_tokens": 0},
        {"custom_id": "pair", "prompt": "ok?", "continuation": " no"},
        {"custom_id": "own", "prompt": "ok?", "echo": True, "logprobs": 2},
        {"custom_id": "bad", "prompt": "a", "max_tokens": -1},
        {"custom_id": "labels", "prompt": "a", "logprob_token_ids": [3]},
    ]
    totals = run(lines)
    assert totals.failures == {"invalid_value": 1, "refused": 1}
    found = {custom_id: parts for custom_id, *parts in read(run.folder / "out.jsonl.dump")}
    records = by_id(run.folder / "out.jsonl")
    assert set(found) == {line["custom_id"] for line in lines} - {"bad", "labels"}
    for custom_id, (prompt, samples) in found.items():
        check(prompt, model.table, None, first=3 if custom_id == "pair" else 0)
        usage = records[custom_id]["response"]["body"]["usage"]
        assert len(prompt["token_ids"]) == usage["prompt_tokens"]
        assert sum(len(sample["token_ids"]) for sample in samples) == usage["completion_tokens"]
        for sample in samples:
            check(sample, model.table, int(prompt["token_ids"][-1]))
    end = model.tokenizer.token_to_id("<|im_end|>")
    assert [part["token_ids"].tolist() for part in found["stopped"][1]] == [ids_of(model.tokenizer, " Ye")]
    assert found["own"][1][0]["token_ids"].tolist() == [*ids_of(model.tokenizer, " Yes!"), end]
    assert len(found["two"][1]) == 2 and len(found["scored"][1][0]["token_ids"]) == 0

    # A line's answer is what it is without a dump.
    run(dump=None, output="plain.jsonl")
    plain = by_id(run.folder / "plain.jsonl")
    for custom_id in found:
        ours, theirs = (each[custom_id]["response"]["body"] for each in (records, plain))
        assert ours.pop("created") and theirs.pop("created")
        if custom_id in ("own", "pair"):  # logprobs of programs of other widths
            ours, theirs = (json.dumps(rounded(body)) for body in (ours, theirs))
        assert ours == theirs, custom_id


def rounded(value):
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("dump", [TopK(0, None), TopK(None, 3)])
def test_prompts_or_outputs_alone(run, model, dump):
    run(mixed(4), dump)
    for _, prompt, samples in read(run.folder / "out.jsonl.dump"):
        assert bool(prompt) == (dump.prompt is not None) and bool(samples) == (dump.output is not None)
        if prompt:
            assert prompt["top_ids"].shape[1] == 0
            check(prompt, model.table, None)
        for sample in samples:
            assert sample["top_ids"].shape[1] == 3
            rest = {name: array[1:] for name, array in sample.items()}
            check(rest, model.table, int(sample["token_ids"][0]))


def test_a_job_that_stops_anywhere_dumps_every_line_once(run, model, monkeypatch):
    """Also with a shard whose records are cut off, one that is damaged, and one that is gone."""
    monkeypatch.setattr(dumps, "SHARD_BYTES", 2000)
    lines, chance, step = mixed(40), random.Random(2), Window.step
    folder, output = run.folder / "out.jsonl.dump", run.folder / "out.jsonl"
    (run.folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for harm in ("records", "damage", "gone", "none"):
        countdown = [chance.randrange(12, 25)]

        def failing(self, countdown=countdown):
            countdown[0] -= 1
            if countdown[0] == 0:
                raise RuntimeError("the device is gone")
            return step(self)

        monkeypatch.setattr(Window, "step", failing)
        with pytest.raises(RuntimeError):
            run()
        shards = sorted(folder.glob("*.safetensors"))
        assert len(shards) >= 2
        for name, record in by_id(output).items():
            place = record["dump"]
            with safetensors.safe_open(run.folder / place["file"], "numpy") as shard:
                assert json.loads(shard.metadata()["custom_ids"])[place["result"]] == name
        if harm == "records":  # a kill between a shard and the last of its records
            kept = output.read_bytes().splitlines(keepends=True)
            output.write_bytes(b"".join(kept[:-1]) + kept[-1][:20])
        elif harm == "damage":
            shards[0].write_bytes(shards[0].read_bytes()[:-10])
        elif harm == "gone":
            shards[1].unlink()
    monkeypatch.setattr(Window, "step", step)
    run()
    found = read(folder)
    assert sorted(custom_id for custom_id, *_ in found) == sorted(line["custom_id"] for line in lines)
    assert set(by_id(output)) == {line["custom_id"] for line in lines}
    for _, prompt, samples in found:
        check(prompt, model.table, None)
        check(samples[0], model.table, int(prompt["token_ids"][-1]))


def test_an_interrupted_job_writes_what_is_finished(run, monkeypatch, model):
    steps, step = [], Window.step
    monkeypatch.setattr(Window, "step", lambda self: steps.append(0) or step(self))
    (run.folder / "in.jsonl").write_text("\n".join(map(json.dumps, mixed(20))))
    original = runner.run

    def interrupted(*args, **options):
        return original(*args, **options, interrupted=lambda: len(steps) >= 15)

    monkeypatch.setattr(runner, "run", interrupted)
    totals = run()
    assert totals.num_left and totals.num_done == len(read(run.folder / "out.jsonl.dump")) > 0
    monkeypatch.setattr(runner, "run", original)
    assert run().num_before == totals.num_done
    assert len(read(run.folder / "out.jsonl.dump")) == len(by_id(run.folder / "out.jsonl")) == 20


def test_a_dump_wider_than_the_vocabulary_is_refused(run):
    with pytest.raises(ValueError, match=f"a dump of 321 tokens .* vocabulary of {VOCAB}"):
        run(mixed(1), TopK(321, None))


def test_the_command(run, model, monkeypatch):
    """--dump moves what --logprobs and --prompt-logprobs ask for out of the lines; --dump-topk does not."""
    llm = lambda path, **options: contextlib.nullcontext(cached_llm(path, tuple(sorted(options.items()))))  # noqa: E731
    monkeypatch.setattr(jaxinfer.llm, "LLM", llm)
    (run.folder / "in.jsonl").write_text('{"custom_id": "a", "prompt": "ok?"}\n')

    def batch(output, *args):
        command = ["batch", run.folder / "in.jsonl", "-o", run.folder / output, "-m", model.path, *OPTIONS]
        return CliRunner().invoke(app, [str(word) for word in (*command, *args)])

    assert batch("1.jsonl", "--dump", "--logprobs", "2").exit_code == 0
    [(_, prompt, [sample])] = read(run.folder / "1.jsonl.dump")
    assert prompt == {} and sample["top_ids"].shape == (6, 2)
    record = by_id(run.folder / "1.jsonl")["a"]
    assert text(record) == " Yes!" and record["response"]["body"]["choices"][0]["logprobs"] is None

    assert batch("2.jsonl", "--dump-topk", "40", "--logprobs", "2").exit_code == 0
    [(_, prompt, [sample])] = read(run.folder / "2.jsonl.dump")
    assert prompt["top_ids"].shape == (3, 40) and sample["top_ids"].shape == (6, 40)
    logprobs = by_id(run.folder / "2.jsonl")["a"]["response"]["body"]["choices"][0]["logprobs"]
    assert len(logprobs["top_logprobs"][0]) == 2

    for args in (["--dump"], ["--dump", "--logprobs", "-1"], ["--dump", "--dump-topk", "3"]):
        assert batch("3.jsonl", *args).exit_code == 2
    result = batch("1.jsonl", "--dump", "--logprobs", "3")
    assert result.exit_code == 1 and "dump.output was 2, is 3" in result.stderr
    (run.folder / "4.jsonl.dump").mkdir()
    assert "is left of another job" in batch("4.jsonl", "--dump-topk", "1").stderr
    assert batch("4.jsonl", "--dump-topk", "1", "--overwrite").exit_code == 0


def test_the_reader_of_the_page_on_batch_jobs(run, model, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "batch.md").read_text()
    (reader,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "safe_open" in code]
    lines = [{"custom_id": f"{i}", "prompt": "is ok"[i:], "max_tokens": 0} for i in range(3)]
    run(lines, TopK(5, 5), "scored.jsonl")
    monkeypatch.chdir(run.folder)
    exec(reader, {})
    expected = {f"{i} {ids_of(model.tokenizer, 'is ok'[i:])} {(5 - i, 5)}" for i in range(3)}
    assert set(capsys.readouterr().out.splitlines()) == expected
