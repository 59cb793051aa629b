"""Hugging Face datasets, which are streamed and can be resumed.

Files of JSON lines, Parquet and CSV are read as those of the sources of these kinds, so they give the same documents,
columns that are not needed may differ between files, and a bad file or record is named and skipped. The package
datasets finds the files. It reads only those in other formats.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import yaml

from cdrmix.config import schema_data
from cdrmix.data.sources.base import SOURCES, BadRecord, Metadata, Record, Source, missing_column, record_location
from cdrmix.data.sources.files import DAMAGED_STREAM, MAX_RECORD_BYTES, StoredFile, open_bytes, reading, walk
from cdrmix.data.sources.parquet_files import text_rows
from cdrmix.data.sources.tables import (
    CommaSeparated,
    JsonLines,
    Parquet,
    csv_rows,
    decoded,
    json_lines,
    parse_cells,
    parse_object,
    parse_row,
)
from cdrmix.durable import disk_full, is_disk_full
from cdrmix.errors import CdrmixError, CorpusError

HUB = "hf://"  # the addresses of files on the hub begin with it
# Options of a builder of datasets that do not change how a file is read.
NAMING = {"name", "version", "data_dir", "data_files", "description", "features"}


@dataclasses.dataclass(frozen=True)
class HubFile:
    """A file of a dataset on the hub, read over the network. address: from HUB on."""

    address: str

    def __str__(self) -> str:
        return self.address

    @property
    def suffix(self) -> str:
        """The last ending of its name."""
        return PurePosixPath(self.address).suffix

    def open(self, mode: str, /) -> Any:
        """A binary stream."""
        from huggingface_hub import HfFileSystem

        return HfFileSystem().open(self.address, mode)

    def stat(self) -> Any:
        """Its size, as `Path.stat` has it."""
        from huggingface_hub import HfFileSystem

        return SimpleNamespace(st_size=HfFileSystem().size(self.address))


@SOURCES("huggingface")
class HuggingFace(Source):
    """A Hugging Face dataset, streamed without shuffling.

    Its identity is its name, so that shards are reused offline. Set a revision if the dataset may change.
    """

    kind = "huggingface"

    def __init__(self, section: schema_data.HuggingFaceSource, max_expansion: int = 1000) -> None:
        self.section = section
        self.max_expansion = max_expansion
        self.parse = partial(parse_streamed, text_field=section.text_field)
        self._dataset: Any = None  # of `_stream`
        self._number = 0  # of the last record
        self._place = (0, 0)  # of the last record of `_read`: number of its file, from 0, and its number there, from 1

    def identity(self) -> list[Any]:
        identity: list[Any] = [self.section.name, self.section.config_name, self.section.revision, self.section.split]
        if (folder := Path(self.section.name)).is_dir():  # a local folder has no revision
            for path in walk(folder, (), frozenset()):
                status = path.stat()
                identity.append([str(path), status.st_size, status.st_mtime_ns])
        return identity

    def describe(self) -> str:
        revision = f", revision {self.section.revision!r}" if self.section.revision else ""
        return f"Hugging Face dataset {self.section.name!r}, split {self.section.split!r}{revision}"

    def parts(self) -> list[str]:
        return [f"{self.section.name}/{self.section.split}"]

    def checkpoint(self) -> Any:
        stream = {"file": self._place} if self._dataset is None else {"stream": self._dataset.state_dict()}
        return {"rows": self._number, **stream}

    def records(self, part: str, checkpoint: Any = None) -> Iterator[Record]:
        try:
            import datasets
            from huggingface_hub.errors import HfHubHTTPError
        except ImportError as error:
            raise CorpusError(
                f"data.source.kind=huggingface needs the package {error.name}: pip install datasets"
            ) from error
        section = self.section
        # the bases of HfHubHTTPError include the error class of the HTTP library of the hub client
        unreachable: tuple[type[Exception], ...] = (OSError, RuntimeError, *HfHubHTTPError.__bases__)
        # what the libraries of the formats raise
        damaged: tuple[type[Exception], ...] = (*DAMAGED_STREAM, ValueError, TypeError, LookupError)
        damaged += (datasets.exceptions.DatasetsError, pickle.UnpicklingError, yaml.YAMLError)
        try:
            builder = datasets.load_dataset_builder(section.name, section.config_name, revision=section.revision)
            self._check_inside(builder)
            found = _files(builder, section.split, self.max_expansion)
            dataset = None if found else builder.as_streaming_dataset(split=section.split)
        except CorpusError:
            raise
        except (*unreachable, *damaged) as error:
            raise self._unreadable(error) from error
        if dataset is None:
            yield from self._read(found, checkpoint, unreachable)
            return
        try:
            yield from self._stream(dataset, checkpoint)
        except CdrmixError:
            raise
        except unreachable as error:
            raise self._unreadable(error) from error
        except damaged as error:
            raise CorpusError(
                f"data.source: the {self.describe()} cannot be read after row {self._number}: {_said(error)}. "
                "Its files are read by the package datasets, which does not name the bad one; use kind: jsonl, parquet "
                "or csv with paths for files of these formats"
            ) from error

    def _check_inside(self, builder: Any) -> None:
        """Raises CorpusError if a file of the dataset is none of its own. Its README.md may name any file of this
        machine, such as a private one of the user, and any address of the network."""
        root = f"{os.path.abspath(self.section.name)}{os.sep}" if os.path.isdir(self.section.name) else HUB
        for address in itertools.chain.from_iterable((builder.config.data_files or {}).values()):
            own = address.rpartition("::")[2]  # zip://a.txt::/x/b.zip is in /x/b.zip
            if not (own if root == HUB else os.path.abspath(own)).startswith(root):
                raise CorpusError(
                    f"data.source: the {self.describe()} names a file that is none of its own: {address}; if you want "
                    "that text, use kind: jsonl, parquet or csv with paths"
                )

    def _read(
        self, found: list[StoredFile], checkpoint: Any, unreachable: tuple[type[Exception], ...]
    ) -> Iterator[Record]:
        """The records of files of known formats, numbered together."""
        self._number, (current, known) = (checkpoint["rows"], checkpoint["file"]) if checkpoint else (0, (0, 0))
        for number, file in enumerate(found):
            if number < current:
                continue
            kind, read = _reader(str(file))
            records = enumerate(read(file, self.section.text_field, self.max_expansion), 1)
            while True:
                try:
                    count, record = next(records, (0, None))
                except CorpusError as error:
                    if isinstance(file, HubFile) and isinstance(error.__cause__, OSError):
                        raise self._unreadable(error.__cause__) from error
                    raise
                except unreachable as error:
                    raise self._unreadable(error) from error
                if record is None:
                    break
                if number == current and count <= known:
                    continue
                self._number += 1
                self._place = (number, count)
                if self._number == 1 and kind == "jsonl" and not record.error:
                    self._check_field(record.raw)
                where = record_location(str(file), record.number)
                error_here = f"{where}: {record.error}" if record.error else ""
                yield Record(self._number, (kind, where, record.raw), record.size, error_here)

    def _check_field(self, line: bytes) -> None:
        """Raises CorpusError if the first record of the dataset is an object without the text."""
        try:
            first = decoded(line)
        except BadRecord:
            return
        if isinstance(first, dict) and self.section.text_field not in first:
            raise missing_column(self.section.text_field, self.describe(), list(first))

    def _stream(self, dataset: Any, checkpoint: Any) -> Iterator[Record]:
        """The rows of files of other formats, as datasets reads them."""
        if dataset.features:
            dataset = dataset.decode(False)  # of images and sounds
        self._number = 0
        if checkpoint is not None:
            dataset.load_state_dict(checkpoint["stream"])
            self._number = checkpoint["rows"]
        self._dataset = dataset
        for row in dataset:
            self._number += 1
            if self.section.text_field not in row:
                raise missing_column(self.section.text_field, self.describe(), list(row))
            size = sum(len(cell) for cell in row.values() if isinstance(cell, str))
            yield Record(self._number, ("row", "", row), size)

    def _unreadable(self, error: BaseException) -> CdrmixError:
        cause: BaseException | None = error
        while cause is not None:  # libraries wrap the system error
            if is_disk_full(cause):
                return disk_full(
                    f"the cache of the {self.describe()}",
                    "Free some space, or set HF_HOME to a folder on another disk. What was prepared is kept.",
                )
            cause = cause.__cause__ or cause.__context__
        if Path(self.section.name).is_dir():
            return CorpusError(
                f"data.source: cannot read the {self.describe()}: {_said(error)}. Check the files of this folder, and "
                "data.source.config_name and split"
            )
        return CorpusError(
            f"data.source: cannot stream the {self.describe()}: {_said(error)}. Check data.source.name, config_name, "
            "revision and split, and that this machine reaches huggingface.co (HF_HUB_OFFLINE unset; HF_TOKEN set if "
            "it is gated); the preparation is then resumed. If the connection is unreliable, download the dataset "
            "and use kind: parquet or jsonl with paths."
        )


def _said(error: BaseException) -> str:
    """The message of an error of a library, without PyTorch's advice to run the code of a file."""
    return "a file asks for code, which is never run" if isinstance(error, pickle.UnpicklingError) else str(error)


