"""Shards: tokenised text on disk, memory-mapped; the index has the size and the SHA-256 of every file.

A folder of shards holds, for each split:
    <split>.tokens-00000.bin ...  uint16 or uint32, an end-of-text, then all documents end to end, each with an
    end-of-text
                                  at its end; cut every `shard_tokens` tokens
    <split>.weights-00000.bin ... uint8, only if a loss weight differs from 1: for every token the number of its weight
    in
                                  the list of the index; cut as the tokens are
    <split>.documents.bin         int64 [documents + 1], token number of the end-of-text before each document
    <split>.document-strata.bin   uint16 [documents], only with more than one stratum: the stratum of each document
    <split>.rows.bin              int64 [rows + 1], number of each row's first segment
    <split>.row-weights.bin       float64 [rows], only with weights: the sum of the weights of the targets of each row
    <split>.segment-starts.bin    int64 [segments], token number of the first input of each segment (see packing.py)
    <split>.segment-lengths.bin   int32 [segments], positions of each segment
    <split>.target-counts.bin     int64 [vocab_size], how often each id is a target
and tokenizer.json and index.json, which is written last. Numbers are little-endian.

A stratum is a domain and a length class. A row has documents of one stratum, and the rows of a stratum are consecutive.
So a mixture of strata is a choice of rows.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cdrmix.data.packing import pack
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.durable import ChecksummedFile, sha256_file, write_checksummed
from cdrmix.errors import ShardError

FORMAT = 5  # 5: strata and loss weights
SPLITS = ("train", "valid")
COUNT_BLOCK_TOKENS = 2**20  # tokens whose ids are counted together
PACK_BLOCK_DOCUMENTS = 2**20  # rows are packed within blocks of this many documents, which bounds memory
MAX_WEIGHTS = 2**8  # different loss weights

Array = np.ndarray[Any, np.dtype[Any]]


class Stratum(NamedTuple):
    """The rows of one domain and length class: first_row .. first_row + rows - 1.

    length_class: k for documents with at least length_classes[k - 1] and fewer than length_classes[k] tokens, including
    the end-of-text. tokens: of its documents.
    """

    domain: str
    length_class: int
    first_row: int
    rows: int
    tokens: int
    documents: int


class Piece(NamedTuple):
    """The part of a document in a row: `tokens` targets from its target number `offset` on, and their text."""

    document: int
    domain: str
    offset: int
    tokens: int
    document_tokens: int
    text: str


class SplitWriter:
    """Writes one split: `add` appends a document, and `close` packs the rows.

    domains: their names. length_classes: ascending numbers of tokens that separate the length classes; empty: one
    class.
    weights: whether documents may have loss weights. A context manager: on an error it closes its files.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        vocab_size: int,
        shard_tokens: int,
        row_length: int,
        domains: Sequence[str] = ("text",),
        length_classes: Sequence[int] = (),
        weights: bool = False,
    ) -> None:
        self.folder, self.name = folder, name
        self.shard_tokens, self.row_length = shard_tokens, row_length
        self.dtype = token_dtype(vocab_size)
        self.files: dict[str, dict[str, Any]] = {}
        self.documents = self.tokens = self.text_bytes = self.rows = 0
        self._strata = [(domain, number) for domain in domains for number in range(len(length_classes) + 1)]
        assert 0 < len(self._strata) < 2**16, "strata are numbered with 16 bits"
        self._length_classes = [*length_classes]
        self._stratum_tokens = [0] * len(self._strata)
        self._stratum_documents = [0] * len(self._strata)
        self._target_counts = np.zeros(vocab_size, np.int64)
        self._uncounted: list[Array] = []
        self._uncounted_tokens = 0
        self._created: list[ChecksummedFile] = []
        self._shard: ChecksummedFile | None = None
        self._starts = self._create("documents")
        self._document_strata = self._create("document-strata") if len(self._strata) > 1 else None
        self._weight_codes: dict[float, int] | None = {1.0: 0} if weights else None  # loss weight -> its code
        self._weights_shard: ChecksummedFile | None = None

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._created:
            file.discard()

    def add(self, ids: Array, text_bytes: int, *, domain: int = 0, weights: Array | None = None) -> None:
        """Appends a document.

        ids: integers [tokens], the last one end-of-text. text_bytes: UTF-8 bytes of its text. domain: its number.
        weights: float32 [tokens], the loss weight of each token as a target; None: all 1.
        Raises ValueError for more than 256 different weights in a split, and for a negative or infinite weight.
        """
        tokens = ids.astype(self.dtype)
        codes = self._encode_weights(weights, len(tokens))
        if not self.documents:
            self._append(tokens[-1:], None if codes is None else bytes(1))
        self._starts.write(np.int64(self.tokens - 1).astype("<i8").tobytes())
        stratum = domain * (len(self._length_classes) + 1) + bisect_right(self._length_classes, len(tokens))
        if self._document_strata is not None:
            self._document_strata.write(np.uint16(stratum).astype("<u2").tobytes())
        self._stratum_tokens[stratum] += len(tokens)
        self._stratum_documents[stratum] += 1
        self._uncounted.append(tokens)
        self._uncounted_tokens += len(tokens)
        if self._uncounted_tokens >= COUNT_BLOCK_TOKENS:
            self._count_targets()
        self.documents += 1
        self.text_bytes += text_bytes
        self._append(tokens, codes)

    def close(self) -> dict[str, Any]:
        """Packs the rows and fills `files`. Returns the entry of the split in the index."""
        self._close_shard()
        self._starts.write(np.int64(self.tokens - 1).astype("<i8").tobytes())
        self._finish(self._starts)
        if self._document_strata is not None:
            self._finish(self._document_strata)
        if self._weight_codes is not None and len(self._weight_codes) == 1:  # all weights are 1: no files for them
            for name in [name for name in self.files if ".weights-" in name]:
                (self.folder / name).unlink()
                del self.files[name]
            self._weight_codes = None
        strata = self._pack_rows()
        self._count_targets()
        counts = self._create("target-counts")
        counts.write(self._target_counts.astype("<i8").tobytes())
        self._finish(counts)
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "rows": self.rows,
            "strata": [stratum._asdict() for stratum in strata],
            "weights": [*(self._weight_codes or {1.0: 0})],
            "shards": [name for name in self.files if ".tokens-" in name],
        }

    def _count_targets(self) -> None:
        if self._uncounted:
            self._target_counts += np.bincount(np.concatenate(self._uncounted), minlength=len(self._target_counts))
        self._uncounted, self._uncounted_tokens = [], 0

    def _encode_weights(self, weights: Array | None, count: int) -> bytes | None:
        """The weights as codes, with new values added to the table; None if the split has no weights."""
        if self._weight_codes is None:
            assert weights is None, "SplitWriter(weights=True) for documents with weights"
            return None
        if weights is None:
            return bytes(count)
        assert len(weights) == count, f"{len(weights)} weights for {count} tokens"
        values, inverse = np.unique(np.asarray(weights, np.float32), return_inverse=True)
        for value in values.tolist():
            if not 0 <= value < float("inf"):
                raise ValueError(f"a loss weight of {value}; weights are finite numbers of at least 0")
            if self._weight_codes.setdefault(value, len(self._weight_codes)) == MAX_WEIGHTS:
                raise ValueError(f"more than {MAX_WEIGHTS} different loss weights; use fewer in data.objectives.spans")
        return np.array([self._weight_codes[value] for value in values.tolist()], np.uint8)[inverse].tobytes()

    def _append(self, tokens: Array, codes: bytes | None) -> None:
        while len(tokens):
            if self._shard is None:
                number = f"{self.tokens // self.shard_tokens:05d}"
                self._shard = self._create(f"tokens-{number}")
                self._weights_shard = None if codes is None else self._create(f"weights-{number}")
            part = tokens[: self.shard_tokens - self.tokens % self.shard_tokens]
            self._shard.write(part.tobytes())
            if self._weights_shard is not None and codes is not None:
                self._weights_shard.write(codes[: len(part)])
                codes = codes[len(part) :]
            self.tokens += len(part)
            tokens = tokens[len(part) :]
            if self.tokens % self.shard_tokens == 0:
                self._close_shard()

    def _create(self, contents: str) -> ChecksummedFile:
        file = ChecksummedFile(self.folder / f"{self.name}.{contents}.bin")
        self._created.append(file)
        return file

    def _finish(self, file: ChecksummedFile) -> None:
        self.files[file.path.name] = file.close()

    def _close_shard(self) -> None:
        for file in (self._shard, self._weights_shard):
            if file is not None:
                self._finish(file)
        self._shard = self._weights_shard = None

    def _pack_rows(self) -> list[Stratum]:
        rows, segment_starts, segment_lengths = map(self._create, ("rows", "segment-starts", "segment-lengths"))
        row_weights = self._create("row-weights") if self._weight_codes else None
        segments = 0
        strata = []
        for number, (domain, length_class) in enumerate(self._strata):
            first_row = self.rows
            for starts, positions in self._documents_of(number):
                packed = pack(starts, positions, self.row_length)
                rows.write((packed.first_segment[:-1] + segments).astype("<i8").tobytes())
                segment_starts.write(packed.starts.astype("<i8").tobytes())
                segment_lengths.write(packed.lengths.astype("<i4").tobytes())
                segments += len(packed.starts)
                self.rows += len(packed.first_segment) - 1
                if row_weights is not None:
                    sums = self._segment_weights(packed.starts, packed.lengths)
                    row_weights.write(np.add.reduceat(sums, packed.first_segment[:-1]).astype("<f8").tobytes())
            counts = (self._stratum_tokens[number], self._stratum_documents[number])
            strata.append(Stratum(domain, length_class, first_row, self.rows - first_row, *counts))
        rows.write(np.int64(segments).astype("<i8").tobytes())
        for file in (rows, segment_starts, segment_lengths, *([row_weights] if row_weights else [])):
            self._finish(file)
        return strata

    def _documents_of(self, stratum: int) -> Iterator[tuple[Array, Array]]:
        """(starts, positions), int64, of the documents of a stratum in order, block by block."""
        starts = np.memmap(self._starts.path, "<i8", "r")
        of_documents = None if self._document_strata is None else np.memmap(self._document_strata.path, "<u2", "r")
        for first in range(0, self.documents if self._stratum_documents[stratum] else 0, PACK_BLOCK_DOCUMENTS):
            block = np.asarray(starts[first : first + PACK_BLOCK_DOCUMENTS + 1], np.int64)
            chosen = slice(None) if of_documents is None else of_documents[first : first + len(block) - 1] == stratum
            if len(block[:-1][chosen]):
                yield block[:-1][chosen], np.diff(block)[chosen]

    def _segment_weights(self, starts: Array, lengths: Array) -> Array:
        """float64 [segments]: the sum of the weights of the targets of each segment."""
        assert self._weight_codes is not None
        table = np.array([*self._weight_codes], np.float64)
        names = sorted(name for name in self.files if ".weights-" in name)
        files = [np.asarray(np.memmap(self.folder / name, np.uint8, "r")) for name in names]
        sums = (
            table[read_across(files, self.shard_tokens, start + 1, start + length + 1)].sum()
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        )
        return np.fromiter(sums, np.float64, len(starts))


