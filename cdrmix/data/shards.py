"""Shards: tokenised text on disk, memory-mapped, every file known by its size and SHA-256.

A folder of shards holds, for each split:
    <split>.tokens-00000.bin ...  uint16 or uint32, an end-of-text, then all documents end to end, each closed by an
                                  end-of-text; cut every `shard_tokens` tokens
    <split>.documents.bin         int64 [documents + 1], token number of the end-of-text before each document
    <split>.rows.bin              int64 [rows + 1], number of each row's first segment
    <split>.segment-starts.bin    int64 [segments], token number of each segment's first input (see packing.py)
    <split>.segment-lengths.bin   int32 [segments], positions of each segment
    <split>.target-counts.bin     int64 [vocab_size], how often each id is a target
beside tokenizer.json and index.json, which is written last. Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cdrmix.data.packing import pack
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.durable import sha256_file
from cdrmix.errors import ShardError

FORMAT = 4  # 4: no file of the texts' lengths, which nothing read
SPLITS = ("train", "valid")
PACKED_TOGETHER = 2**20  # documents: rows are packed within blocks of so many, which bounds memory

Array = np.ndarray[Any, np.dtype[Any]]


class HashedFile:
    """A file being written, with the SHA-256 of what went into it; `close` brings it to the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._hash = hashlib.sha256()
        self._file = path.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def close(self) -> dict[str, Any]:
        """The file's entry in the index."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self.size, "sha256": self._hash.hexdigest()}

    def abandon(self) -> None:
        """Let go of the file, if it is open, whatever has become of its contents."""
        with suppress(OSError):  # a full disk fails the flush of what is buffered once more
            self._file.close()


def write_file(path: Path, data: bytes) -> dict[str, Any]:
    """Write a whole file and bring it to the disk; its entry in the index."""
    file = HashedFile(path)
    try:
        file.write(data)
        return file.close()
    finally:
        file.abandon()


class SplitWriter:
    """Writes one split: documents first, one `add` each, then `close` packs the rows.

    A context manager: left by an error, it lets go of its files.
    """

    def __init__(self, folder: Path, name: str, *, vocab_size: int, shard_tokens: int, row_length: int) -> None:
        self.folder, self.name = folder, name
        self.shard_tokens, self.row_length = shard_tokens, row_length
        self.dtype = token_dtype(vocab_size)
        self.files: dict[str, dict[str, Any]] = {}
        self.documents = self.tokens = self.text_bytes = self.rows = 0
        self._target_counts = np.zeros(vocab_size, np.int64)
        self._created: list[HashedFile] = []
        self._shard: HashedFile | None = None
        self._starts = self._create("documents")

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._created:
            file.abandon()

    def add(self, ids: Array, text_bytes: int) -> None:
        """Append a document: its ids, integers [tokens], the last end-of-text, and the UTF-8 bytes of its text."""
        tokens = ids.astype(self.dtype)
        if not self.documents:
            self._append(tokens[-1:])
        self._starts.write(np.int64(self.tokens - 1).astype("<i8").tobytes())
        targets, counts = np.unique(tokens, return_counts=True)
        self._target_counts[targets] += counts
        self.documents += 1
        self.text_bytes += text_bytes
        self._append(tokens)

    def close(self) -> dict[str, Any]:
        """Pack the rows; the split's entry in the index. `files` has then an entry for every file."""
        self._close_shard()
        self._starts.write(np.int64(self.tokens - 1).astype("<i8").tobytes())
        self.files[self._starts.path.name] = self._starts.close()
        self._pack_rows()
        counts = self._create("target-counts")
        counts.write(self._target_counts.astype("<i8").tobytes())
        self.files[counts.path.name] = counts.close()
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "rows": self.rows,
            "shards": [name for name in self.files if ".tokens-" in name],
        }

    def _append(self, tokens: Array) -> None:
        while len(tokens):
            if self._shard is None:
                self._shard = self._create(f"tokens-{self.tokens // self.shard_tokens:05d}")
            part = tokens[: self.shard_tokens - self.tokens % self.shard_tokens]
            self._shard.write(part.tobytes())
            self.tokens += len(part)
            tokens = tokens[len(part) :]
            if self.tokens % self.shard_tokens == 0:
                self._close_shard()

    def _create(self, contents: str) -> HashedFile:
        file = HashedFile(self.folder / f"{self.name}.{contents}.bin")
        self._created.append(file)
        return file

    def _close_shard(self) -> None:
        if self._shard is not None:
            self.files[self._shard.path.name] = self._shard.close()
            self._shard = None

    def _pack_rows(self) -> None:
        document_starts = np.memmap(self._starts.path, "<i8", "r")
        rows, starts, lengths = map(self._create, ("rows", "segment-starts", "segment-lengths"))
        segments = 0
        for first in range(0, self.documents, PACKED_TOGETHER):
            block = np.asarray(document_starts[first : first + PACKED_TOGETHER + 1], np.int64)
            packed = pack(block, self.row_length)
            rows.write((packed.first_segment[:-1] + segments).astype("<i8").tobytes())
            starts.write(packed.starts.astype("<i8").tobytes())
            lengths.write(packed.lengths.astype("<i4").tobytes())
            segments += len(packed.starts)
            self.rows += len(packed.first_segment) - 1
        rows.write(np.int64(segments).astype("<i8").tobytes())
        for file in (rows, starts, lengths):
            self.files[file.path.name] = file.close()


