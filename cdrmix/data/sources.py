"""Sources of raw text: the Python standard library, JSON lines, Parquet, CSV, plain files, Hugging Face streams.

A source is made from its configuration section, found in SOURCES by the section's `kind`, and streams
`Document`s in a fixed order and in constant memory. A record that cannot be read is counted by a
`BadRecords`, shown with its file and line, and skipped; when there are more than the limit allows, or
when the source itself cannot be read, it is a CorpusError.
"""

from __future__ import annotations

import csv
import io
import json
import platform
import sysconfig
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cdrmix.config import schema_data as schema
from cdrmix.data import files
from cdrmix.data.files import (
    DAMAGED_STREAM,
    OverLongRecord,
    RecordLines,
    find_files,
    open_bytes,
    read_at_most,
    reading,
    walk,
)
from cdrmix.durable import disk_full, is_disk_full
from cdrmix.errors import CdrmixError, CorpusError
from cdrmix.registry import Registry

BAD_RECORDS_SHOWN = 5


@dataclass(frozen=True)
class Document:
    """One text and where it came from: `source` is the kind of source, `id` its file and line or row."""

    text: str
    source: str
    id: str
    meta: Mapping[str, Any] = field(default_factory=dict)


class BadRecords:
    """Counts the records that could not be read, says the first few, and gives up beyond `limit` of them."""

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        self.limit = limit
        self.count = 0
        self.shown: list[str] = []
        self._say = say

    def add(self, where: str, reason: str) -> None:
        """Count one more; raises CorpusError naming it when it is one too many."""
        self.count += 1
        record = f"{where}: {reason}"
        if len(self.shown) < BAD_RECORDS_SHOWN:
            self.shown.append(record)
            self._say(f"skipped a bad record: {record}")
        if self.count > self.limit:
            raise CorpusError(
                f"{self.count} bad records in the corpus, more than data.max_bad_records={self.limit} allows; "
                f"the last one is {record}. Mend the corpus, or raise data.max_bad_records."
            )


class Source(ABC):
    """A stream of documents that can be read again and again, always in the same order."""

    @abstractmethod
    def identity(self) -> list[Any]:
        """What tells this text from other text, as JSON values, without reading it."""

    @abstractmethod
    def describe(self) -> str:
        """What is read, for messages."""

    @abstractmethod
    def documents(self, bad: BadRecords) -> Iterator[Document]:
        """Every document in order; malformed records go to `bad`."""


SOURCES: Registry[Callable[[Any], Source]] = Registry("source of text")


def make_source(section: schema.Source) -> Source:
    """The source that a `data.source` section describes; CorpusError when its files are not there."""
    return SOURCES[section.kind](section)


class FileSource(Source):
    """Documents read from a sorted list of files."""

    kind: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]  # of the files taken from a folder; () takes every file

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.files = find_files(paths, self.suffixes)

    def identity(self) -> list[Any]:
        identity = []
        for path in self.files:
            with reading(path):
                status = path.stat()
            identity.append([str(path.absolute()), status.st_size, status.st_mtime_ns])
        return identity

    def describe(self) -> str:
        return f"{len(self.files)} files of data.source.paths={self.paths}"

    def documents(self, bad: BadRecords) -> Iterator[Document]:
        for path in self.files:
            for where, text, meta in self.records(path, bad):
                if reason := unusable(text):
                    bad.add(where, reason)
                else:
                    yield Document(text, self.kind, where, meta)

    @abstractmethod
    def records(self, path: Path, bad: BadRecords) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """(where, text, meta) of every readable record of one file."""


@SOURCES("stdlib")
class StandardLibrary(FileSource):
    """The .py files of the running Python's standard library, without its tests and installed packages."""

    kind = "stdlib"
    suffixes = (".py",)
    left_out = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

    def __init__(self, section: schema.StdlibSource) -> None:
        self.root = Path(sysconfig.get_path("stdlib"))
        self.files = list(walk(self.root, self.suffixes, self.left_out))
        if not self.files:
            raise CorpusError(
                f"data.source.kind=stdlib: no .py files under {self.root}; this Python comes without its library's "
                "source. Name other text, as in data.source={kind: text, paths: [folder]}"
            )

    def identity(self) -> list[Any]:
        sizes = []
        for path in self.files:
            with reading(path):
                sizes.append([path.relative_to(self.root).as_posix(), path.stat().st_size])
        return [platform.python_version(), sizes]

    def describe(self) -> str:
        return f"the standard library of Python {platform.python_version()} ({len(self.files)} files)"

    def records(self, path: Path, bad: BadRecords) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        name = path.relative_to(self.root).as_posix()
        with reading(path):
            raw = path.read_bytes()
        try:
            # PEP 263: the encoding a file declares for itself. Line ends stay as they are.
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            text = raw.decode(encoding)
        except (SyntaxError, LookupError, UnicodeDecodeError) as error:
            bad.add(name, f"cannot be decoded: {error}")
            return
        yield name, text, {}


