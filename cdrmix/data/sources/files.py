"""Text files: finding them by path, folder or glob, and reading them decompressed in bounded memory."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, cast

import zstandard

from cdrmix.errors import CorpusError

# The longest text of any source; a longer record is bad. Filtering a text takes about 50 bytes per word in addition.
MAX_RECORD_BYTES = 64 * 2**20
MIN_EXPANSION_LIMIT = 64 * 2**20  # a compressed file may always expand to this size


class ExpansionError(ValueError):
    """A compressed file expands to more than its limit. max_expansion: the configured ratio."""

    def __init__(self, max_expansion: int) -> None:
        super().__init__(
            f"it expands to more than {max_expansion} times its size; if it is not an attack, raise "
            f"data.max_expansion={max_expansion}"
        )


class StoredFile(Protocol):
    """A file that can be opened by itself: a `Path`, or a file of a data set on the hub. str() is its name."""

    @property
    def suffix(self) -> str:
        """The last ending of its name, with the dot."""

    def open(self, mode: str, /) -> Any:
        """A binary stream of its stored bytes, for the mode rb."""

    def stat(self) -> Any:
        """An object whose `st_size` is the number of its stored bytes."""


DAMAGED_STREAM = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError, ExpansionError)


def find_files(paths: list[str], suffixes: tuple[str, ...], key: str = "data.source.paths") -> list[Path]:
    """The files of `paths` (files, folders searched for `suffixes`, globs), sorted and without duplicates.

    key: of the configuration, for messages. Raises CorpusError if a path has no files.
    """
    found: set[Path] = set()
    for given in paths:
        expanded = os.path.expanduser(given)
        matches = [expanded] if os.path.exists(expanded) else glob(expanded, recursive=True)
        if not matches:
            raise CorpusError(
                f"{key}: nothing is at {given!r} (looked for a file, a folder or a glob at {os.path.abspath(expanded)})"
            )
        files: list[Path] = []
        for match in map(Path, matches):
            files.extend(walk(match, suffixes, frozenset()) if match.is_dir() else [match])
        if not files:
            wanted = f"file ending in {' or '.join(suffixes)}" if suffixes else "file"
            raise CorpusError(f"{key}: no {wanted} in {given!r} ({os.path.abspath(expanded)})")
        found.update(files)
    return sorted(found)


def walk(root: Path, suffixes: tuple[str, ...], excluded: frozenset[str]) -> Iterator[Path]:
    """Files below `root` in sorted order, without hidden files and without folders with a name in `excluded`."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in excluded and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and (not suffixes or name.lower().endswith(suffixes)):
                yield Path(folder, name)


@contextmanager
def reading(path: StoredFile) -> Iterator[None]:
    """Raises CorpusError if the operating system cannot read `path`."""
    try:
        yield
    except gzip.BadGzipFile:
        raise
    except OSError as error:
        raise CorpusError(f"data.source: cannot read {path}: {error.strerror or error}") from error


def expansion_limit(path: StoredFile, max_expansion: int) -> int:
    """The bytes to which a file may expand."""
    return max(path.stat().st_size * max_expansion, MIN_EXPANSION_LIMIT)


def open_bytes(path: StoredFile, max_expansion: int) -> BinaryIO:
    """Opens `path` for reading; .gz and .zst files are decompressed. A damaged file raises one of DAMAGED_STREAM.

    max_expansion: maximum ratio of decompressed to compressed size; 64 MiB are always allowed.
    """
    opened = path.open("rb")
    if path.suffix.lower() == ".gz":
        expanded: PartialGzipFile | ZstandardFile = PartialGzipFile(opened)
    elif path.suffix.lower() == ".zst":
        expanded = ZstandardFile(opened)
    else:
        return cast(BinaryIO, opened)
    limited = SizeLimitedFile(expanded, expansion_limit(path, max_expansion), max_expansion)
    return cast(BinaryIO, io.BufferedReader(limited, 2**20))


class PartialGzipFile(gzip.GzipFile):
    """A .gz file that returns all data before the first damaged block, and raises only then."""

    def __init__(self, opened: IO[bytes]) -> None:
        super().__init__(fileobj=opened, mode="rb")
        self._opened = opened

    def readinto(self, buffer: Any) -> int:
        return self.readinto1(buffer)

    def close(self) -> None:
        super().close()
        self._opened.close()


class WrapperFile(io.RawIOBase):
    """A file that reads from another file and closes it."""

    def __init__(self, file: IO[bytes] | PartialGzipFile | ZstandardFile) -> None:
        self._file: Any = file

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


class SizeLimitedFile(WrapperFile):
    """A decompressed file that raises ExpansionError after `limit` bytes."""

    def __init__(self, file: PartialGzipFile | ZstandardFile, limit: int, max_expansion: int) -> None:
        super().__init__(file)
        self._left, self._max_expansion = limit, max_expansion

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self._left -= count
        if self._left < 0:
            raise ExpansionError(self._max_expansion)
        return count


class ZstandardFile(WrapperFile):
    """Reads all frames of a .zst file. A truncated last frame raises EOFError, unlike in zstandard."""

    def __init__(self, opened: IO[bytes]) -> None:
        super().__init__(opened)
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
        self._frame = self._decompressor.decompressobj()
        self._input = b""
        self._output = memoryview(b"")
        self._inside_frame = False

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            # Small reads, because a block that repeats one byte can expand by a factor of more than 10,000.
            chunk = self._input or self._file.read(2**13)
            if not chunk:
                if self._inside_frame:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self._output = memoryview(self._frame.decompress(chunk))
            self._input = b""
            self._inside_frame = not self._frame.eof
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count


class OverLongRecord(Exception):
    """A record of a text file has more than MAX_RECORD_BYTES."""


class RecordLines:
    """The lines of a text stream with their line ends, for a reader whose records may have several lines.

    number: lines read so far. Raises OverLongRecord, after the line, if the lines since `begin_record` have more than
    MAX_RECORD_BYTES in UTF-8.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self.number = 0
        self._stream = stream
        self._bytes = 0

    def begin_record(self) -> None:
        """Marks the next line as the first line of a record."""
        self._bytes = 0

    def __iter__(self) -> RecordLines:
        return self

    def __next__(self) -> str:
        line = self._stream.readline(MAX_RECORD_BYTES + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self._bytes += len(line) if line.isascii() else len(line.encode("utf-8", "surrogateescape"))
        if self._bytes > MAX_RECORD_BYTES:
            while line and not line.endswith(("\n", "\r")):
                line = self._stream.readline(2**20)
            raise OverLongRecord
        return line


def read_at_most(stream: BinaryIO, limit: int) -> bytes:
    """The first `limit` bytes of a stream, or all of it."""
    pieces, left = [], limit
    while left and (piece := stream.read(min(left, 2**20))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
