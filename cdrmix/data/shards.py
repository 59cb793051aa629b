"""Shards: tokenised text on disk, memory-mapped; the index has the size and the SHA-256 of every file.

A folder of shards holds, for each split:
    <split>.tokens-00000.bin ...  uint16 or uint32, an end-of-text, then all documents end to end, each with an
                                  end-of-text at its end; cut every `shard_tokens` tokens
    <split>.weights-00000.bin ... uint8, only if a loss weight differs from 1: for every token the number of its weight
                                  in the list of the index; cut as the tokens are
    <split>.documents.bin         int64 [documents + 1], token number of the end-of-text before each document
    <split>.document-strata.bin   uint16 [documents], only with more than one stratum: the stratum of each document
    <split>.rows.bin              int64 [rows + 1], number of each row's first segment
    <split>.row-weights.bin       float64 [rows], only with weights: the sum of the weights of the targets of each row
    <split>.segment-starts.bin    int64 [segments], token number of the first input of each segment (see packing.py)
    <split>.segment-lengths.bin   int32 [segments], positions of each segment
    <split>.target-counts.bin     int64 [vocab_size], how often each id is a target
and tokenizer.json and index.json, which is written last. Numbers are little-endian. If documents begin with a token of
their own, it is stored before each document instead of the end-of-text before all, and documents.bin has its number.
original_text.py describes two more files of the held-out split of a tokenizer that changes text.

A stratum is a domain and a length class. A row has documents of one stratum, and the rows of a stratum are consecutive.
So a mixture of strata is a choice of rows.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cdrmix.data.objectives import NEXT_TOKEN, PARTS
from cdrmix.data.original_text import TEXT, TOKEN_BYTES, OriginalText
from cdrmix.data.shard_files import read_across, read_index
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ShardError

FORMAT = 5  # 5: strata and loss weights
SPLITS = ("train", "valid")
REARRANGED = "fim"  # a third split, of held-out documents rearranged for fill in the middle

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
    """The part of a document in a row: `tokens` targets from its target number `offset` on, and their text.

    start: number of the first input in the tokens of the split.
    """

    document: int
    domain: str
    offset: int
    tokens: int
    document_tokens: int
    text: str
    start: int


class _Folder:
    """What the splits share. They do not refer to their ShardSet: its files are closed as soon as nobody has it."""

    def __init__(self, path: Path, end_of_text: str) -> None:
        self.path, self.end_of_text = path, end_of_text

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer.load_stored(self.path / "tokenizer.json", self.end_of_text, lossless=False)


class Split:
    """One split, memory-mapped.

    documents, tokens (with end-of-text tokens), rows: counts. text_bytes: UTF-8 bytes of the original text.
    row_length: positions of a row. end_of_text_id: also the padding of a row. strata: of all rows, in order.
    first_id: of the token that begins each document; None: the end-of-text before it.
    weighted: whether a loss weight differs from 1. parted: whether tokens of the part of the loss other than next_token
    are told apart (older shards: never). pairs: whether documents 2 n and 2 n + 1 are the chosen and the
    rejected answer of pair n, and one segment.
    """

    def __init__(self, folder: _Folder, name: str, entry: dict[str, Any], index: dict[str, Any]) -> None:
        self.name = name
        self.documents: int = entry["documents"]
        self.tokens: int = entry["tokens"]
        self.text_bytes: int = entry["text_bytes"]
        self.rows: int = entry["rows"]
        self.vocab_size: int = index["vocab_size"]
        self.row_length: int = index["row_length"]
        self.end_of_text_id: int = index["end_of_text_id"]
        self.first_id: int | None = index.get("first_id")
        self._folder = folder
        self._shard_tokens: int = index["shard_tokens"]
        self._tokens = [self._map(shard, index["dtype"]) for shard in entry["shards"]]
        self._document_starts = self._map(f"{name}.documents.bin", "<i8")
        self._first_segment = self._map(f"{name}.rows.bin", "<i8")
        self._segment_starts = self._map(f"{name}.segment-starts.bin", "<i8")
        self._segment_lengths = self._map(f"{name}.segment-lengths.bin", "<i4")
        self.strata = [Stratum(**stratum) for stratum in entry["strata"]]
        self._document_strata = self._map(f"{name}.document-strata.bin", "<u2") if len(self.strata) > 1 else None
        self.pairs: bool = entry.get("pairs", False)
        self._weight_table = np.array(entry["weights"], np.float32)
        self._part_table = np.array(entry.get("parts", [0] * len(self._weight_table)), np.uint8)
        self._weights: list[Array] = []  # codes of the tokens; empty if all weights are 1 and all parts next_token
        self.weighted = bool((self._weight_table != 1).any())
        self.parted = bool((self._part_table != NEXT_TOKEN).any())
        if self.parted:
            self._row_parts = self._map(f"{name}.row-parts.bin", "<f8").reshape(-1, len(PARTS))
        if len(self._weight_table) > 1:
            self._weights = [self._map(shard.replace(".tokens-", ".weights-"), "<u1") for shard in entry["shards"]]
            self._row_weights = self._map(f"{name}.row-weights.bin", "<f8")
        original = (f"{name}.{TOKEN_BYTES}.bin", f"{name}.{TEXT}.bin")
        self._original: OriginalText | None = None
        if original[0] in index.get("files", ()):
            self._original = OriginalText(self._map(original[0], "<u4"), self._map(original[1], "<u1"))

    def _map(self, file: str, dtype: str) -> Array:
        with (self._folder.path / file).open("rb") as opened:
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

    def parts_in_rows(self, rows: Array) -> dict[str, float]:
        """`weight_in_rows` by part of the loss, of every part. Rows may repeat."""
        if not self.parted:
            return {**dict.fromkeys(PARTS, 0.0), PARTS[NEXT_TOKEN]: self.weight_in_rows(rows)}
        return dict(zip(PARTS, self._row_parts[rows].sum(0).tolist(), strict=True))

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

    def copy_parts(self, starts: Array, lengths: Array, positions: Array, parts: Array) -> None:
        """Parts of the loss of segments' targets, of a split that is `parted`, to uint8 parts as by copy_segments."""
        for start, length, position in zip(starts.tolist(), lengths.tolist(), positions.tolist(), strict=True):
            codes = read_across(self._weights, self._shard_tokens, start + 1, start + length + 1)
            parts[position : position + length] = self._part_table[codes]

    def domain_rows(self) -> dict[str, range]:
        """The rows of each domain that has rows. A row has documents of one domain, whose rows are consecutive."""
        domains: dict[str, range] = {}
        for stratum in self.strata:
            if stratum.rows:
                first = domains.get(stratum.domain, range(stratum.first_row, 0)).start
                domains[stratum.domain] = range(first, stratum.first_row + stratum.rows)
        return domains

    def pairs_of(self, starts: Array) -> tuple[Array, Array]:
        """(int64 numbers of the pairs, int64 positions of their second documents) of the segments with these starts."""
        documents = np.searchsorted(self._document_starts, starts)
        return documents // 2, np.asarray(self._document_starts[documents + 1] - starts)

    def documents_at(self, starts: Array) -> Array:
        """int64: the numbers of the documents of segments with these starts; of a pair, that of its first document."""
        return np.asarray(np.searchsorted(self._document_starts, starts, "right") - 1)

    def domain_of(self, document: int) -> str:
        """The domain of a document by its number, from 0. Raises IndexError if there is no such document."""
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document} of {self.documents}")
        return self.strata[0 if self._document_strata is None else int(self._document_strata[document])].domain

    def pieces(self, row: int) -> Iterator[Piece]:
        """The parts of a row, document by document. Special tokens are shown by name."""
        for start, length in self._parts(row):
            document = int(np.searchsorted(self._document_starts, start, "right")) - 1
            first, last = self._document_starts[document : document + 2].tolist()
            text = self._folder.tokenizer.decode_with_special_tokens(self.read(start + 1, start + 1 + length).tolist())
            tokens = last - first - self._gap
            yield Piece(document, self.domain_of(document), start - first, length, tokens, text, start)

    def _parts(self, row: int) -> Iterator[tuple[int, int]]:
        """(start, length) of the part of each document in a row, in order: its first input and its targets."""
        starts, lengths = self.segments(row)
        if not self.pairs:
            yield from zip(starts.tolist(), lengths.tolist(), strict=True)
            return
        for start, length, second in zip(
            starts.tolist(), lengths.tolist(), self.pairs_of(starts)[1].tolist(), strict=True
        ):
            yield start, second - self._gap
            yield start + second, length - second

    @property
    def _gap(self) -> int:
        """Tokens between the documents that are no targets of either: the begin-of-text token, if there is one."""
        return 0 if self.first_id is None else 1

    def text(self) -> Iterator[bytes]:
        """The original text of every document, UTF-8, in order. Decoded, for training text of a lossy tokenizer."""
        if self._original is not None:
            yield from self._original.documents(self._document_starts)
            return
        tokenizer = self._folder.tokenizer
        for start, stop in zip(self._document_starts[:-1], self._document_starts[1:], strict=True):
            yield tokenizer.decode_bytes(self.read(int(start) + 1, int(stop)).tolist())

    def text_bytes_of(self, starts: Array, lengths: Array) -> int:
        """The sum of `segment_bytes`."""
        return int(self.segment_bytes(starts, lengths).sum())

    def segment_bytes(self, starts: Array, lengths: Array) -> Array:
        """int64: UTF-8 bytes of the original text of the targets of each segment that have a loss weight above 0.

        An end-of-text has none. Raises ShardError for training text of a tokenizer that changes text, whose bytes are
        not stored.
        """
        if self._original is None and not self._folder.tokenizer.lossless:
            raise ShardError(
                f"{self._folder.path}: the tokenizer changes text, and only the held-out text has its bytes stored; "
                "evaluate on the held-out text"
            )
        sizes = np.array(self.token_byte_lengths(), np.int64)
        found = np.zeros(len(starts), np.int64)
        for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            span = (start + 1, start + length + 1)
            of_tokens = sizes[self.read(*span)] if self._original is None else self._original.of(*span)
            found[number] = of_tokens[self._is_trained(*span)].sum(dtype=np.int64)
        return found

    def trained_text(self, rows: Array | None = None) -> Iterator[tuple[Array, bytes]]:
        """The tokens of every document whose loss weight is above 0, and the bytes of their original text, in order.

        rows: int64 [rows]: of every segment of these rows instead; None: of every document.
        The bytes are the decoded ones for training text of a lossy tokenizer.
        """
        if rows is None:
            starts, lengths = self._document_starts[:-1], np.diff(self._document_starts) - self._gap
        else:
            starts, lengths, _ = self.segments_of(rows)
            order = np.argsort(starts)
            starts, lengths = starts[order], lengths[order]
        tokenizer, before, position = self._folder.tokenizer, 0, 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            span = (start + 1, start + 1 + length)
            trained = self._is_trained(*span)
            ids = self.read(*span)[trained]
            if self._original is None:
                yield ids, tokenizer.decode_bytes(ids.tolist())
                continue
            position += self._original.count(before, span[0])
            sizes = self._original.of(*span).astype(np.int64)
            ends = position + np.cumsum(sizes)
            kept = zip(ends[trained].tolist(), sizes[trained].tolist(), strict=True)
            yield ids, b"".join(self._original.text(end - size, end) for end, size in kept)
            before = span[0]

    def _is_trained(self, start: int, stop: int) -> Array:
        """bool [stop - start]: whether the loss weight of a token is above 0."""
        if not self.weighted:
            return np.ones(stop - start, bool)
        return np.asarray(self._weight_table[read_across(self._weights, self._shard_tokens, start, stop)] > 0)

    def token_byte_lengths(self) -> list[int]:
        """The number of bytes of each id of the tokenizer."""
        return self._folder.tokenizer.byte_lengths()

    def token_counts(self) -> Array:
        """int64 [vocab_size]: how often each id is a target."""
        return np.asarray(self._map(f"{self.name}.target-counts.bin", "<i8")).astype(np.int64)


class ShardSet:
    """A prepared corpus: both splits, their tokenizer, and the report of the preparation.

    rearranged: the held-out documents in the order of fill in the middle; None without data.objectives.weights and fim.
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
        self._folder = _Folder(path, self.end_of_text)
        splits = {name: Split(self._folder, name, entry, index) for name, entry in index["splits"].items()}
        self.train, self.valid = (splits[name] for name in SPLITS)
        self.rearranged = splits.get(REARRANGED)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the shards."""
        return self._folder.tokenizer


def open_shards(path: Path, *, verify: bool = True) -> ShardSet:
    """Maps a folder of shards after verifying the size and SHA-256 of every file in the index.

    verify: False verifies only the index and the sizes, for a folder that another process has just verified.

    Raises ShardError with the file, what was expected and what was found.
    """
    path = Path(path)
    return ShardSet(path, read_index(path, FORMAT, verify=verify))


def token_dtype(vocab_size: int) -> str:
    """The narrowest numpy dtype, little-endian, that holds ids below vocab_size."""
    return "<u2" if vocab_size <= 2**16 else "<u4"
