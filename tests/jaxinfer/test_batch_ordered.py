"""Results in the order of the input: nothing lost or twice, whatever finishes when, and not held without bound."""

import contextlib
import json
import random

import pytest
from batch_jobs import OPTIONS, ROWS, cached_llm, mixed, write_model

from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tools.batch_runner import journal, manifest, ordered, runner
from jaxinfer.tools.batch_runner.index import Index
from jaxinfer.tools.batch_runner.journal import Journal
from jaxinfer.tools.batch_runner.ordered import OrderedOutput, absorb, early_path, set_aside
from jaxinfer.tools.batch_runner.window import Window


def record(line: int, error=None) -> bytes:
    return journal.sealed(json.dumps({"custom_id": f"id {line}", "line": line, "error": error}).encode())


def lines_of(path) -> list[int]:
    return [json.loads(line)["line"] for line in path.read_bytes().splitlines()] if path.exists() else []


def run(path, rest: list[int], chance: random.Random, stop_after: int | None = None) -> None:
    """Finishes lines of `rest` in random order, up to 5 of them under way, as the runner does."""
    index = Index()
    for line in range(1, 200):
        index.add(f"id {line}", line)
    journal.recover(path, index)
    absorb(path, index)
    left = [line for line in rest if index.offset(f"id {line}") is None]
    set_aside(path, left[0] if left else 0)
    with Journal(path) as output:
        out = OrderedOutput(output, early_path(path))
        under_way: list[int] = []
        finished = 0
        while left or under_way:
            if left and len(under_way) < 5:
                under_way.append(left.pop(0))
                out.expect(under_way[-1])
            else:
                line = under_way.pop(chance.randrange(len(under_way)))
                out.put(line, record(line))
                finished += 1
            written = lines_of(path)
            assert written == sorted(written)
            if finished == stop_after:
                break
        else:
            out.end()
        out.close()
    index.close()


def test_any_order_of_finishing_any_kills(tmp_path):
    """Lines of a shard (gaps in their numbers), stopped at random moments and with torn last lines."""
    chance = random.Random(0)
    for trial in range(8):
        path = tmp_path / f"{trial}.jsonl"
        mine = sorted(chance.sample(range(1, 200), 60))
        for _ in range(chance.randrange(4)):
            run(path, mine, chance, stop_after=chance.randrange(1, 20))
            done = set(lines_of(path)) | set(lines_of(early_path(path)))
            if chance.random() < 0.5:
                for part in (path, early_path(path)):
                    with part.open("ab") as file:
                        file.write(record(mine[-1])[:9])
            assert done <= set(mine)
        run(path, mine, chance)
        assert lines_of(path) == mine
        assert not early_path(path).exists()


def test_what_was_early_survives_a_kill(tmp_path):
    """Ten lines are finished behind one that is not: after the kill only that one is done again."""
    path = tmp_path / "out.jsonl"
    with Journal(path) as output:
        out = OrderedOutput(output, early_path(path))
        for line in range(1, 12):
            out.expect(line)
        for line in range(2, 12):
            out.put(line, record(line))
        assert lines_of(path) == []
        out.close()
    index = Index()
    for line in range(1, 12):
        index.add(f"id {line}", line)
    assert journal.recover(path, index)[0] + absorb(path, index) == 10
    assert sorted(lines_of(path)) == list(range(2, 12))
    assert [line for line in range(1, 12) if index.offset(f"id {line}") is None] == [1]


def test_a_failed_line_that_succeeds_later_takes_its_place(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"".join([record(1), record(2, {"code": "refused"}), record(3), record(4)]))
    run(path, [1, 2, 3, 4, 5], random.Random(0))
    assert lines_of(path) == [1, 2, 3, 4, 5]


def test_the_file_of_early_results_is_emptied(tmp_path, monkeypatch):
    """It asks for a pause at its limit, and begins anew once what is under way has ended."""
    monkeypatch.setattr(ordered, "EARLY_BYTES", 10 * len(record(10)))
    path = tmp_path / "out.jsonl"
    with Journal(path) as output:
        out = OrderedOutput(output, early_path(path))
        for line in range(10, 30):
            out.expect(line)
        for line in range(11, 21):
            assert not out.full
            out.put(line, record(line))
        assert out.full
        out.put(10, record(10))
        assert not out.full and early_path(path).stat().st_size == 0
        for line in range(29, 20, -1):
            out.put(line, record(line))
        out.end()
        out.close()
    assert lines_of(path) == list(range(10, 30))
    assert not early_path(path).exists()


