"""The base class of sources: a source has parts, a part has records, and a record is parsed to a document.

Reading a part is cheap and happens in one process. Parsing a record is expensive and may happen in another process. A
bad record is counted by `BadRecords`, reported with its file and line, and skipped. Too many bad records, or a source
that cannot be read, raise CorpusError.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cdrmix.data.escaping import escape_unprintable
from cdrmix.data.sources import files
from cdrmix.data.sources.files import find_files, reading
from cdrmix.errors import CorpusError
from cdrmix.registry import Registry

BAD_RECORDS_SHOWN = 5
REASON_CHARACTERS = 1000  # of the reason why a record is bad, which can have its values

Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class Document:
    """A text and its origin. source: the kind of the source. id: file and line or row."""

    text: str
    source: str
    id: str
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """An unparsed record at line or row `number` of a part. error: the reason why it could not be read, or empty.

    number: from 1; 0 for a part that is one document.
    """

    number: int
    raw: Any = None
    size: int = 0  # approximate bytes
    error: str = ""


class BadRecord(ValueError):
    """A record that is not a document. The message is the reason."""


class BadRecords:
    """Counts bad records, reports the first few, and raises CorpusError for more than `limit`."""

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        self.limit = limit
        self.count = 0
        self.shown: list[str] = []
        self._say = say

    def add(self, where: str, reason: str) -> None:
        """Counts one record. Raises CorpusError above the limit."""
        self.add_many(1, [f"{where}: {shortened(reason)}"])

    def add_many(self, count: int, shown: list[str]) -> None:
        """Counts records, of which `shown` has the first messages. Raises CorpusError above the limit."""
        self.count += count
        shown = [escape_unprintable(record).replace("\n", " ") for record in shown]
        for record in shown[: BAD_RECORDS_SHOWN - len(self.shown)]:
            self.shown.append(record)
            self._say(f"skipped a bad record: {record}")
        if count and self.count > self.limit:
            later = f"; a later one {shown[-1]}" if shown[-1] != self.shown[0] else ""
            raise CorpusError(
                f"{self.count} bad records in the corpus, more than data.max_bad_records={self.limit} allows; the "
                f"first is {self.shown[0]}{later}. Correct the corpus, or raise data.max_bad_records."
            )


def shortened(reason: str) -> str:
    """The beginning of a reason that is too long to be shown."""
    return reason if len(reason) <= REASON_CHARACTERS else f"{reason[:REASON_CHARACTERS]} ..."


class Source(ABC):
    """A sequence of documents that can be read repeatedly in the same order.

    kind: the name of the source in documents. parse: from the `raw` of a record to (text, metadata), or raises
    BadRecord; it can be pickled for other processes.
    """

    kind: ClassVar[str]
    parse: Callable[[Any], tuple[str, Metadata]]

    @abstractmethod
    def identity(self) -> list[Any]:
        """JSON values that identify the text. It is not read for them."""

    @abstractmethod
    def describe(self) -> str:
        """A description of the source for messages."""

    @abstractmethod
    def parts(self) -> list[str]:
        """Names of the parts that can be read independently, usually files."""

    def size(self, part: str) -> int | None:
        """Stored bytes of a part, or None if unknown."""
        return None

    @abstractmethod
    def records(self, part: str, checkpoint: Any = None) -> Iterator[Record]:
        """The records of a part in order. checkpoint: of an earlier reading, to continue from, if the source supports
        it.
        """

    def checkpoint(self) -> Any:
        """The position of the last `records` as a JSON value. None: the source is read from the start again."""
        return None

    def documents(self, bad: BadRecords) -> Iterator[Document]:
        """The documents in order. Bad records are counted in `bad`."""
        for part in self.parts():
            for record in self.records(part):
                where = record_location(part, record.number)
                try:
                    text, metadata = parse_record(self.parse, record)
                except BadRecord as error:
                    bad.add(where, str(error))
                else:
                    yield Document(text, self.kind, where, metadata)


SOURCES = Registry[Callable[[Any, int], Source]]("source")


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def record_location(part: str, number: int) -> str:
    """The location of a record for messages. Bytes of a name that are not UTF-8 are escaped."""
    shown = part.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return f"{shown}:{number}" if number else shown


def parse_record(parse: Callable[[Any], tuple[str, Metadata]], record: Record) -> tuple[str, Metadata]:
    """(text, metadata) of a record. Raises BadRecord, also for a text that is not valid UTF-8 or is too long."""
    if record.error:
        raise BadRecord(record.error)
    text, metadata = parse(record.raw)
    if len(text) > files.MAX_RECORD_BYTES // 4 or not text.isascii():
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:  # a lone surrogate from a JSON escape, a byte that was not UTF-8
            raise BadRecord("the text is not valid UTF-8") from error
        if size > files.MAX_RECORD_BYTES:
            raise BadRecord(over_long_message())
    return text, metadata


class FileSource(Source):
    """Documents of a sorted list of files. Each file is a part."""

    suffixes: ClassVar[tuple[str, ...]]  # of the files of a folder; (): all files

    def __init__(self, paths: list[str], max_expansion: int) -> None:
        self.paths = paths
        self.max_expansion = max_expansion
        self.files = find_files(paths, self.suffixes)

    def identity(self) -> list[Any]:
        identity = []
        for path in self.files:
            with reading(path):
                status = path.stat()
            identity.append([os.path.abspath(path), status.st_size, status.st_mtime_ns])
        return identity

    def __getstate__(self) -> dict[str, Any]:
        # The source is sent with every part, and the list may have millions of files.
        return {**vars(self), "files": []}

    def describe(self) -> str:
        return f"{len(self.files)} files of data.source.paths={self.paths}"

    def parts(self) -> list[str]:
        return [str(path) for path in self.files]

    def size(self, part: str) -> int | None:
        with reading(Path(part)):
            return Path(part).stat().st_size

    def records(self, part: str, checkpoint: Any = None) -> Iterator[Record]:
        return self.read(Path(part))

    @abstractmethod
    def read(self, path: Path) -> Iterator[Record]:
        """The records of one file."""


def damage_message(error: Exception) -> str:
    """The message for a damaged compressed file."""
    return str(error) if isinstance(error, files.ExpansionError) else f"the compressed file is damaged: {error}"


def over_long_message() -> str:
    """The message for a record of more than MAX_RECORD_BYTES."""
    return f"is longer than {files.MAX_RECORD_BYTES} bytes"


def invalid_utf8(error: UnicodeDecodeError) -> str:
    """The message for a record that is not UTF-8."""
    return f"invalid UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start})"


def missing_column(wanted: str, where: str, columns: list[str]) -> CorpusError:
    """The error for a table without a column of the configured name."""
    return CorpusError(
        f"data.source.text_field: no column {wanted!r} in {where}; its columns are: "
        f"{escape_unprintable(', '.join(columns)) or '(none)'}"
    )


def check_once(wanted: str, where: str, columns: list[str]) -> None:
    """Raises CorpusError if a table has two columns of a name that is needed."""
    if columns.count(wanted) > 1:
        raise CorpusError(
            f"data.source: {where} has {columns.count(wanted)} columns {wanted!r}, and nothing tells which one is "
            "meant; rename or remove one"
        )
