"""A bounded number of requests under way in one LLM, joined by more at any time.

`LLM.generate` takes a list that is complete. This is the same submission and the same step, one request at a
time, and is the only place of the batch runner that reaches into the LLM.
"""

from typing import Any

from jaxinfer.llm import LLM
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import TopK
from jaxinfer.text.prompts import encode_pair
from jaxinfer.tools.batch_runner import dumps
from jaxinfer.tools.batch_runner.tasks import CHAT, Task

ROWS_WAITING = 1  # per running row: enough that a row never waits for a line to be read


class Window:
    """With `dump`, outputs have that many alternatives of every token, as arrays."""

    def __init__(self, llm: LLM, dump: TopK | None = None) -> None:
        self._llm, self._dump = llm, dump
        self._under_way: dict[Any, Task] = {}  # the LLM's record of a request -> task
        self._num_samples = 0
        self._limit = (1 + ROWS_WAITING) * llm.engine.config.scheduler.max_num_seqs

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def has_room(self) -> bool:
        return self._num_samples < self._limit

    @property
    def num_output_tokens(self) -> int:
        """Tokens written so far by requests that are under way."""
        return sum(seq.num_output_tokens for record in self._under_way for seq in record.sequences)

    def add(self, task: Task) -> str | None:
        """Submits a task. Returns why it cannot run, None if it is under way."""
        arrays = None
        if self._dump is not None:
            if task.params.logprob_token_ids:
                return "logprob_token_ids are not reported by a job with a dump; leave them out"
            arrays = dumps.widths(self._dump, task.params, self._llm.config.vocab_size)
        try:
            if task.url == CHAT:
                (record,) = self._llm._submit_chat(task.prompt, task.params, task.template_options, arrays)
            elif task.continuation is not None:
                before, after = encode_pair(
                    self._llm.tokenizer,
                    task.prompt,  # type: ignore[arg-type]
                    task.continuation,
                    self._llm.max_model_len,
                )
                ids = before + after
                record = self._llm._add(ids, task.params, 0, lambda ids, _: (None, ids), len(before), arrays)
            else:
                (record,) = self._llm._submit([task.prompt], task.params, None, arrays)
        except (ValueError, TypeError) as error:
            return str(error)
        if record.error is not None:
            return record.error.removeprefix(f"request {record.request_id}: ")
        self._under_way[record] = task
        self._num_samples += task.params.n
        return None

    def step(self) -> list[tuple[Task, RequestOutput]]:
        """One step of the engine; the tasks that it finished."""
        self._llm._loop.step()
        finished = [record for record in self._under_way if record.finished]
        return [(self._leave(record), record.output()) for record in finished]

    def abort(self) -> None:
        """Ends what is under way."""
        for record in list(self._under_way):
            self._leave(record)

    def _leave(self, record: Any) -> Task:
        self._llm._loop.leave([record])
        task = self._under_way.pop(record)
        self._num_samples -= task.params.n
        return task
