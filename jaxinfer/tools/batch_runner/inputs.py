"""Input lines, one at a time: JSON lines, CSV, Parquet. Nothing here holds more than one line or row group."""

import csv
import gzip
import hashlib
import importlib.util
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

MAX_LINE_BYTES = 16 * 2**20  # a longer line is read past, not into memory
MAX_ID_CHARS = 512
ROWS_PER_READ = 256  # of a Parquet file
DELIMITERS = {".csv": ",", ".tsv": "\t"}
# How files that are no text begin -> what they are.
MAGIC = {
    b"PAR1": "a Parquet file: give it the suffix .parquet",
    b"PK\x03\x04": "a zip archive or a spreadsheet: save it as JSON lines, CSV or Parquet",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: decompress it first",
    b"BZh": "compressed with bzip2: decompress it first",
    b"\xfd7zXZ": "compressed with xz: decompress it first",
    b"ARROW1": "an Arrow file: save it as Parquet",
    b"SQLite format 3": "a database: save a table of it as CSV",
    b"\xff\xfe": "UTF-16 text: write it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "UTF-16 text: write it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
}
GZIP = b"\x1f\x8b"


class BadLine(ValueError):
    """What is wrong with one line of the input: `code` for counting, the message for reading."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.custom_id = code, custom_id


Value = Mapping[str, Any] | BadLine


def check_path(path: Path) -> None:
    """Raises ValueError unless `path` is a file that can be read twice, or a folder of Parquet files."""
    if path == Path("-") and not path.exists():
        raise ValueError("a job reads its input twice, which standard input cannot be; write it to a file")
    if path.is_dir() and _part_files(path):
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder without .parquet files; give one file of requests")
    if not path.exists():
        raise ValueError(f"there is no file {path}")
    if not path.is_file():
        raise ValueError(f"{path} is a pipe or device: a job reads its input twice; write it to a file")


def read(path: Path, prompt_column: str | None, as_chat: bool = False) -> Iterator[tuple[int, Value]]:
    """Reads (line number from 1, JSON object or what is wrong with it) of each line, or row of a table.

    Rows of tables (.csv, .tsv, .parquet, or a folder of Parquet files) become {"prompt": ...}, or {"messages": ...}
    where the column holds lists of objects or `as_chat` makes one message of each text; with "custom_id" if there is
    such a column. Text files may be compressed with gzip.

    Raises:
      ValueError: the file cannot be read as a whole; the message says what to do.
    """
    kind = _kind(path)
    if kind == ".jsonl":
        if prompt_column is not None or as_chat:
            option = "--chat" if prompt_column is None else "--prompt-column"
            raise ValueError(f"{option} is for tables (.csv, .tsv, .parquet); {path} is read as JSON lines")
        with _opened(path) as file:
            for number, raw in _raw_lines(file):
                yield number, decode(raw, first=number == 1)
        return
    if prompt_column is None:
        raise ValueError(f"{path} is a table; name the column of prompts with --prompt-column")
    rows = _parquet_rows(path, prompt_column) if kind == ".parquet" else _csv_rows(path, prompt_column, kind)
    for number, row in enumerate(rows, 1):
        yield number, row if isinstance(row, BadLine) else _table_value(row, prompt_column, as_chat)


def _kind(path: Path) -> str:
    """Finds what a file is: ".csv", ".tsv", ".parquet" or ".jsonl", by its suffix, and that it begins like that.

    Raises ValueError if it is of a kind that is not read, with what to do.
    """
    if path.is_dir():
        return ".parquet"
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes[-1:] == [".parquet"]:
        return ".parquet"
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    kind = suffixes[-1] if suffixes and suffixes[-1] in DELIMITERS else ".jsonl"
    try:
        with _opened(path) as file:
            first = file.readline(MAX_LINE_BYTES).removeprefix(b"\xef\xbb\xbf")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    for magic, what in MAGIC.items():
        if first.startswith(magic):
            raise ValueError(f"{path} is {what}")
    if kind == ".jsonl":
        _check_json_lines(path, first.strip())
    return kind


def _check_json_lines(path: Path, first: bytes) -> None:
    """Raises ValueError if the first line says that the file is one JSON value over several lines."""
    if first == b"{":
        raise ValueError(
            f"{path} is one JSON object over several lines; write each request on one line (jq -c .)"
        )
    if first.startswith(b"["):
        try:
            value = json.loads(first)
        except (ValueError, RecursionError):
            value = None  # it goes on in the next line
        if value is None or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
            raise ValueError(
                f"{path} is one JSON array; write each of its objects on a line of its own (jq -c '.[]')"
            )


def _opened(path: Path) -> BinaryIO:
    """Opens a text file for reading bytes, decompressed if it is a gzip file."""
    with path.open("rb") as file:
        is_gzip = file.read(len(GZIP)) == GZIP
    return gzip.open(path, "rb") if is_gzip else path.open("rb")  # type: ignore[return-value]


def _part_files(folder: Path) -> list[Path]:
    """Lists the files of a table that Spark or pandas wrote as a folder; names that begin with _ or . are none."""
    files = sorted(path for path in folder.rglob("*.parquet") if path.is_file())
    return [file for file in files if not file.name.startswith(("_", "."))]


def key_of(value: Value, number: int) -> str:
    """What a line is known by: its custom_id, or its number where it has none that can be used."""
    custom_id = value.custom_id if isinstance(value, BadLine) else value.get("custom_id")
    if isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_ID_CHARS and _is_utf8(custom_id):
        return custom_id
    return f"line-{number}"


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def sha256(path: Path) -> str:
    """Hashes the bytes of a file, or the names and bytes of a folder's Parquet files."""
    digest = hashlib.sha256()
    for part in _part_files(path) if path.is_dir() else [path]:
        if part != path:
            digest.update(f"{part.relative_to(path)} {part.stat().st_size}\n".encode())
        with part.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def _raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Reads (number, bytes) of each line; None for one over MAX_LINE_BYTES. Only LF and CRLF end a line."""
    number = 0
    try:
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(MAX_LINE_BYTES)
                yield number, None
            else:
                yield number, raw
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"the input cannot be read after line {number}: {error}") from None


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


def _csv_rows(path: Path, prompt_column: str, kind: str) -> Iterator[dict[str, Any] | BadLine]:
    """Reads the rows of a table of text; a row with too few or too many fields is a BadLine that keeps its id.

    Raises ValueError where the quotes of the file are wrong, with the line of the file: rows cannot be told apart then.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    with _text(path) as file:
        reader = csv.reader(file, delimiter=DELIMITERS[kind], strict=True)
        begin = 1
        try:
            names = next(reader, [])
            _check_column(path, prompt_column, names)
            begin = reader.line_num + 1
            for fields in reader:
                if fields:  # no empty line
                    yield _csv_row(names, fields, begin)
                begin = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{path} is not CSV: {error}, in the row that begins on line {begin}") from None
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be read after line {begin}: {error}") from None