# With a model


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """(a function that runs an ordered job of 40 mixed lines, the records of one that ran through)."""
    folder = tmp_path_factory.mktemp("ordered")
    options = dict(zip((name[2:].replace("-", "_") for name in OPTIONS[::2]), OPTIONS[1::2], strict=True))
    options = {name: int(value) for name, value in options.items() if name != "max_tokens"}
    model = write_model(folder / "planted")
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, mixed(40))))

    def run(output, ordered=True):
        job = runner.Job(
            input=folder / "in.jsonl",
            output=output,
            model="planted",
            model_hash="0",
            defaults=SamplingParams(temperature=0, max_tokens=8),
            ordered=ordered,
        )
        totals = runner.Totals()
        llm = cached_llm(model.path, tuple(sorted(options.items())))
        runner.run(job, lambda: contextlib.nullcontext(llm), totals)
        return totals

    run(folder / "whole.jsonl")
    return run, folder / "whole.jsonl"


def bodies(path) -> list[dict]:
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    for each in found:
        del each["response"]["body"]["created"], each["checksum"]
    return found


def test_a_job_writes_in_order_as_it_goes(job, tmp_path, monkeypatch):
    """Not at its end: after each step the file is a beginning of what it will be."""
    run, whole = job
    assert [each["line"] for each in bodies(whole)] == list(range(1, 41))
    output, step, sizes = tmp_path / "out.jsonl", Window.step, []

    def watched(self):
        sizes.append(len(lines_of(output)))
        assert lines_of(output) == list(range(1, sizes[-1] + 1))
        return step(self)

    monkeypatch.setattr(Window, "step", watched)
    run(output)
    assert bodies(output) == bodies(whole)
    assert sum(0 < size < 40 for size in sizes) > 5


def test_a_job_that_stops_anywhere_goes_on_in_order(job, tmp_path, monkeypatch):
    run, whole = job
    chance, step = random.Random(1), Window.step
    output = tmp_path / "out.jsonl"
    for _ in range(4):
        countdown = [chance.randrange(3, 25)]

        def failing(self, countdown=countdown):
            countdown[0] -= 1
            if countdown[0] == 0:
                raise RuntimeError("the device is gone")
            return step(self)

        monkeypatch.setattr(Window, "step", failing)
        with pytest.raises(RuntimeError):
            run(output)
    monkeypatch.setattr(Window, "step", step)
    run(output)
    assert bodies(output) == bodies(whole)
    assert manifest.load(output)["finished"]


def test_ordered_and_not_can_change_between_runs(job, tmp_path, monkeypatch):
    run, whole = job
    output, step, steps = tmp_path / "out.jsonl", Window.step, []

    def failing(self):
        steps.append(0)
        if len(steps) % 15 == 0:
            raise RuntimeError
        return step(self)

    monkeypatch.setattr(Window, "step", failing)
    for is_ordered in (True, False, True):
        with pytest.raises(RuntimeError):
            run(output, ordered=is_ordered)
    monkeypatch.setattr(Window, "step", step)
    run(output, ordered=False)
    assert sorted(lines_of(output)) == list(range(1, 41)) and not early_path(output).exists()
    totals = run(output)
    assert totals.num_before == 40
    assert bodies(output) == bodies(whole)


def test_a_long_line_holds_back_a_bounded_number(job, tmp_path, monkeypatch):
    run, whole = job
    monkeypatch.setattr(ordered, "EARLY_BYTES", 1)
    output, add, early = tmp_path / "out.jsonl", Window.add, []

    def counted(self, task):
        early.append(len(lines_of(early_path(output))))
        return add(self, task)

    monkeypatch.setattr(Window, "add", counted)
    run(output)
    assert bodies(output) == bodies(whole)
    assert max(early) <= 2 * ROWS
