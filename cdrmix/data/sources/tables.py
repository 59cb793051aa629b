"""Sources with many documents per file: JSON lines, CSV, Parquet. Fields other than the text become metadata."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cdrmix.config import schema_data
from cdrmix.data.sources import files
from cdrmix.data.sources.base import (
    SOURCES,
    BadRecord,
    FileSource,
    Metadata,
    Record,
    check_once,
    damage_message,
    invalid_utf8,
    missing_column,
    over_long_message,
)
from cdrmix.data.sources.files import DAMAGED_STREAM, OverLongRecord, RecordLines, StoredFile, open_bytes, reading
from cdrmix.data.sources.parquet_files import text_rows
from cdrmix.errors import CorpusError
from cdrmix.json_text import parse_json


@SOURCES("jsonl")
class JsonLines(FileSource):
    """Files with one JSON object per line. One of its fields is the text."""

    kind = "jsonl"
    suffixes = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")

    def __init__(self, section: schema_data.JsonlSource, max_expansion: int) -> None:
        self.parse = partial(parse_object, text_field=section.text_field)
        super().__init__(section.paths, max_expansion)

    def read(self, path: Path) -> Iterator[Record]:
        return json_lines(path, self.max_expansion)


def json_lines(path: StoredFile, max_expansion: int) -> Iterator[Record]:
    """The lines of a file that are not blank, as bytes."""
    number = 0
    with reading(path), open_bytes(path, max_expansion) as stream:
        while True:
            try:
                line = stream.readline(files.MAX_RECORD_BYTES + 1)
                number += bool(line)
                too_long = len(line) > files.MAX_RECORD_BYTES
                rest = line
                while too_long and rest and not rest.endswith(b"\n"):
                    rest = stream.readline(2**20)
            except DAMAGED_STREAM as error:
                yield Record(number + 1, error=damage_message(error))
                return
            if not line:
                return
            if too_long:
                yield Record(number, error=over_long_message())
            elif not line.isspace():
                yield Record(number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, len(line))


def parse_object(raw: bytes, text_field: str) -> tuple[str, Metadata]:
    """The text and the other fields of a JSON object."""
    record = decoded(raw)
    if not isinstance(record, dict):
        raise BadRecord(f"is a JSON {type(record).__name__}, not an object")
    if text_field not in record:
        raise BadRecord(f"has no field {text_field!r}")
    text = record.pop(text_field)
    if not isinstance(text, str):
        raise BadRecord(f"field {text_field!r} is not a string")
    return text, record


def decoded(raw: bytes) -> Any:
    """The value of a line of JSON. Raises BadRecord, also for an object with two fields of one name."""
    try:
        return parse_json(raw.decode("utf-8"), _fields)
    except UnicodeDecodeError as error:
        raise BadRecord(invalid_utf8(error)) from error
    except json.JSONDecodeError as error:
        raise BadRecord(f"is not JSON: {error.msg} (column {error.colno})") from error
    except BadRecord:
        raise
    except ValueError as error:  # an integer of thousands of digits; too deep nesting
        raise BadRecord(f"is not usable JSON: {error}") from error


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises BadRecord where Python would keep the last of two fields of one name."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRecord(f"has the field {twice!r} twice in one object, and nothing tells which one is meant")
    return fields


@SOURCES("csv")
class CommaSeparated(FileSource):
    """Rows of CSV files with a header line. One of the columns is the text."""

    kind = "csv"
    suffixes = (".csv", ".csv.gz", ".csv.zst")

    def __init__(self, section: schema_data.CsvSource, max_expansion: int) -> None:
        self.text_field = section.text_field
        self.parse = partial(parse_row, text_field=section.text_field)
        super().__init__(section.paths, max_expansion)

    def read(self, path: Path) -> Iterator[Record]:
        return csv_rows(path, self.text_field, self.max_expansion)


def csv_rows(path: StoredFile, text_field: str, max_expansion: int) -> Iterator[Record]:
    """The rows of a file. raw: the header and the cells. Raises CorpusError without one column `text_field`."""
    csv.field_size_limit(files.MAX_RECORD_BYTES)  # the default limit of 128 KiB is too short for documents
    with reading(path), open_bytes(path, max_expansion) as stream:
        # surrogateescape, so that a bad byte does not end the file; parsing then rejects only that row
        text_stream = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        record_lines = RecordLines(text_stream)
        # strict, because otherwise an unmatched quote extends to the end of the file
        reader = csv.reader(record_lines, strict=True)
        header: list[str] | None = None
        while True:
            record_lines.begin_record()
            first = record_lines.number + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                rows = f"; skipped to line {record_lines.number}" if record_lines.number > first else ""
                yield Record(first, error=f"is not CSV: {error}{rows}")
                continue
            except OverLongRecord:
                yield Record(first, error=over_long_message())
                continue
            except DAMAGED_STREAM as error:
                yield Record(first, error=damage_message(error))
                return
            if row is None:
                return
            if not row:
                continue
            if header is not None:
                yield Record(first, (header, row), sum(map(len, row)))
            elif text_field in row:
                check_once(text_field, str(path), row)
                header = row
            elif not _is_utf8(row):
                raise CorpusError(
                    f"data.source: the header of {path} is not UTF-8; convert the file, for example from UTF-16: "
                    "iconv -f UTF-16 -t UTF-8"
                )
            else:
                raise missing_column(text_field, str(path), row)


def _is_utf8(cells: list[str]) -> bool:
    return all("\0" not in cell and not any("\udc80" <= sign <= "\udcff" for sign in cell) for cell in cells)


def parse_row(raw: tuple[list[str], list[str]], text_field: str) -> tuple[str, Metadata]:
    """The text and the other columns of a row. raw: (header, row)."""
    header, row = raw
    if len(row) != len(header):  # a comma or a line end in a text without quotes would cut the text
        raise BadRecord(
            f"has {len(row)} columns, and the header has {len(header)}; a text with a comma or a line end must be in "
            "quotes"
        )
    if row == header:
        raise BadRecord("is the header again, as where files were put together")
    return row[header.index(text_field)], {
        name: value for name, value in zip(header, row, strict=True) if name != text_field
    }


@SOURCES("parquet")
class Parquet(FileSource):
    """Rows of Parquet files with a string column."""

    kind = "parquet"
    suffixes = (".parquet", ".pq")

    def __init__(self, section: schema_data.ParquetSource, max_expansion: int) -> None:
        self.text_field = section.text_field
        self.parse = partial(parse_cells, text_field=section.text_field)
        super().__init__(section.paths, max_expansion)

    def read(self, path: Path) -> Iterator[Record]:
        return text_rows(path, self.text_field, self.max_expansion)


def parse_cells(raw: tuple[bytes | None, Metadata], text_field: str) -> tuple[str, Metadata]:
    """The text and the other columns of a row."""
    value, metadata = raw
    if value is None:
        raise BadRecord(f"column {text_field!r} is null")
    try:
        return value.decode("utf-8"), metadata
    except UnicodeDecodeError as error:
        raise BadRecord(invalid_utf8(error)) from error