class Split:
    """One split, memory-mapped.

    documents, tokens (end-of-text ones included), rows: counts. text_bytes: UTF-8 bytes of the original text.
    row_length: positions of a row. end_of_text_id: also the filling of a row's tail.
    """

    def __init__(self, shards: ShardSet, name: str, entry: dict[str, Any], index: dict[str, Any]) -> None:
        self.name = name
        self.documents: int = entry["documents"]
        self.tokens: int = entry["tokens"]
        self.text_bytes: int = entry["text_bytes"]
        self.rows: int = entry["rows"]
        self.vocab_size: int = index["vocab_size"]
        self.row_length: int = index["row_length"]
        self.end_of_text_id: int = index["end_of_text_id"]
        self._shards = shards
        self._shard_tokens: int = index["shard_tokens"]
        self._tokens = [self._map(shard, index["dtype"]) for shard in entry["shards"]]
        self._document_starts = self._map(f"{name}.documents.bin", "<i8")
        self._first_segment = self._map(f"{name}.rows.bin", "<i8")
        self._segment_starts = self._map(f"{name}.segment-starts.bin", "<i8")
        self._segment_lengths = self._map(f"{name}.segment-lengths.bin", "<i4")

    def _map(self, file: str, dtype: str) -> Array:
        # As a plain array over the same mapping: slicing np.memmap itself costs several times as much.
        return np.asarray(np.memmap(self._shards.path / file, dtype, "r"))

    def read(self, start: int, stop: int) -> Array:
        """int64 [stop - start]: tokens number start .. stop - 1 of the split."""
        parts = []
        while start < stop:
            shard, offset = divmod(start, self._shard_tokens)
            part = self._tokens[shard][offset : offset + stop - start]
            parts.append(part)
            start += len(part)
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    def segments(self, row: int) -> tuple[Array, Array]:
        """(starts int64, lengths int32) of the segments of a row."""
        first, last = self._first_segment[row], self._first_segment[row + 1]
        return self._segment_starts[first:last], self._segment_lengths[first:last]

    def targets_in_rows(self, rows: Array) -> int:
        """How many positions of the rows, which may repeat, have a target."""
        return sum(int(self.segments(row)[1].sum()) for row in rows)

    def text(self) -> Iterator[bytes]:
        """The original text of every document, UTF-8, in order."""
        tokenizer = self._shards.tokenizer
        for start, stop in zip(self._document_starts[:-1], self._document_starts[1:], strict=True):
            yield tokenizer.decode_bytes(self.read(int(start) + 1, int(stop)).tolist())

    def token_byte_lengths(self) -> list[int]:
        """For every id that the tokenizer knows the number of bytes it stands for."""
        return self._shards.tokenizer.byte_lengths()

    def token_counts(self) -> Array:
        """int64 [vocab_size]: how often each id is a target."""
        return np.asarray(self._map(f"{self.name}.target-counts.bin", "<i8")).astype(np.int64)


