"""Where the results of a run go: to the output, in order if asked; failures and dumps to their own files."""

import contextlib
from typing import TYPE_CHECKING, Any

from jaxinfer.outputs import RequestOutput
from jaxinfer.tools.batch_runner import dumps, responses
from jaxinfer.tools.batch_runner.journal import Journal, JournalError
from jaxinfer.tools.batch_runner.ordered import OrderedOutput, early_path, set_aside
from jaxinfer.tools.batch_runner.progress import Totals
from jaxinfer.tools.batch_runner.tasks import Task

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.tools.batch_runner.runner import Job

MAX_MESSAGE = 500  # characters of what is said of a failed line


class Results:
    def __init__(self, job: "Job", llm: "LLM", totals: Totals, created: int, first_left: int) -> None:
        """`first_left` is the first line without a result. Raises JournalError if a file cannot be written."""
        self._job, self._llm, self._totals, self._created = job, llm, totals, created
        self._ready: list[tuple[Task, RequestOutput]] = []
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            if job.ordered:
                set_aside(job.output, first_left)
            self._output = stack.enter_context(Journal(job.output))
            self._errors = None if job.errors is None else stack.enter_context(Journal(job.errors))
            self._ordered: OrderedOutput | None = None
            if job.ordered:
                self._ordered = OrderedOutput(self._output, early_path(job.output))
                stack.callback(self._ordered.close)
            self._dump = None if job.dump is None else dumps.Dump(job.output, job.dump)
            self._stack = stack.pop_all()

    def __enter__(self) -> "Results":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    @property
    def full(self) -> bool:
        """Whether so much waits for an earlier line that no more should be read."""
        return self._ordered is not None and self._ordered.full

    def expect(self, line: int) -> None:
        if self._ordered is not None:
            self._ordered.expect(line)

    def fail(self, line: int, key: str, code: str, message: str) -> None:
        """Raises JournalError if the job has too many failures."""
        message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        record = responses.line_of(responses.failure(key, line, code, message))
        if self._errors is not None:
            self._errors.append(record)
        self._put(line, record if self._errors is None else None)
        totals, most = self._totals, self._job.max_failures
        totals.fail(line, code, message)
        if most is not None and totals.num_failed > most:
            raise JournalError(f"more than {most} lines failed, the last one: line {line}: {message}")

    def add(self, task: Task, answer: RequestOutput) -> None:
        """What came back for a line; `write` has it on the disk. Raises as `fail`."""
        if answer.error is not None:
            self.fail(task.line, task.custom_id, "failed", answer.error)
        elif self._dump is None:
            self._deliver(task, answer)
        else:
            self._dump.add(task, answer)

    def write(self, *, rest: bool) -> None:
        """Writes a shard of the dump if it is large enough, or whatever there is with `rest`."""
        if self._dump is not None:
            for task, answer, place in self._dump.take(rest=rest):
                self._deliver(task, dumps.for_answer(answer, task.params), place)

    def end(self) -> None:
        """All lines have their results."""
        if self._ordered is not None:
            self._ordered.end()

    def _deliver(self, task: Task, answer: RequestOutput, place: dict[str, Any] | None = None) -> None:
        record = responses.success(
            task, answer, self._llm.tokenizer, model=self._job.model, created=self._created
        )
        if place is not None:
            record["dump"] = place
        self._put(task.line, responses.line_of(record))
        self._totals.take(answer)

    def _put(self, line: int, record: bytes | None) -> None:
        if self._ordered is not None:
            self._ordered.put(line, record)
        elif record is not None:
            self._output.append(record)
