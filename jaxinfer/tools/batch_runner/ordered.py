"""Results in the order of the input: those that finish early wait on the disk, and not without bound."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxinfer.tools.batch_runner.index import Index, temporary_database
from jaxinfer.tools.batch_runner.journal import Journal, load_record, sync_folder, whole_lines

EARLY_BYTES = 64 * 2**20  # of results that wait at which no more lines are read
ROWS_PER_MOVE = 256
END = 2**63 - 1  # after every line


class OrderedOutput:
    """Appends results to an output in the order of their lines.

    What finishes before an earlier line is appended to OUT.early meanwhile, so that a kill does not lose it, and
    moves on once the lines before it are there. What is in memory are the numbers of lines under way.
    """

    def __init__(self, output: Journal, early: Path) -> None:
        self._output, self._early, self._path = output, Journal(early), early
        self._file = early.open("rb")
        self._waiting = temporary_database()
        self._waiting.execute("CREATE TABLE early (line INTEGER PRIMARY KEY, offset INT, length INT)")
        for offset, raw in whole_lines(self._file):
            self._note(load_record(raw)["line"], offset, len(raw))  # type: ignore[index]
        self._own = self._early.size  # from here on this run writes
        self._num_early = self._early_bytes = 0  # of this run, since none of them waited
        self._pending: dict[int, None] = {}  # lines that were read and have no result yet, ascending
        self._read_to = 0

    @property
    def full(self) -> bool:
        """Whether to read no more lines while some are under way."""
        return self._early_bytes >= EARLY_BYTES

    def expect(self, line: int) -> None:
        """A line of the input has been read; the lines between it and the one before have their results."""
        self._pending[line] = None
        self._read_to = line
        self._move()

    def put(self, line: int, record: bytes | None) -> None:
        """The result of a line that was expected; None if it belongs elsewhere."""
        if record is not None and line == next(iter(self._pending)):
            self._output.append(record)
        elif record is not None:
            self._note(line, self._early.size, len(record))
            self._early.append(record)
            self._num_early += 1
            self._early_bytes += len(record)
        del self._pending[line]
        self._move()

    def end(self) -> None:
        """The input has no more lines, and none is under way."""
        self._read_to = END
        self._move()

    def close(self) -> None:
        is_done = not self._is_waiting()
        self._waiting.close()
        self._file.close()
        self._early.close()
        if is_done:
            self._path.unlink(missing_ok=True)

    def _note(self, line: int, offset: int, length: int) -> None:
        self._waiting.execute("INSERT INTO early VALUES (?, ?, ?)", (line, offset, length))

    def _is_waiting(self) -> bool:
        return self._waiting.execute("SELECT 1 FROM early LIMIT 1").fetchone() is not None

    def _move(self) -> None:
        """Moves on what waits for no line any more."""
        last = next(iter(self._pending), self._read_to + 1) - 1
        query = "SELECT line, offset, length FROM early WHERE line <= ? ORDER BY line LIMIT ?"
        while rows := self._waiting.execute(query, (last, ROWS_PER_MOVE)).fetchall():
            for _, offset, length in rows:
                self._output.append(os.pread(self._file.fileno(), length, offset))
                self._num_early -= offset >= self._own
            self._waiting.execute("DELETE FROM early WHERE line <= ?", (rows[-1][0],))
        if not self._num_early:
            self._early_bytes = 0
            if self._early.size and not self._is_waiting():
                self._output.sync()
                self._early.clear()
                self._own = 0


def early_path(output: Path) -> Path:
    return output.with_name(output.name + ".early")


def absorb(
    output: Path, index: Index, is_whole: Callable[[dict[str, Any]], bool] = lambda record: True
) -> int:
    """Appends what waits beside an output that a run has left, in whatever order; returns how many results.

    It is for an output that `recover` has seen. Raises JournalError if it cannot be written; nothing is lost then.
    """
    early = early_path(output)
    if not early.exists():
        return 0
    count = 0
    with Journal(output) as journal, early.open("rb") as file:
        for _, line in whole_lines(file):
            record = load_record(line)
            key = record and record["error"] is None and is_whole(record) and record["custom_id"]
            if key and key in index and index.offset(key) is None:
                index.claim(key, journal.size)
                journal.append(line)
                count += 1
    early.unlink()
    return count


def set_aside(output: Path, first_left: int) -> None:
    """Lets results wait that stand behind a line without one, or in another order; `first_left` is that line."""
    last = last_in_order(output)
    if last is None or last > first_left:
        output.replace(early_path(output))
        sync_folder(output)


def last_in_order(path: Path) -> int | None:
    """The line of the last record (0 if there is none), None if the records are not in the order of the input."""
    last = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            record = load_record(line)
            number = record["line"] if record is not None else 0
            if number < last:
                return None
            last = number
    return last
