"""The output file: lines appended whole, synced in groups, repaired after a kill, held by one process."""

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxinfer.tools.batch_runner.index import Index, temporary_database

SYNC_LINES = 256  # at most so many lines, and
SYNC_SECONDS = 0.5  # what was written in this time (the sync itself takes more) are lost to a power cut

# What a lock file begins with; other files of that name are left alone.
LOCK_MARK = b"jaxinfer batch, process "
SEAL_NAME = b', "checksum": "'
SEAL = SEAL_NAME + b'%08x"'  # the last field of each line
SEAL_BYTES = len(SEAL % 0)
MAX_SHOWN_LINE = 2**24  # of a file that may be anybody's


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
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # for as long as it is written
        except OSError as error:
            os.close(self._fd)
            raise JournalError(f"cannot write {path}: another process writes it ({error.strerror})") from None
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


def sealed(text: bytes) -> bytes:
    """Writes a CRC-32 of the JSON object `text` into its last field, "checksum", and ends the line."""
    return text[:-1] + SEAL % zlib.crc32(text) + b"}\n"


def load_record(line: bytes) -> dict[str, Any] | None:
    """Reads a line of an output file; None if it is damaged, or was not written by a batch job."""
    text, seal = line[: -SEAL_BYTES - 2] + b"}", line[-SEAL_BYTES - 2 : -2]
    if seal != SEAL % zlib.crc32(text):
        return None
    try:
        record = json.loads(text)
        is_record = isinstance(record["custom_id"].encode(), bytes) and "error" in record
        is_line = type(record["line"]) is int and 0 < record["line"] < 2**63
    # What somebody wrote by hand may be anything, and be sealed: no object, half a surrogate, nested too deeply.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return record if is_record and is_line else None


def is_ours(path: Path) -> bool:
    """Says whether a file may be deleted: it is not there, empty, or a batch job wrote its first line."""
    if not path.exists():
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.readline(MAX_SHOWN_LINE)
    return not first or load_record(first) is not None or SEAL_NAME in first


def recover(
    path: Path, index: Index, is_whole: Callable[[dict[str, Any]], bool] = lambda record: True
) -> tuple[int, int]:
    """Makes the output of an interrupted job ready to go on.

    Keeps the first good result of each id, and notes in `index` where it stands. Everything else is to be
    done again and is taken out: failures, damaged lines, a torn last one, and results of which `is_whole` says
    that a part is missing elsewhere.

    Returns:
      (results, damaged lines).

    Raises:
      JournalError: there is a result for an id that the job does not have.
    """
    if not path.exists():
        return 0, 0
    num_done = num_dropped = num_damaged = end = 0
    with path.open("rb") as file:
        for offset, line in whole_lines(file):
            end = offset + len(line)
            record = load_record(line)
            num_damaged += record is None
            key = record and record["error"] is None and record["custom_id"]
            if key and key not in index:
                raise JournalError(
                    f"{path} has a result for {key!r}, which is not in the input: it is of another job, or lines of "
                    "others were added; take that line out, choose another output, or begin anew with --overwrite"
                )
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
    return num_done, num_damaged


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end of the block, at once and whole, or not at all."""
    new = path.with_name(f"{path.name}.jaxinfer-new")  # nobody else's name
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
def locked(path: Path) -> Iterator[Callable[[], None]]:
    """Holds the output file `path` against other processes; the lock ends with the process, however it ends.

    Yields:
      a function that raises JournalError if the lock file was deleted or replaced meanwhile.

    Raises:
      JournalError: another process holds it, or a file that is no lock of ours has the name of the lock.
    """
    name = lock_path(path)
    try:
        if name.exists() and not name.is_file():
            raise JournalError(f"{name} is no file, and so no lock of a batch job; choose another output")
        file = name.open("a+b")
    except OSError as error:
        raise JournalError(f"cannot write {name}: {error.strerror}") from None
    with file:
        try:
            _take_lock(file, name, path)
        except OSError as error:
            raise JournalError(f"cannot write {name}: {error.strerror}") from None
        yield lambda: _check_lock(file, name, path)


def lock_path(output: Path) -> Path:
    return output.with_name(output.name + ".lock")


def _take_lock(file: BinaryIO, name: Path, path: Path) -> None:
    file.seek(0)
    holder = file.read(MAX_SHOWN_LINE)
    # An empty file is taken over: a job that was killed here may have left it, and nothing of anybody's is lost.
    if holder and not holder.startswith(LOCK_MARK):
        raise JournalError(
            f"{name} is no lock of a batch job, and would be overwritten; choose another output"
        )
    process = holder.removeprefix(LOCK_MARK).decode(errors="replace").strip() or "?"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists():  # the job that writes it holds it too, should its lock file have been deleted
            with path.open("rb") as output:
                fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JournalError(f"process {process} is writing {path} now") from None
    except OSError as error:
        raise JournalError(f"cannot lock {name}: {error.strerror}; write to a disk that has locks") from None
    _check_lock(file, name, path)
    file.truncate(0)
    file.write(LOCK_MARK + b"%d\n" % os.getpid())
    file.flush()


def _check_lock(file: BinaryIO, name: Path, path: Path) -> None:
    try:
        same = os.path.samestat(os.fstat(file.fileno()), name.stat())
    except FileNotFoundError:
        same = False
    if not same:
        raise JournalError(
            f"{name} was deleted while this job held it; another may write {path}: run it again"
        )


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