class ShardSet:
    """A prepared corpus: both splits, the tokenizer they were made with, and the report of the preparation.

    Made by `open_shards`. vocab_size: of the model configured; the tokenizer may know fewer ids.
    fingerprint: SHA-256 over the hashes of all files; the same text, split, packed and cut alike, has the same one.
    """

    def __init__(self, path: Path, index: dict[str, Any]) -> None:
        self.path = path
        self.key: str = index["key"]
        self.vocab_size: int = index["vocab_size"]
        # Of the contents alone: touched or moved files of the corpus give another key, but the same fingerprint.
        self.fingerprint = hashlib.sha256(json.dumps(index["files"], sort_keys=True).encode("utf-8")).hexdigest()
        self.tokenizer_path = path / "tokenizer.json"
        self.tokenizer_fingerprint: str = index["tokenizer_fingerprint"]
        self.end_of_text: str = index["end_of_text"]
        self.report: dict[str, Any] = index["report"]
        self.train, self.valid = (Split(self, name, index["splits"][name], index) for name in SPLITS)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that the shards were made with."""
        return TextTokenizer.load(self.tokenizer_path, self.end_of_text)


def open_shards(path: Path, *, verify: bool = True) -> ShardSet:
    """Map a folder of shards, after comparing every file with the size and SHA-256 that its index gives.

    verify: False compares the index and the sizes alone, for a folder that another process has just verified.

    Raises ShardError naming the file, what was expected and what was found.
    """
    path = Path(path)
    index = _read_index(path)
    for name, entry in index["files"].items():
        file = path / name
        if not file.is_file():
            raise ShardError(f"{file} is missing. {_remedy(path)}")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise ShardError(
                f"{file} has {size} bytes, not {entry['bytes']}: it is cut short or altered. {_remedy(path)}"
            )
        found = sha256_file(file) if verify else entry["sha256"]
        if found != entry["sha256"]:
            raise ShardError(f"{file} is corrupt: its SHA-256 is {found}, not {entry['sha256']}. {_remedy(path)}")
    return ShardSet(path, index)


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write index.json, the last file of a folder of shards, sealed with a hash of its own."""
    sealed = {"sha256": _seal(index), **index}
    write_file(folder / "index.json", json.dumps(sealed, indent=1).encode("utf-8"))


def token_dtype(vocab_size: int) -> str:
    """The narrowest numpy dtype, little-endian, that holds ids below vocab_size."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


def _read_index(path: Path) -> dict[str, Any]:
    file = path / "index.json"
    try:
        index = json.loads(file.read_bytes())
        expected = index.pop("sha256")
    except OSError as error:
        raise ShardError(f"{path} holds no finished shards: cannot read index.json: {error.strerror}") from error
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ShardError(f"{file} is corrupt: {error}. {_remedy(path)}") from error
    found = _seal(index)
    if found != expected:
        raise ShardError(f"{file} is corrupt: its SHA-256 is {found}, not {expected}. {_remedy(path)}")
    if index["format"] != FORMAT:
        raise ShardError(f"{file} is of format {index['format']}; this version reads {FORMAT}. {_remedy(path)}")
    return dict(index)


def _seal(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode("utf-8")).hexdigest()


def _remedy(path: Path) -> str:
    return f"Delete the folder {path}; it is then prepared anew."
