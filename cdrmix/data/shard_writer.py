"""Writes the documents of one split as shards: tokens, loss weights, parts of the loss, packed rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdrmix.data.objectives import NEXT_TOKEN, PARTS
from cdrmix.data.original_text import OriginalTextWriter
from cdrmix.data.packing import pack
from cdrmix.data.shard_files import read_across
from cdrmix.data.shards import Array, Stratum, token_dtype
from cdrmix.durable import ChecksummedFile

COUNT_BLOCK_TOKENS = 2**20  # tokens whose ids are counted together
PACK_BLOCK_DOCUMENTS = 2**20  # rows are packed within blocks of this many documents, which bounds memory
MAX_WEIGHTS = 2**8  # different loss weights, or pairs of a weight and a part of the loss


class SplitWriter:
    """Writes one split: `add` appends a document, and `close` packs the rows.

    domains: their names. length_classes: ascending numbers of tokens that separate the length classes; empty: one
    class. weights: whether documents may have loss weights and parts of the loss. first_id: of the token that begins
    each document; None: the end-of-text before it. original: whether the original text is stored too. pairs: whether
    documents come in pairs.
    A context manager: on an error it closes its files.
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
        first_id: int | None = None,
        original: bool = False,
        pairs: bool = False,
    ) -> None:
        self.folder, self.name = folder, name
        self._first_id = first_id
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
        # (loss weight, part of the loss) -> its code
        self._weight_codes: dict[tuple[float, int], int] | None = {(1.0, NEXT_TOKEN): 0} if weights else None
        self._weights_shard: ChecksummedFile | None = None
        self._original = OriginalTextWriter(self._create) if original else None
        self._pairs = pairs

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._created:
            file.discard()

    def add(
        self,
        ids: Array,
        text_bytes: int,
        *,
        domain: int = 0,
        weights: Array | None = None,
        parts: Array | None = None,
        original: tuple[Array, bytes] | None = None,
        second: int = 0,
    ) -> None:
        """Appends a document, or a pair of two documents that are packed together.

        ids: integers [tokens], the last one end-of-text. text_bytes: UTF-8 bytes of its text. domain: its number.
        weights: float32 [tokens], the loss weight of each token as a target; None: all 1.
        parts: uint8 [tokens], its part of the loss, a number of objectives.PARTS; None: all NEXT_TOKEN.
        original: integers [tokens], the bytes of the text of each token, and the text.
        second: number of the token that begins the second document of a pair; 0: there is one document. With
            `pairs`, every call has a second.
        Raises ValueError for more than 256 different weights in a split, and for a negative or infinite weight.
        """
        tokens = ids.astype(self.dtype)
        codes = self._encode_weights(weights, parts, len(tokens))
        assert bool(second) == self._pairs, "pairs and single documents are not mixed"
        stratum = domain * (len(self._length_classes) + 1) + bisect_right(self._length_classes, len(tokens))
        for start, stop in ((0, second), (second, len(tokens))) if second else ((0, len(tokens)),):
            self._begin_document(tokens[-1:], stratum, inner=start > 0)
            self._append(tokens[start:stop], None if codes is None else codes[start:stop])
        if self._original is not None and original is not None:
            counts, text = original
            cut = int(counts[:second].sum())
            if second:
                self._original.add(counts[:second], text[:cut])
                self._original.add_gap(self._gap)
            self._original.add(counts[second:], text[cut:])
        self._stratum_tokens[stratum] += len(tokens)
        self._uncounted.append(tokens)
        self._uncounted_tokens += len(tokens)
        if self._uncounted_tokens >= COUNT_BLOCK_TOKENS:
            self._count_targets()
        self.text_bytes += text_bytes

    def _begin_document(self, end_of_text: Array, stratum: int, *, inner: bool) -> None:
        """Writes what is before a document, and its number. inner: it is the second of a pair.

        The token before the second of a pair is a target in the row of the pair, and has the weight 0.
        """
        if self._first_id is not None or not self.documents:
            first = end_of_text if self._first_id is None else np.array([self._first_id], self.dtype)
            weights = None if self._weight_codes is None else np.full(1, float(not inner), np.float32)
            self._append(first, self._encode_weights(weights, None, 1))
            if self._original is not None and not inner:
                self._original.add_gap(1)
        self._starts.write(np.int64(self.tokens - 1).astype("<i8").tobytes())
        if self._document_strata is not None:
            self._document_strata.write(np.uint16(stratum).astype("<u2").tobytes())
        self._stratum_documents[stratum] += 1
        self.documents += 1

    def close(self) -> dict[str, Any]:
        """Packs the rows and fills `files`. Returns the entry of the split in the index."""
        self._close_shard()
        self._starts.write(np.int64(self.tokens - 1 + self._gap).astype("<i8").tobytes())
        self._finish(self._starts)
        for file in self._original.files if self._original is not None else ():
            self._finish(file)
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
        codes = [*(self._weight_codes or {(1.0, NEXT_TOKEN): 0})]
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "rows": self.rows,
            "strata": [stratum._asdict() for stratum in strata],
            "weights": [weight for weight, _ in codes],
            **({"parts": [part for _, part in codes]} if any(part for _, part in codes) else {}),
            "shards": [name for name in self.files if ".tokens-" in name],
            **({"pairs": True} if self._pairs else {}),
        }

    @property
    def _gap(self) -> int:
        """Tokens between the documents that are no targets: 1 if each begins with a token of its own, otherwise 0."""
        return 0 if self._first_id is None else 1

    def _count_targets(self) -> None:
        if self._uncounted:
            self._target_counts += np.bincount(np.concatenate(self._uncounted), minlength=len(self._target_counts))
        self._uncounted, self._uncounted_tokens = [], 0

    def _encode_weights(self, weights: Array | None, parts: Array | None, count: int) -> bytes | None:
        """The weights and parts as codes, with new pairs added to the table; None if the split has no weights."""
        if self._weight_codes is None:
            assert weights is None, "SplitWriter(weights=True) for documents with weights"
            assert parts is None, "SplitWriter(weights=True) for documents with parts of the loss"
            return None
        if weights is None and parts is None:
            return bytes(count)
        weights = np.ones(count, np.float32) if weights is None else np.asarray(weights, np.float32)
        parts = np.full(count, NEXT_TOKEN, np.uint8) if parts is None else parts
        assert len(weights) == len(parts) == count, f"{len(weights)} weights, {len(parts)} parts, {count} tokens"
        values, of_tokens = np.unique(weights, return_inverse=True)
        for value in values.tolist():
            if not 0 <= value < float("inf"):
                raise ValueError(f"a loss weight of {value}; weights are finite numbers of at least 0")
        pairs, inverse = np.unique(of_tokens * len(PARTS) + parts, return_inverse=True)
        codes = []
        for number in pairs.tolist():
            pair = float(values[number // len(PARTS)]), number % len(PARTS)
            if self._weight_codes.setdefault(pair, len(self._weight_codes)) == MAX_WEIGHTS:
                raise ValueError(f"more than {MAX_WEIGHTS} different loss weights; use fewer in data.objectives.spans")
            codes.append(self._weight_codes[pair])
        return np.array(codes, np.uint8)[inverse].tobytes()

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
        parted = any(part for _, part in self._weight_codes or ())
        row_parts = self._create("row-parts") if parted else None
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
                    sums = self._segment_weights(packed.starts, packed.lengths, parted)
                    of_rows = np.add.reduceat(sums, packed.first_segment[:-1])
                    row_weights.write(of_rows[:, 0].astype("<f8").tobytes())
                    if row_parts is not None:
                        row_parts.write(of_rows[:, 1:].astype("<f8").tobytes())
            counts = (self._stratum_tokens[number], self._stratum_documents[number])
            strata.append(Stratum(domain, length_class, first_row, self.rows - first_row, *counts))
        rows.write(np.int64(segments).astype("<i8").tobytes())
        for file in (rows, segment_starts, segment_lengths, row_weights, row_parts):
            if file is not None:
                self._finish(file)
        return strata

    def _documents_of(self, stratum: int) -> Iterator[tuple[Array, Array]]:
        """(starts, positions), int64, of the documents of a stratum in order, block by block."""
        starts = np.memmap(self._starts.path, "<i8", "r")
        of_documents = None if self._document_strata is None else np.memmap(self._document_strata.path, "<u2", "r")
        for first in range(0, self.documents if self._stratum_documents[stratum] else 0, PACK_BLOCK_DOCUMENTS):
            block = np.asarray(starts[first : first + PACK_BLOCK_DOCUMENTS + 1], np.int64)
            chosen = slice(None) if of_documents is None else of_documents[first : first + len(block) - 1] == stratum
            lengths = np.diff(block)
            if self._pairs:  # the two documents of a pair are neighbours
                chosen = np.arange(len(lengths))[chosen][::2]
                lengths = lengths + np.append(lengths[1:], 0)
            if len(block[:-1][chosen]):
                yield block[:-1][chosen], lengths[chosen] - self._gap

    def _segment_weights(self, starts: Array, lengths: Array, parted: bool) -> Array:
        """float64 [segments, 1 or 1 + PARTS]: the sum of the weights of the targets of each segment; if `parted` also
        the sums by part of the loss."""
        assert self._weight_codes is not None
        tables = [np.array([weight for weight, _ in self._weight_codes], np.float64)]
        if parted:
            of_codes = np.array([part for _, part in self._weight_codes])
            tables += [tables[0] * (of_codes == part) for part in range(len(PARTS))]
        names = sorted(name for name in self.files if ".weights-" in name)
        files = [np.asarray(np.memmap(self.folder / name, np.uint8, "r")) for name in names]
        sums = np.zeros((len(starts), len(tables)))
        for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            codes = read_across(files, self.shard_tokens, start + 1, start + length + 1)
            sums[number] = [table[codes].sum() for table in tables]
        return sums
