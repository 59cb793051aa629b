"""Sources with many documents per file: JSON lines, CSV, Parquet. Fields other than the text become metadata."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
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
    damage_message,
    invalid_utf8,
    missing_column,
    over_long_message,
)
from cdrmix.data.sources.files import DAMAGED_STREAM, OverLongRecord, RecordLines, open_bytes, reading
from cdrmix.errors import CorpusError

BATCH_BYTES = 2**22  # approximate bytes of a Parquet file that are converted to Python objects at a time


@SOURCES("jsonl")
class JsonLines(FileSource):
    """Files with one JSON object per line. One of its fields is the text."""

    kind = "jsonl"
    suffixes = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")

    def __init__(self, section: schema_data.JsonlSource, max_expansion: int) -> None:
        self.parse = partial(parse_json, text_field=section.text_field)
        super().__init__(section.paths, max_expansion)

    def read(self, path: Path) -> Iterator[Record]:
        return json_lines(path, self.max_expansion)


def json_lines(path: Path, max_expansion: int) -> Iterator[Record]:
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


def parse_json(raw: bytes, text_field: str) -> tuple[str, Metadata]:
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
    """The value of a line of JSON. Raises BadRecord."""
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecord(invalid_utf8(error)) from error
    except json.JSONDecodeError as error:
        raise BadRecord(f"is not JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; too deep nesting
        raise BadRecord(f"is not usable JSON: {error}") from error


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
        csv.field_size_limit(files.MAX_RECORD_BYTES)  # the default limit of 128 KiB is too short for documents
        with reading(path), open_bytes(path, self.max_expansion) as stream:
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
                elif self.text_field in row:
                    header = row
                else:
                    raise missing_column(self.text_field, str(path), row)


def parse_row(raw: tuple[list[str], list[str]], text_field: str) -> tuple[str, Metadata]:
    """The text and the other columns of a row. raw: (header, row)."""
    header, row = raw
    column = header.index(text_field)
    if len(row) <= column:
        raise BadRecord(f"has {len(row)} columns; {text_field!r} is column {column + 1}")
    return row[column], {name: value for name, value in zip(header, row, strict=False) if name != text_field}


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
        import pyarrow

        row = 0
        try:
            with parquet_file(path) as table:
                self._check_column(path, table.schema_arrow)
                names = [field.name for field in table.schema_arrow if is_scalar(field.type)]
                columns = [self.text_field, *(name for name in names if name != self.text_field)]
                for batch in table.iter_batches(batch_rows(table.metadata), columns=columns, use_threads=False):
                    # as bytes, so that a row of invalid UTF-8 does not affect other rows
                    texts = batch.column(self.text_field).cast(pyarrow.large_binary()).to_pylist()
                    others = {name: cells(batch.column(name)) for name in columns if name != self.text_field}
                    for index, text in enumerate(texts):
                        row += 1
                        metadata = {name: values[index] for name, values in others.items()}
                        size = len(text or b"") + sum(len(cell) for cell in metadata.values() if isinstance(cell, str))
                        yield Record(row, (text, metadata), size)
        except (pyarrow.ArrowException, OSError) as error:  # pyarrow raises OSError for a damaged page
            yield Record(row + 1, error=f"is not readable Parquet: {error}")

    def _check_column(self, path: Path, columns: Any) -> None:
        if self.text_field not in columns.names:
            raise missing_column(self.text_field, str(path), columns.names)
        found = columns.field(self.text_field).type
        if not is_text(found):
            raise CorpusError(
                f"data.source.text_field={self.text_field!r}: column of {path} holds {found}, not strings; "
                f"its columns are: {', '.join(columns.names)}"
            )


def parquet_rows(path: Path) -> Iterator[Record]:
    """The rows of a file as mappings from the names of all columns, also nested ones, to Python values."""
    import pyarrow

    row = 0
    try:
        with parquet_file(path) as table:
            rows = batch_rows(table.metadata)
            for batch in table.iter_batches(rows, use_threads=False):
                size = batch.nbytes // max(len(batch), 1)
                for index in range(len(batch)):
                    row += 1
                    try:
                        (cells_of_row,) = batch.slice(index, 1).to_pylist()
                    except UnicodeDecodeError as error:
                        yield Record(row, error=invalid_utf8(error))
                    else:
                        yield Record(row, cells_of_row, size)
    except (pyarrow.ArrowException, OSError) as error:  # pyarrow raises OSError for a damaged page
        yield Record(row + 1, error=f"is not readable Parquet: {error}")


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """A pyarrow.parquet.ParquetFile. Raises CorpusError if the file cannot be opened."""
    import pyarrow.parquet

    with reading(path):
        stream = path.open("rb")
    # pre_buffer would hold whole row groups; a bounded buffer streams them
    with stream, pyarrow.parquet.ParquetFile(stream, pre_buffer=False, buffer_size=2**20) as table:
        yield table


def batch_rows(metadata: Any) -> int:
    """Rows of a batch of about BATCH_BYTES, by the sizes in the metadata of a file."""
    size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    return max(1, min(256, BATCH_BYTES * metadata.num_rows // max(size, 1)))


def is_text(found: Any) -> bool:
    """Whether an Arrow type is a string type."""
    from pyarrow import types

    value = found.value_type if types.is_dictionary(found) else found
    return types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)


def is_scalar(found: Any) -> bool:
    """Whether values of an Arrow type can be metadata: strings, numbers, booleans."""
    from pyarrow import types

    return is_text(found) or types.is_integer(found) or types.is_floating(found) or types.is_boolean(found)


def cells(column: Any) -> list[Any]:
    """A column as Python values. Invalid UTF-8 is replaced by replacement characters."""
    import pyarrow

    if not is_text(column.type):
        return list(column.to_pylist())
    values = column.cast(pyarrow.large_binary()).to_pylist()
    return [None if value is None else value.decode("utf-8", errors="replace") for value in values]


def parse_cells(raw: tuple[bytes | None, Metadata], text_field: str) -> tuple[str, Metadata]:
    """The text and the other columns of a row."""
    value, metadata = raw
    if value is None:
        raise BadRecord(f"column {text_field!r} is null")
    try:
        return value.decode("utf-8"), metadata
    except UnicodeDecodeError as error:
        raise BadRecord(invalid_utf8(error)) from error