def _files(builder: Any, split: str, max_expansion: int) -> list[StoredFile]:
    """The files of a split, if their formats are known and the dataset asks for no other way to read them.

    Files that end in .json are JSON lines or one array. The first of them tells which.
    """
    config = builder.config
    usual = type(config)()
    changed = {field.name for field in dataclasses.fields(config) if field.name not in NAMING}
    if any(getattr(config, name) != getattr(usual, name) for name in changed):
        return []
    files: list[StoredFile] = []
    for address in (config.data_files or {}).get(split, ()):
        if not address.lower().endswith(KNOWN + JSON) or not (address.startswith(HUB) or Path(address).is_file()):
            return []
        files.append(HubFile(address) if address.startswith(HUB) else Path(address))
    unclear = next((file for file in files if str(file).lower().endswith(JSON)), None)
    return files if unclear is None or _begins_with_object(unclear, max_expansion) else []


def _begins_with_object(file: StoredFile, max_expansion: int) -> bool:
    """Whether the first line of a file is a JSON object. A damaged file counts as one with it."""
    with reading(file), open_bytes(file, max_expansion) as stream:
        try:
            line = stream.read(4).removeprefix(b"\xef\xbb\xbf")
            if line.startswith(b"{"):  # an array can be one line of any length
                line += stream.readline(MAX_RECORD_BYTES)
        except DAMAGED_STREAM:
            return True
    try:
        return isinstance(decoded(line), dict)
    except BadRecord:
        return False


