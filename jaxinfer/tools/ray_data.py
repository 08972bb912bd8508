"""Batch inference on Ray Data: a pool of actors, each with an engine of its own (needs the extra `jaxinfer[ray]`).

    import ray
    from jaxinfer.tools import ray_data

    questions = ray.data.read_json("questions.jsonl")
    answers = ray_data.map_batches(questions, "smollm2-135m-instruct", num_workers=2)
    answers.write_parquet("answers")

Ray starts a worker that died again, and gives its batch to another: a row is answered in the output once.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tools.batch_runner import responses
from jaxinfer.tools.batch_runner.inputs import BadLine
from jaxinfer.tools.batch_runner.tasks import parse

if TYPE_CHECKING:
    import pyarrow
    import ray.data

DEFAULTS = SamplingParams(temperature=0, max_tokens=256)  # as `jaxinfer batch`


def map_batches(
    dataset: "ray.data.Dataset",
    model: str,
    defaults: SamplingParams = DEFAULTS,
    *,
    num_workers: int = 1,
    batch_size: int = 256,
    seed: int = 0,
    ray_options: Mapping[str, Any] | None = None,
    **llm_options: Any,
) -> "ray.data.Dataset":
    """Answers each row of a dataset.

    Args:
      dataset: rows as the lines of `jaxinfer batch`: custom_id with url and body, or with prompt or messages and
        sampling fields beside. What is null counts as left out. Ids must differ; here nobody checks that.
      model: what `LLM` takes; a folder or file must be there on every node.
      defaults: of sampling fields that a row leaves out.
      num_workers: actors, each with one engine. Ray counts them as using no CPU where nothing else is said, so
        that they leave room for the tasks that read and write: two actors of one CPU each on two CPUs would wait
        for these for ever. Their engines share the CPUs.
      batch_size: rows that an actor gets at a time. Towards the end of them rows of its engine stand empty, so
        it should be several times `max_num_seqs`.
      seed: of rows that name none: a row draws from hash64(seed, custom_id), on whichever worker.
      ray_options: of `Dataset.map_batches`, such as {"num_gpus": 1}: an actor on a GPU needs that.
      llm_options: of `LLM`.

    Returns:
      A dataset of custom_id, text (of the first sample; null where there is none), error (null if there is none)
      and record: JSON text in OpenAI's batch output form, as `jaxinfer batch` writes it. Rows that cannot be
      answered have an error and disturb no others.
    """
    import ray.data

    return dataset.map_batches(
        Worker,
        fn_constructor_args=(model, defaults, seed, llm_options),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=num_workers),
        **({"num_cpus": 0} | dict(ray_options or {})),
    )


class Worker:
    """What runs in an actor."""

    def __init__(
        self, model: str, defaults: SamplingParams, seed: int, llm_options: Mapping[str, Any]
    ) -> None:
        from jaxinfer.llm import LLM  # only here is jax needed

        self._model, self._defaults, self._seed = model, defaults, seed
        self._llm = LLM(model, **llm_options)

    def __call__(self, batch: "pyarrow.Table") -> "pyarrow.Table":
        import pyarrow

        columns = [(name, pyarrow.string()) for name in ("custom_id", "text", "error", "record")]
        return pyarrow.Table.from_pylist(self.answer(batch.to_pylist()), pyarrow.schema(columns))

    def answer(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The results of rows, in their order."""
        from jaxinfer.tools.batch_runner.window import Window

        window, results = Window(self._llm), dict[int, dict[str, Any]]()
        left = list(enumerate(rows))[::-1]
        try:
            while left or len(window):
                if left and window.has_room:
                    i, row = left.pop()
                    try:
                        task = parse(_value(row), i, self._defaults, self._seed)
                        refusal = window.add(task)
                        if refusal is not None:
                            raise BadLine("refused", refusal)
                    except BadLine as error:
                        key = row.get("custom_id")
                        record = responses.failure(str(key or ""), i, error.code, str(error))
                        results[i] = _result(record)
                else:
                    for task, answer in window.step():
                        if answer.error is not None:
                            key = task.custom_id
                            record = responses.failure(key, task.line, "failed", answer.error)
                            results[task.line] = _result(record)
                            continue
                        # `created` is 0, so that a batch that is done again gives the same.
                        record = responses.success(
                            task, answer, self._llm.tokenizer, model=self._model, created=0
                        )
                        results[task.line] = _result(record)
        finally:
            window.abort()
        return [results[i] for i in range(len(rows))]


def _value(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a line: a column that others have is null here, an id may be a number."""
    present = _present(row)
    if "custom_id" not in present:
        raise BadLine("missing_custom_id", "the row has no custom_id")
    return present | {"custom_id": str(present["custom_id"])}


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _present(each) for name, each in value.items() if each is not None}
    return [_present(each) for each in value] if isinstance(value, list) else value


def _result(record: dict[str, Any]) -> dict[str, Any]:
    del record["line"]  # of a batch, which says nothing
    choices = record["response"]["body"].get("choices")
    text = None
    if choices:
        text = choices[0]["text"] if "text" in choices[0] else choices[0]["message"]["content"]
    error = record["error"] and record["error"]["message"]
    return {
        "custom_id": record["custom_id"],
        "text": text,
        "error": error,
        "record": json.dumps(record, ensure_ascii=False),
    }