class Split:
    """One split, memory-mapped.

    documents, tokens (with end-of-text tokens), rows: counts. text_bytes: UTF-8 bytes of the original text.
    row_length: positions of a row. end_of_text_id: also the padding of a row. strata: of all rows, in order.
    weighted: whether a loss weight differs from 1.
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
        self.strata = [Stratum(**stratum) for stratum in entry["strata"]]
        self._document_strata = self._map(f"{name}.document-strata.bin", "<u2") if len(self.strata) > 1 else None
        self._weight_table = np.array(entry["weights"], np.float32)
        self._weights: list[Array] = []  # of the tokens; empty if all weights are 1
        self.weighted = len(self._weight_table) > 1
        if self.weighted:
            self._weights = [self._map(shard.replace(".tokens-", ".weights-"), "<u1") for shard in entry["shards"]]
            self._row_weights = self._map(f"{name}.row-weights.bin", "<f8")

    def _map(self, file: str, dtype: str) -> Array:
        with (self._shards.path / file).open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        # Rows are read in random order. Readahead of 128 KB for each page of 4 KB takes five times as long.
        mapped.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapped, dtype)

    def read(self, start: int, stop: int) -> Array:
        """int64 [stop - start]: tokens number start .. stop - 1 of the split."""
        return read_across(self._tokens, self._shard_tokens, start, stop).astype(np.int64)

    def segments(self, row: int) -> tuple[Array, Array]:
        """(starts int64, lengths int32) of the segments of a row."""
        first, last = self._first_segment[row], self._first_segment[row + 1]
        return self._segment_starts[first:last], self._segment_lengths[first:last]

    def segments_of(self, rows: Array) -> tuple[Array, Array, Array]:
        """(starts int64 [segments], lengths int64 [segments], counts int64 [rows]) of the rows, end to end."""
        first = self._first_segment[rows]
        counts = self._first_segment[np.asarray(rows) + 1] - first
        positions = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        return self._segment_starts[positions], self._segment_lengths[positions].astype(np.int64), counts

    def targets_in_rows(self, rows: Array) -> int:
        """The number of positions with a target in the rows. Rows may repeat."""
        return int(self.segments_of(rows)[1].sum())

    def weight_in_rows(self, rows: Array) -> float:
        """The sum of the loss weights of the targets of the rows. Rows may repeat."""
        return float(self._row_weights[rows].sum()) if self.weighted else float(self.targets_in_rows(rows))

    def copy_segments(self, starts: Array, lengths: Array, positions: Array, ids: Array, targets: Array) -> None:
        """Inputs and targets of segments, all int64: segment i to ids and targets [positions[i] : + lengths[i]]."""
        for start, length, position in zip(starts.tolist(), lengths.tolist(), positions.tolist(), strict=True):
            tokens = read_across(self._tokens, self._shard_tokens, start, start + length + 1)
            ids[position : position + length] = tokens[:-1]
            targets[position : position + length] = tokens[1:]

    def copy_weights(self, starts: Array, lengths: Array, positions: Array, weights: Array) -> None:
        """Loss weights of segments' targets, of a split that is `weighted`, to float32 weights as by copy_segments."""
        for start, length, position in zip(starts.tolist(), lengths.tolist(), positions.tolist(), strict=True):
            codes = read_across(self._weights, self._shard_tokens, start + 1, start + length + 1)
            weights[position : position + length] = self._weight_table[codes]

    def domain_of(self, document: int) -> str:
        """The domain of a document by its number, from 0. Raises IndexError if there is no such document."""
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document} of {self.documents}")
        return self.strata[0 if self._document_strata is None else int(self._document_strata[document])].domain

    def pieces(self, row: int) -> Iterator[Piece]:
        """The parts of a row, document by document. Special tokens are shown by name."""
        starts, lengths = self.segments(row)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            document = int(np.searchsorted(self._document_starts, start, "right")) - 1
            first, last = self._document_starts[document : document + 2].tolist()
            text = self._shards.tokenizer.decode_with_special_tokens(self.read(start + 1, start + 1 + length).tolist())
            yield Piece(document, self.domain_of(document), start - first, length, last - first, text)

    def text(self) -> Iterator[bytes]:
        """The original text of every document, UTF-8, in order."""
        tokenizer = self._shards.tokenizer
        for start, stop in zip(self._document_starts[:-1], self._document_starts[1:], strict=True):
            yield tokenizer.decode_bytes(self.read(int(start) + 1, int(stop)).tolist())

    def token_byte_lengths(self) -> list[int]:
        """The number of bytes of each id of the tokenizer."""
        return self._shards.tokenizer.byte_lengths()

    def token_counts(self) -> Array:
        """int64 [vocab_size]: how often each id is a target."""
        return np.asarray(self._map(f"{self.name}.target-counts.bin", "<i8")).astype(np.int64)