@SOURCES("text")
class PlainText(FileSource):
    """UTF-8 files, each one document; a folder gives all its files that are not hidden."""

    kind = "text"
    suffixes = ()

    def __init__(self, section: schema.TextSource) -> None:
        super().__init__(section.paths)

    def records(self, path: Path, bad: BadRecords) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        with reading(path), open_bytes(path) as stream:
            try:
                raw = read_at_most(stream, files.MAX_RECORD_BYTES + 1)
            except DAMAGED_STREAM as error:
                bad.add(f"{path}:1", f"the compressed file is damaged: {error}")
                return
        if len(raw) > files.MAX_RECORD_BYTES:
            bad.add(f"{path}:1", over_long())
            return
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            bad.add(f"{path}:{line}", invalid_utf8(error))
            return
        yield str(path), text, {}


@SOURCES("jsonl")
class JsonLines(FileSource):
    """One JSON object a line, with the text in one of its fields; the other fields become `meta`."""

    kind = "jsonl"
    suffixes = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")

    def __init__(self, section: schema.JsonlSource) -> None:
        self.text_field = section.text_field
        super().__init__(section.paths)

    def records(self, path: Path, bad: BadRecords) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        for number, line in lines(path, bad):
            where = f"{path}:{number}"
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                bad.add(where, invalid_utf8(error))
                continue
            except json.JSONDecodeError as error:
                bad.add(where, f"is not JSON: {error.msg} (column {error.colno})")
                continue
            except (ValueError, RecursionError) as error:  # an integer of thousands of digits; nesting without end
                bad.add(where, f"is not usable JSON: {error}")
                continue
            if not isinstance(record, dict):
                bad.add(where, f"is a JSON {type(record).__name__}, not an object")
            elif self.text_field not in record:
                bad.add(where, f"has no field {self.text_field!r}")
            elif not isinstance(record[self.text_field], str):
                bad.add(where, f"field {self.text_field!r} is not a string")
            else:
                text = record.pop(self.text_field)
                yield where, text, record


@SOURCES("csv")
class CommaSeparated(FileSource):
    """Rows of CSV files whose header line names the text column."""

    kind = "csv"
    suffixes = (".csv", ".csv.gz", ".csv.zst")

    def __init__(self, section: schema.CsvSource) -> None:
        self.text_field = section.text_field
        super().__init__(section.paths)

    def records(self, path: Path, bad: BadRecords) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        csv.field_size_limit(files.MAX_RECORD_BYTES)  # the module's own limit, 128 KiB, is too short for documents
        with reading(path), open_bytes(path) as stream:
            # surrogateescape keeps one bad byte from ending the file; `documents` then refuses that one row
            text_stream = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
            record_lines = RecordLines(text_stream)
            reader = csv.reader(record_lines, strict=True)  # else a stray quote takes the rest of the file as its text
            column: int | None = None
            while True:
                record_lines.begin_record()
                first = record_lines.number + 1
                where = f"{path}:{first}"
                try:
                    row = next(reader, None)
                except csv.Error as error:
                    rows = f"; passed over to line {record_lines.number}" if record_lines.number > first else ""
                    bad.add(where, f"is not CSV: {error}{rows}")
                    continue
                except OverLongRecord:
                    bad.add(where, over_long())
                    continue
                except DAMAGED_STREAM as error:
                    bad.add(where, f"the compressed file is damaged: {error}")
                    return
                if row is None:
                    return
                if not row:
                    continue
                if column is None:
                    column = self._column(path, row)
                elif len(row) <= column:
                    bad.add(where, f"has {len(row)} columns; {self.text_field!r} is column {column + 1}")
                else:
                    yield where, row[column], {}

    def _column(self, path: Path, header: list[str]) -> int:
        if self.text_field not in header:
            raise missing_column(self.text_field, str(path), header)
        return header.index(self.text_field)


