"""`jaxinfer.tools.ray_data`: rows as the batch job answers them; a worker that is killed loses and repeats nothing."""

import json
import os
import signal

import pyarrow
import pytest
from batch_jobs import mixed, write_model

from jaxinfer.programs.buckets import Buckets
from jaxinfer.request import hash64
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tools import ray_data

# Few programs: they take longer to compile than these rows to run.
OPTIONS = dict(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    decode_steps=1,
    num_pages=64,
    max_model_len=160,
    buckets=Buckets(((16, 4),), decode=(4,), decode_steps=1, multi_step=(4,)),
)
DEFAULTS = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("ray") / "planted").path


def with_all_columns(rows):
    """As a dataset has them: what only some rows have is null in the others."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def check_answers(rows, lines):
    """The texts that the planted model gives to `batch_jobs.mixed`, and the documented seeds."""
    for line in lines:
        row = rows[line["custom_id"]]
        assert row["error"] is None
        record = json.loads(row["record"])
        assert record["seed"] == hash64(3, line["custom_id"])
        if "messages" in line:
            assert row["text"] == "Dublin."
        elif line["prompt"].endswith("?"):
            assert row["text"] == " Yes!"
        elif line["prompt"].endswith("("):
            assert row["text"] == (")(" * 8)[: line["max_tokens"]]
        else:
            assert record["response"]["body"]["usage"]["completion_tokens"] <= line["max_tokens"]


def test_a_killed_worker_loses_and_repeats_nothing(model, tmp_path, monkeypatch):
    """Two workers; the first that has answered row 9 dies before it hands its batch over.

    It comes first: Ray forks, and the other test starts threads of jax in this process.
    """
    ray = pytest.importorskip("ray", reason="needs the extra jaxinfer[ray]; `make test-ray` runs it")
    killed, pids, output = tmp_path / "killed", tmp_path / "pids", tmp_path / "answers"
    pids.mkdir()

    class DyingWorker(ray_data.Worker):
        def answer(self, rows):
            answers = super().answer(rows)
            (pids / str(os.getpid())).touch()
            if any(row["custom_id"] == "id 9" for row in rows) and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return answers

    monkeypatch.setattr(ray_data, "Worker", DyingWorker)
    lines = mixed(48)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        dataset = ray.data.from_items(with_all_columns(lines), override_num_blocks=12)
        answers = ray_data.map_batches(
            dataset, model, DEFAULTS, num_workers=2, batch_size=4, seed=3, **OPTIONS
        )
        answers.write_json(str(output))
    finally:
        ray.shutdown()
    rows = [json.loads(line) for path in output.glob("*.json") for line in path.open()]
    assert killed.exists() and len(list(pids.iterdir())) >= 3  # two workers, and the one started again
    assert sorted(row["custom_id"] for row in rows) == sorted(line["custom_id"] for line in lines)
    check_answers({row["custom_id"]: row for row in rows}, lines)


def test_rows_are_answered_alone(model):
    """A worker without Ray: columns that are null in a row, numbers as ids, rows that cannot be answered."""
    body = {"prompt": None, "messages": [{"role": "user", "content": "?"}], "max_tokens": 3}
    rows = [
        {"custom_id": "a", "prompt": "ok?"},
        {"prompt": "no id?"},
        {"custom_id": "bad", "prompt": "ok?", "temperature": -1.0},
        {"custom_id": "long", "prompt": "x" * 1000},
        {"custom_id": "b", "url": "/v1/chat/completions", "body": body},
        *mixed(8),
    ]
    worker = ray_data.Worker(model, DEFAULTS, 3, OPTIONS)
    answers = worker(pyarrow.Table.from_pylist(with_all_columns(rows))).to_pylist()
    assert [answer["custom_id"] for answer in answers[:5]] == ["a", "", "bad", "long", "b"]
    assert [answer["text"] for answer in answers[:5]] == [" Yes!", None, None, None, "Dub"]
    assert answers[1]["error"] == "the row has no custom_id"
    assert "temperature=-1.0" in answers[2]["error"] and "does not fit" in answers[3]["error"]
    assert json.loads(answers[2]["record"])["response"]["status_code"] == 400
    check_answers({answer["custom_id"]: answer for answer in answers}, mixed(8))
    numbered = worker(pyarrow.Table.from_pylist([{"custom_id": 7, "prompt": "?"}])).to_pylist()
    assert numbered[0]["custom_id"] == "7"