def _text(path: Path) -> TextIO:
    return io.TextIOWrapper(_opened(path), encoding="utf-8-sig", errors="surrogateescape", newline="")


def _csv_row(names: list[str], fields: list[str], line: int) -> dict[str, Any] | BadLine:
    row = dict(zip(names, fields, strict=False))
    if len(fields) == len(names):
        return row
    return BadLine(
        "invalid_row",
        f"the row on line {line} of the file has {len(fields)} fields, and the header {len(names)}",
        row.get("custom_id"),
    )


def _parquet_rows(path: Path, prompt_column: str) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{path} needs pyarrow, which is not installed; pip install 'jaxinfer[batch]'")
    import pyarrow
    import pyarrow.parquet

    for part in _part_files(path) if path.is_dir() else [path]:
        try:
            with pyarrow.parquet.ParquetFile(part) as file:
                names = file.schema_arrow.names
                _check_column(part, prompt_column, names)
                columns = [name for name in (prompt_column, "custom_id") if name in names]
                for batch in file.iter_batches(batch_size=ROWS_PER_READ, columns=columns):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{part} is not a Parquet file, or damaged: {error}") from None


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
        return BadLine("invalid_utf8", "the row is not UTF-8", value.get("custom_id"))
    except TypeError:
        what = f"the prompt is a {type(prompt).__name__}, not text, ids or messages"
        return BadLine("invalid_value", what, value.get("custom_id"))
    return value
