"""Input lines, one at a time: JSONL, CSV, Parquet. Nothing here holds more than one line or row group."""

import csv
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 16 * 2**20  # a longer line is read past, not into memory
MAX_ID_CHARS = 512
ROWS_PER_READ = 256  # of a Parquet file


class BadLine(ValueError):
    """What is wrong with one line of the input: `code` for counting, the message for reading."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


Value = Mapping[str, Any] | BadLine


def read(path: Path, prompt_column: str | None, as_chat: bool = False) -> Iterator[tuple[int, Value]]:
    """(line number from 1, JSON object or what is wrong with it) of each line, or row of a table.

    Rows of .csv and .parquet files become {"prompt": ...}, or {"messages": ...} where the column holds lists of
    objects or `as_chat` makes one message of each text; with "custom_id" if there is such a column.

    Raises:
      ValueError: the file cannot be read as a whole; the message says what to do.
    """
    if path.suffix in (".csv", ".parquet"):
        if prompt_column is None:
            raise ValueError(f"{path} is a table; name the column of prompts with --prompt-column")
        rows = _csv_rows(path, prompt_column) if path.suffix == ".csv" else _parquet_rows(path, prompt_column)
        for number, row in enumerate(rows, 1):
            yield number, _table_value(row, prompt_column, as_chat)
    elif prompt_column is not None or as_chat:
        option = "--chat" if prompt_column is None else "--prompt-column"
        raise ValueError(f"{option} is for .csv and .parquet files; {path} is read as JSON lines")
    else:
        for number, raw in _raw_lines(path):
            yield number, decode(raw, first=number == 1)


def key_of(value: Value, number: int) -> str:
    """What a line is known by: its custom_id, or its number where it has none that can be used."""
    custom_id = None if isinstance(value, BadLine) else value.get("custom_id")
    usable = isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_ID_CHARS
    return custom_id if usable else f"line-{number}"  # type: ignore[return-value]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """(number, bytes) of each line; None for one over MAX_LINE_BYTES. Only LF and CRLF end a line."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(MAX_LINE_BYTES)
                yield number, None
            else:
                yield number, raw


def decode(raw: bytes | None, *, first: bool = False) -> Value:
    """The JSON object of one line, or what is wrong with the line. `first` may begin with a BOM."""
    if raw is None:
        return BadLine("line_too_long", f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    if first:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    if not raw.strip():
        return BadLine("empty_line", "the line is empty")
    try:
        value = json.loads(raw.decode("utf-8"))
        if b"\\u" in raw:  # half of a surrogate pair can be spelled in JSON, but is no text
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        return BadLine("invalid_utf8", f"the line is not UTF-8: byte {error.start} is wrong")
    except UnicodeEncodeError:
        return BadLine("invalid_utf8", "a string of the line holds half of a surrogate pair")
    except json.JSONDecodeError as error:
        return BadLine("invalid_json", f"the line is not JSON: {error.msg} at character {error.pos}")
    except RecursionError:
        return BadLine("invalid_json", "the line is not JSON that can be read: it is nested too deeply")
    except ValueError as error:  # an integer of thousands of digits
        return BadLine("invalid_json", f"the line is not JSON that can be read: {error}")
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", type(None): "null"}.get(type(value), "a number or boolean")
        return BadLine("not_an_object", f"the line is {kind}, not a JSON object")
    return value


def _csv_rows(path: Path, prompt_column: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.DictReader(file)
        _check_column(path, prompt_column, reader.fieldnames or [])
        try:
            yield from reader
        except csv.Error as error:
            raise ValueError(f"{path} is not CSV: {error} at line {reader.line_num}") from None


def _parquet_rows(path: Path, prompt_column: str) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{path} needs pyarrow, which is not installed; pip install 'jaxinfer[batch]'")
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from None
    with file:
        names = file.schema_arrow.names
        _check_column(path, prompt_column, names)
        columns = [name for name in (prompt_column, "custom_id") if name in names]
        for batch in file.iter_batches(batch_size=ROWS_PER_READ, columns=columns):
            yield from batch.to_pylist()


def _check_column(path: Path, prompt_column: str, names: Any) -> None:
    if prompt_column not in names:
        raise ValueError(f"{path} has no column {prompt_column!r}; it has {', '.join(map(repr, names))}")


def _table_value(row: Mapping[str, Any], prompt_column: str, as_chat: bool) -> Value:
    prompt = row[prompt_column]
    if as_chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    is_chat = isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)
    value = {"messages" if is_chat else "prompt": prompt}
    if row.get("custom_id") not in (None, ""):
        value["custom_id"] = str(row["custom_id"])
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return BadLine("invalid_utf8", "the row is not UTF-8")
    except TypeError:
        return BadLine("invalid_value", f"the prompt is a {type(prompt).__name__}, not text, ids or messages")
    return value