@SOURCES("parquet")
class Parquet(FileSource):
    """Rows of Parquet files with a string column."""

    kind = "parquet"
    suffixes = (".parquet", ".pq")
    batch_rows = 256

    def __init__(self, section: schema.ParquetSource) -> None:
        self.text_field = section.text_field
        super().__init__(section.paths)

    def records(self, path: Path, bad: BadRecords) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        import pyarrow
        import pyarrow.parquet

        row = 0
        with reading(path):
            stream = path.open("rb")
        try:
            # pre_buffer would hold whole row groups; a bounded buffer streams them
            with stream, pyarrow.parquet.ParquetFile(stream, pre_buffer=False, buffer_size=2**20) as table:
                self._check_column(path, table.schema_arrow)
                for batch in table.iter_batches(self.batch_rows, columns=[self.text_field], use_threads=False):
                    # as bytes, so that one row of invalid UTF-8 spoils no other
                    for value in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                        row += 1
                        where = f"{path}:{row}"
                        if value is None:
                            bad.add(where, f"column {self.text_field!r} is null")
                            continue
                        try:
                            text = value.decode("utf-8")
                        except UnicodeDecodeError as error:
                            bad.add(where, invalid_utf8(error))
                            continue
                        yield where, text, {}
        except (pyarrow.ArrowException, OSError) as error:  # OSError: what pyarrow raises at a damaged page
            bad.add(f"{path}:{row + 1}", f"is not readable Parquet: {error}")

    def _check_column(self, path: Path, columns: Any) -> None:
        import pyarrow

        if self.text_field not in columns.names:
            raise missing_column(self.text_field, str(path), columns.names)
        found = columns.field(self.text_field).type
        value_type = found.value_type if pyarrow.types.is_dictionary(found) else found
        if not any(
            check(value_type)
            for check in (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
        ):
            raise CorpusError(
                f"data.source.text_field={self.text_field!r}: column of {path} holds {found}, not strings; "
                f"its columns are: {', '.join(columns.names)}"
            )


@SOURCES("huggingface")
class HuggingFace(Source):
    """A Hugging Face dataset, streamed unshuffled.

    Its identity is its name, so shards are reused offline; give a revision where the dataset may change.
    """

    def __init__(self, section: schema.HuggingFaceSource) -> None:
        self.section = section

    def identity(self) -> list[Any]:
        return [self.section.name, self.section.config_name, self.section.revision, self.section.split]

    def describe(self) -> str:
        revision = f", revision {self.section.revision!r}" if self.section.revision else ""
        return f"Hugging Face dataset {self.section.name!r}, split {self.section.split!r}{revision}"

    def documents(self, bad: BadRecords) -> Iterator[Document]:
        try:
            import datasets
            from huggingface_hub.errors import HfHubHTTPError
        except ImportError as error:
            raise CorpusError(
                f"data.source.kind=huggingface needs the package {error.name}: pip install datasets"
            ) from error
        section = self.section
        # HfHubHTTPError's bases hold the error of the HTTP library that the hub client uses, whichever it is
        failures = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, *HfHubHTTPError.__bases__)
        try:
            rows = iter(
                datasets.load_dataset(
                    section.name, section.config_name, split=section.split, revision=section.revision, streaming=True
                )
            )
        except failures as error:
            raise self._unreadable(error) from error
        number = 0
        while True:
            try:
                row = next(rows, None)
            except failures as error:
                raise self._unreadable(error) from error
            if row is None:
                return
            number += 1
            where = f"{section.name}/{section.split}:{number}"
            if section.text_field not in row:
                raise missing_column(section.text_field, self.describe(), list(row))
            text = row[section.text_field]
            if not isinstance(text, str):
                bad.add(where, f"field {section.text_field!r} is not a string")
            elif reason := unusable(text):
                bad.add(where, reason)
            else:
                yield Document(text, "huggingface", where)

    def _unreadable(self, error: BaseException) -> CdrmixError:
        cause: BaseException | None = error
        while cause is not None:  # libraries wrap what the system said
            if is_disk_full(cause):
                return disk_full(
                    f"what the {self.describe()} keeps beside its stream",
                    "Free some space, or set HF_HOME to a folder on another disk. The preparation then begins anew.",
                )
            cause = cause.__cause__ or cause.__context__
        return CorpusError(
            f"data.source: cannot stream the {self.describe()}: {error}. Check data.source.name, config_name, "
            "revision and split, and that this machine reaches huggingface.co (HF_HUB_OFFLINE unset; HF_TOKEN set if "
            "it is gated); the preparation then begins anew. Where the line is bad, download the dataset and use "
            "kind: parquet or jsonl with paths."
        )


def lines(path: Path, bad: BadRecords) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of every line that is not blank; over-long and damaged ones go to `bad`."""
    number = 0
    with reading(path), open_bytes(path) as stream:
        while True:
            try:
                line = stream.readline(files.MAX_RECORD_BYTES + 1)
                number += bool(line)
                too_long = len(line) > files.MAX_RECORD_BYTES
                rest = line
                while too_long and rest and not rest.endswith(b"\n"):
                    rest = stream.readline(2**20)
            except DAMAGED_STREAM as error:
                bad.add(f"{path}:{number + 1}", f"the compressed file is damaged: {error}")
                return
            if not line:
                return
            if too_long:
                bad.add(f"{path}:{number}", over_long())
            elif not line.isspace():
                yield number, line


def unusable(text: str) -> str:
    """Why a text cannot be a document; "" when it can.

    It may have no UTF-8 form (a lone surrogate from a JSON escape, a byte that was not UTF-8), or be too long.
    """
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        return "the text is not valid UTF-8"
    return over_long() if size > files.MAX_RECORD_BYTES else ""


def over_long() -> str:
    """What is wrong with a record of more than MAX_RECORD_BYTES."""
    return f"is longer than {files.MAX_RECORD_BYTES} bytes"


def invalid_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with a record that does not decode."""
    return f"invalid UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start})"


def missing_column(wanted: str, where: str, columns: list[str]) -> CorpusError:
    """The error for a table that has no column of the configured name."""
    return CorpusError(
        f"data.source.text_field: no column {wanted!r} in {where}; its columns are: {', '.join(columns) or '(none)'}"
    )
