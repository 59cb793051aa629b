"""The second stage: merges all units to partitions in the order of the content hashes and removes exact duplicates.

The number of a document is its position in that order. It does not depend on the order in which the corpus was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cdrmix.data.dedup.minhash import PackedTexts
from cdrmix.data.pipeline.reading import COLUMNS
from cdrmix.data.pipeline.stats import PipelineStats, Sample, excerpt
from cdrmix.data.pipeline.storage import Array, column, hashes_of, read_table, rows_between, texts_of, write_table


@dataclass(frozen=True)
class Merge:
    """A task: write the documents of all units whose keys are in low .. high - 1 to `path`."""

    path: Path
    units: tuple[Path, ...]
    low: int
    high: int
    exact: bool


def merge(task: Merge) -> dict[str, Any]:
    """Writes a partition. Returns its numbers of rows and bytes, and the statistics of the filtered documents."""
    pieces = [COLUMNS.empty_table()]
    for path in task.units:
        table = read_table(path)
        first, last = rows_between(table, task.low, task.high)
        if last > first:  # copied, so that the files can be unmapped
            pieces.append(table.slice(first, last - first).take(pa.array(range(last - first))))
    table = pa.concat_tables([piece.cast(COLUMNS) for piece in pieces]).combine_chunks()
    halves = hashes_of(table).view(">u8").reshape(-1, 2)
    order = np.lexsort(
        [
            column(table, "url_hash"),
            column(table, "domain"),
            column(table, "split_hash"),  # a hash of the exact text: rows that are equal up to here are interchangeable
            -column(table, "priority").astype(np.int64),
            -column(table, "quality"),
            halves[:, 1],
            halves[:, 0],
        ]
    )
    table, halves = table.take(pa.array(order)), halves[order]
    stats = PipelineStats()
    if task.exact and len(table):
        is_first = np.concatenate([[True], (halves[1:] != halves[:-1]).any(1)])
        count_filtered(stats, "exact_duplicate", table, np.flatnonzero(~is_first))
        table = table.filter(pa.array(is_first))
    table = table.combine_chunks()
    size = int(np.diff(texts_of(table).offsets).sum())
    stats.kept.add(size, len(table))
    write_table(task.path, table, {})
    return {"rows": len(table), "bytes": size, "stats": stats.as_json()}


def count_filtered(stats: PipelineStats, rule: str, table: pa.Table, rows: Array) -> None:
    """Counts rows of a table as filtered by `rule`."""
    if not len(rows):
        return
    filtered = table.take(pa.array(rows)).combine_chunks()
    sizes = np.diff(texts_of(filtered).offsets)
    for number, (digest, where, text) in enumerate(
        zip(*(filtered.column(name).to_pylist() for name in ("hash", "where", "text")), strict=True)
    ):
        stats.add_filtered(rule, int(sizes[number]), Sample(digest.hex(), where, None, excerpt(text)))


class Documents:
    """The merged documents, by number.

    paths: the files of the partitions. offsets: int64 [partitions + 1], the number of the first document of each.
    """

    def __init__(self, paths: Sequence[Path], rows: Sequence[int]) -> None:
        self.paths = list(paths)
        self.rows = list(rows)

    @cached_property
    def offsets(self) -> Array:
        return np.concatenate([[0], np.cumsum(self.rows, dtype=np.int64)])

    def __len__(self) -> int:
        return sum(self.rows)

    def span(self, partition: int) -> tuple[int, int]:
        """[low, high): the numbers of the documents of a partition."""
        return int(self.offsets[partition]), int(self.offsets[partition + 1])

    def take(self, numbers: Array, columns: Sequence[str]) -> pa.Table:
        """Columns of the documents with these numbers. The numbers must be ascending."""
        owners = np.searchsorted(self.offsets, numbers, side="right") - 1
        pieces = []
        for owner in np.unique(owners):
            rows = numbers[owners == owner] - self.offsets[owner]
            pieces.append(read_table(self.paths[owner]).select(list(columns)).take(pa.array(rows)))
        if not pieces:
            return pa.table({name: pa.array([], COLUMNS.field(name).type) for name in columns})
        return pa.concat_tables(pieces).combine_chunks()

    def sizes(self, numbers: Array) -> Array:
        """int64 [n]: UTF-8 bytes of the texts of these documents. The numbers must be ascending."""
        owners = np.searchsorted(self.offsets, numbers, side="right") - 1
        sizes = np.empty(len(numbers), np.int64)
        for owner in np.unique(owners):
            offsets = texts_of(read_table(self.paths[owner])).offsets
            rows = numbers[owners == owner] - self.offsets[owner]
            sizes[owners == owner] = offsets[rows + 1] - offsets[rows]
        return sizes

    def texts(self, numbers: Array) -> PackedTexts:
        """The texts of these documents. The numbers must be ascending."""
        return texts_of(self.take(numbers, ["text"]))