class ShardSet:
    """A prepared corpus: both splits, their tokenizer, and the report of the preparation.

    Made by `open_shards`. vocab_size: of the configured model; the tokenizer may have fewer ids.
    fingerprint: SHA-256 over the hashes of all files. The same text with the same settings has the same fingerprint.
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
        """The tokenizer of the shards."""
        return TextTokenizer.load(self.tokenizer_path, self.end_of_text)


def open_shards(path: Path, *, verify: bool = True) -> ShardSet:
    """Maps a folder of shards after verifying the size and SHA-256 of every file in the index.

    verify: False verifies only the index and the sizes, for a folder that another process has just verified.

    Raises ShardError with the file, what was expected and what was found.
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
                f"{file} has {size} bytes, not {entry['bytes']}: it is truncated or changed. {_remedy(path)}"
            )
        found = sha256_file(file) if verify else entry["sha256"]
        if found != entry["sha256"]:
            raise ShardError(f"{file} is corrupt: its SHA-256 is {found}, not {entry['sha256']}. {_remedy(path)}")
    return ShardSet(path, index)


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Writes index.json with a checksum of its contents. It is the last file of a folder of shards."""
    content = {"sha256": _index_checksum(index), **index}
    write_checksummed(folder / "index.json", json.dumps(content, indent=1).encode("utf-8"))


def read_across(files: Sequence[Array], size: int, start: int, stop: int) -> Array:
    """Items start .. stop - 1 of consecutive files with `size` items each."""
    shard, offset = divmod(start, size)
    parts = [files[shard][offset : offset + stop - start]] if start < stop else [np.zeros(0, np.uint8)]
    while (start := start + len(parts[-1])) < stop:
        shard += 1
        parts.append(files[shard][: stop - start])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


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
    checksum = _index_checksum(index)
    if checksum != expected:
        raise ShardError(f"{file} is corrupt: its SHA-256 is {checksum}, not {expected}. {_remedy(path)}")
    if index["format"] != FORMAT:
        raise ShardError(f"{file} is of format {index['format']}; this version reads {FORMAT}. {_remedy(path)}")
    return dict(index)


def _index_checksum(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode("utf-8")).hexdigest()


def _remedy(path: Path) -> str:
    return f"Delete the folder {path}; it is then prepared again."
