"""The output file: lines appended whole, synced in groups, repaired after a kill, held by one process."""

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxinfer.tools.batch_runner.index import Index, temporary_database

SYNC_LINES = 256  # at most so many lines, and
SYNC_SECONDS = 0.5  # what was written in this time (the sync itself takes more) are lost to a power cut


class JournalError(RuntimeError):
    """The output cannot be written, or is not what it should be; one sentence."""


class Journal:
    """Appends lines to a file. What `append` has returned for survives the death of this process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise JournalError(f"cannot write {path}: {error.strerror}") from None
        sync_folder(path)
        self._size = os.fstat(self._fd).st_size
        self._num_unsynced = 0
        self._failure: OSError | None = None
        self._closing = threading.Event()
        self._syncer = threading.Thread(target=self._sync_often, daemon=True)
        self._syncer.start()

    @property
    def size(self) -> int:
        """Bytes of the file; the next line begins there."""
        return self._size

    def clear(self) -> None:
        """Empties the file."""
        os.ftruncate(self._fd, 0)
        self._size = 0

    def append(self, line: bytes) -> None:
        """Adds one line, its newline included. Raises JournalError, the file ending with a whole line."""
        try:
            if self._failure is not None:
                raise self._failure
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self._size += len(line)
            self._num_unsynced += 1
            if self._num_unsynced >= SYNC_LINES:
                self.sync()
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise JournalError(
                f"cannot write {self._path}: {error.strerror}; what is in it is whole, and the same command "
                "goes on from there"
            ) from None

    def sync(self) -> None:
        # The count is reset first: a line that is written meanwhile is counted, and perhaps synced twice.
        if self._num_unsynced:
            self._num_unsynced = 0
            os.fsync(self._fd)

    def _sync_often(self) -> None:
        """In a thread of its own, since a step of the engine may compile for minutes."""
        while not self._closing.wait(SYNC_SECONDS):
            try:
                self.sync()
            except OSError as error:
                self._failure = error
                return

    def close(self) -> None:
        """Raises JournalError if the last lines may not be on the disk."""
        self._closing.set()
        self._syncer.join()
        try:
            if self._failure is not None:
                raise self._failure
            self.sync()
        except OSError as error:
            raise JournalError(f"cannot write {self._path}: {error.strerror}") from None
        finally:
            os.close(self._fd)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def whole_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(offset, line with its newline) of each line that was written to its end."""
    offset = 0
    for line in file:
        if line.endswith(b"\n"):
            yield offset, line
        offset += len(line)


def load_record(line: bytes) -> dict[str, Any] | None:
    """A line of an output file, None if it is damaged."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and "error" in record and isinstance(record.get("custom_id"), str)
    return record if is_record else None


def recover(
    path: Path, index: Index, is_whole: Callable[[dict[str, Any]], bool] = lambda record: True
) -> int:
    """Makes the output of an interrupted job ready to go on; returns how many results it holds.

    Keeps the first good result of each id, and notes in `index` where it stands. Everything else is to be
    done again and is taken out: failures, damaged lines, a torn last one, and results of which `is_whole` says
    that a part is missing elsewhere. Raises JournalError if there is a result for an id that the job does not have.
    """
    if not path.exists():
        return 0
    num_done = num_dropped = end = 0
    with path.open("rb") as file:
        for offset, line in whole_lines(file):
            end = offset + len(line)
            record = load_record(line)
            key = record and record["error"] is None and record["custom_id"]
            if key and key not in index:
                raise JournalError(f"{path} has a result for {key!r}, which is not in the input")
            if key and record and is_whole(record) and index.claim(key, offset):
                num_done += 1
            else:
                num_dropped += 1
    if num_dropped:
        with replaced(path) as new, path.open("rb") as file:
            for offset, line in whole_lines(file):
                record = load_record(line)
                if record and record["error"] is None and index.offset(record["custom_id"]) == offset:
                    new.write(line)
    elif end < path.stat().st_size:
        os.truncate(path, end)
    return num_done


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end of the block, at once and whole, or not at all."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise JournalError(f"cannot write {path}: {error.strerror}; it is as it was") from None
    finally:
        new.unlink(missing_ok=True)
    sync_folder(path)


def sync_folder(path: Path) -> None:
    """Makes the name of a new file survive a power cut."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the output file `path` against other processes; the lock ends with the process, however it ends.

    Raises JournalError if another process holds it.
    """
    name = path.with_name(path.name + ".lock")
    try:
        file = name.open("a+")
    except OSError as error:
        raise JournalError(f"cannot write {name}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise JournalError(f"process {file.read().strip() or '?'} is writing {path} now") from None
        except OSError as error:
            raise JournalError(
                f"cannot lock {name}: {error.strerror}; write to a disk that has locks"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def sort_by_line(sources: list[Path], target: Path) -> int:
    """Writes the records of `sources` to `target` in the order of the input; returns how many.

    Raises JournalError for a damaged record and for two records of one line.
    """
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(contextlib.closing(temporary_database()))
        database.execute("CREATE TABLE lines (line INTEGER PRIMARY KEY, source INT, offset INT, length INT)")
        files = [stack.enter_context(source.open("rb")) for source in sources]
        for number, (source, file) in enumerate(zip(sources, files, strict=True)):
            for offset, raw in whole_lines(file):
                record = load_record(raw)
                if record is None or not isinstance(record.get("line"), int):
                    raise JournalError(f"{source} has a damaged line at byte {offset}; run its job again")
                try:
                    row = (record["line"], number, offset, len(raw))
                    database.execute("INSERT INTO lines VALUES (?, ?, ?, ?)", row)
                except sqlite3.IntegrityError:
                    raise JournalError(
                        f"{source} has a second result for line {record['line']} of the input"
                    ) from None
        count = 0
        with replaced(target) as new:
            for number, offset, length in database.execute(
                "SELECT source, offset, length FROM lines ORDER BY line"
            ):
                files[number].seek(offset)
                new.write(files[number].read(length))
                count += 1
        return count
