"""What a source of text is: parts, read record by record, each parsed into a document or refused with a reason.

Reading a part is cheap and goes on in one process; parsing a record costs more and may happen in any other. A record
that cannot be used is counted by a `BadRecords`, shown with its file and line, and skipped; more of them than the limit
allows, or a source that cannot be read at all, are a CorpusError.
"""

from __future__ import annotations

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

Meta = Mapping[str, Any]


@dataclass(frozen=True)
class Document:
    """One text and where it came from: `source` is the kind of source, `id` its file and line or row."""

    text: str
    source: str
    id: str
    meta: Meta = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """What lies at line or row `number` of a part, unparsed; or, when it could not be read, the reason in `error`.

    number: from 1; 0 for a part that is one document.
    """

    number: int
    raw: Any = None
    size: int = 0  # bytes, about
    error: str = ""


class BadRecord(ValueError):
    """A record is no document; the message is the reason."""


class BadRecords:
    """Counts the records that could not be read, says the first few, and gives up beyond `limit` of them."""

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        self.limit = limit
        self.count = 0
        self.shown: list[str] = []
        self._say = say

    def add(self, where: str, reason: str) -> None:
        """Count one more; raises CorpusError naming it when it is one too many."""
        self.add_many(1, [f"{where}: {reason}"])

    def add_many(self, count: int, shown: list[str]) -> None:
        """Count some, of which the first few are given as text; raises CorpusError when they are too many."""
        self.count += count
        shown = [escape_unprintable(record).replace("\n", " ") for record in shown]
        for record in shown[: BAD_RECORDS_SHOWN - len(self.shown)]:
            self.shown.append(record)
            self._say(f"skipped a bad record: {record}")
        if count and self.count > self.limit:
            later = f"; a later one {shown[-1]}" if shown[-1] != self.shown[0] else ""
            raise CorpusError(
                f"{self.count} bad records in the corpus, more than data.max_bad_records={self.limit} allows; the "
                f"first is {self.shown[0]}{later}. Mend the corpus, or raise data.max_bad_records."
            )


class Source(ABC):
    """A stream of documents that can be read again and again, always in the same order.

    parse: turns a record's `raw` into (text, meta), or raises BadRecord. It can be pickled and sent to other processes.
    """

    kind: ClassVar[str]
    parse: Callable[[Any], tuple[str, Meta]]

    @abstractmethod
    def identity(self) -> list[Any]:
        """What tells this text from other text, as JSON values, without reading it."""

    @abstractmethod
    def describe(self) -> str:
        """What is read, for messages."""

    @abstractmethod
    def parts(self) -> list[str]:
        """Names of what can be read apart: files, as a rule."""

    def size(self, part: str) -> int | None:
        """Bytes of a part as it is stored, where they are known."""
        return None

    @abstractmethod
    def records(self, part: str, checkpoint: Any = None) -> Iterator[Record]:
        """Every record of a part in order; from `checkpoint` on, where the source gives any."""

    def checkpoint(self) -> Any:
        """Where the last `records` stands, as a JSON value; None for sources that are read from the start again."""
        return None

    def documents(self, bad: BadRecords) -> Iterator[Document]:
        """Every document in order; malformed records go to `bad`."""
        for part in self.parts():
            for record in self.records(part):
                where = record_location(part, record.number)
                try:
                    text, meta = parse_record(self.parse, record)
                except BadRecord as error:
                    bad.add(where, str(error))
                else:
                    yield Document(text, self.kind, where, meta)


SOURCES = Registry[Callable[[Any, int], Source]]("source")


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def record_location(part: str, number: int) -> str:
    """Where a record is, for people; a name that is not UTF-8 with its odd bytes spelled out."""
    shown = part.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return f"{shown}:{number}" if number else shown


def parse_record(parse: Callable[[Any], tuple[str, Meta]], record: Record) -> tuple[str, Meta]:
    """(text, meta) of a record. Raises BadRecord, also for a text that has no UTF-8 form or is too long."""
    if record.error:
        raise BadRecord(record.error)
    text, meta = parse(record.raw)
    if len(text) > files.MAX_RECORD_BYTES // 4 or not text.isascii():
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:  # a lone surrogate from a JSON escape, a byte that was not UTF-8
            raise BadRecord("the text is not valid UTF-8") from error
        if size > files.MAX_RECORD_BYTES:
            raise BadRecord(over_long_message())
    return text, meta


class FileSource(Source):
    """Documents read from a sorted list of files, each of them a part."""

    suffixes: ClassVar[tuple[str, ...]]  # of the files taken from a folder; () takes every file

    def __init__(self, paths: list[str], max_expansion: int) -> None:
        self.paths = paths
        self.max_expansion = max_expansion
        self.files = find_files(paths, self.suffixes)

    def identity(self) -> list[Any]:
        identity = []
        for path in self.files:
            with reading(path):
                status = path.stat()
            identity.append([str(path.absolute()), status.st_size, status.st_mtime_ns])
        return identity

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "files": []}  # sent with every part: of millions, the list would be too long

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
        """Every record of one file."""


def damage_message(error: Exception) -> str:
    """What is wrong with a compressed file."""
    return str(error) if isinstance(error, files.ExpansionError) else f"the compressed file is damaged: {error}"


def over_long_message() -> str:
    """What is wrong with a record of more than MAX_RECORD_BYTES."""
    return f"is longer than {files.MAX_RECORD_BYTES} bytes"


def invalid_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with a record that does not decode."""
    return f"invalid UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start})"


def missing_column(wanted: str, where: str, columns: list[str]) -> CorpusError:
    """The error for a table that has no column of the configured name."""
    return CorpusError(
        f"data.source.text_field: no column {wanted!r} in {where}; its columns are: "
        f"{escape_unprintable(', '.join(columns)) or '(none)'}"
    )