KNOWN = (*JsonLines.suffixes, *Parquet.suffixes, *CommaSeparated.suffixes)
JSON = (".json", ".json.gz", ".json.zst")


def _reader(name: str) -> tuple[str, Callable[[StoredFile, str, int], Iterator[Record]]]:
    """The kind of a file, and the function that reads it."""
    if name.lower().endswith(Parquet.suffixes):
        return "parquet", text_rows
    if name.lower().endswith(CommaSeparated.suffixes):
        return "csv", csv_rows
    return "jsonl", lambda path, text_field, max_expansion: json_lines(path, max_expansion)


def parse_streamed(raw: tuple[str, str, Any], text_field: str) -> tuple[str, Metadata]:
    """The text and the metadata of a record. raw: the kind of its file, its place there, and what was read."""
    kind, where, record = raw
    try:
        return PARSERS[kind](record, text_field)
    except BadRecord as error:
        raise BadRecord(f"{where}: {error}" if where else str(error)) from error


def parse_stream_row(row: dict[str, Any], text_field: str) -> tuple[str, Metadata]:
    """The text and the other fields of a row that are scalars or mappings of them."""
    text = row[text_field]
    if not isinstance(text, str):
        raise BadRecord(f"field {text_field!r} is not a string")
    return text, {name: value for name, value in row.items() if name != text_field and _is_kept(value)}


def _is_kept(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_kept, value.values()))
    return isinstance(value, str | int | float | None)


PARSERS: dict[str, Callable[[Any, str], tuple[str, Metadata]]] = {
    "jsonl": parse_object,
    "csv": parse_row,
    "parquet": parse_cells,
    "row": parse_stream_row,
}
