"""From units to survivors: exact duplicates, addresses, near-duplicates; by stages of a preparation or by itself."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cdrmix.config.schema_data import Dedup, Filters
from cdrmix.data.pipeline.addresses import cap, dropped_rows
from cdrmix.data.pipeline.columns import Array, bounds, read_table
from cdrmix.data.pipeline.executor import make_executor
from cdrmix.data.pipeline.merging import Documents, Merge, merge
from cdrmix.data.pipeline.near import near_duplicates
from cdrmix.data.pipeline.reading import (
    COLUMNS,
    UNIT_RECORDS,
    Cleaning,
    add_row,
    content_hash,
    metadata_bytes,
    write_rows,
)
from cdrmix.data.pipeline.stats import PipelineStats
from cdrmix.data.pipeline.work import Work
from cdrmix.data.sources.base import Document, utf8_size

SHARE_OF_MEMORY = 16  # of data.memory_mb, that the texts of one task take: tokens and Python objects take the rest
BYTES_BESIDE_TEXT = 1024  # of a document: its signature, band entries and columns


class Fields(NamedTuple):
    """The metadata fields that hold a document's address and its quality; None: there is none."""

    url: str | None
    quality: str | None


class Survivors:
    """The merged documents less those that runs of numbers name."""

    def __init__(self, documents: Documents, dropped: tuple[Path, ...]) -> None:
        self.documents, self.dropped = documents, dropped

    def __len__(self) -> int:
        """Partitions."""
        return len(self.documents.paths)

    def rows(self, partition: int) -> Array:
        """int64 [n]: the rows of a partition that stay."""
        return np.flatnonzero(~dropped_rows(self.dropped, self.documents.span(partition)))

    def table(self, partition: int, columns: list[str]) -> pa.Table:
        """Columns of the documents of a partition that stay."""
        return read_table(self.documents.paths[partition]).select(columns).take(pa.array(self.rows(partition)))


def remove_duplicates(
    work: Work, tally: PipelineStats, section: Dedup, task_bytes: int
) -> tuple[Survivors, dict[str, Any]]:
    """The documents that stay of the units in `work`, and what the near-duplicate stage found, for the report.

    tally: what the units hold; what is dropped is added to it. task_bytes: of text, that one task works on.
    """

    def add(results: list[dict[str, Any]]) -> None:
        for result in results:
            stage = PipelineStats.from_json(result["tally"])
            stage.kept.documents = stage.kept.bytes = 0
            tally.merge(stage)

    units = tuple(sorted((work.folder / "read").glob("*.arrow")))
    size = tally.kept.bytes + tally.metadata_bytes
    count = max(1, -(-size // task_bytes), -(-tally.kept.documents * BYTES_BESIDE_TEXT // task_bytes))
    count = work.task_count("exact_duplicate", count)
    folder = work.place("merged")
    tasks = [
        Merge(folder / f"{number:06d}.arrow", units, low, high, section.exact)
        for number, (low, high) in enumerate(bounds(count))
    ]
    merged = work.stage("exact_duplicate", merge, tasks, about="merging")
    work.forget("read")
    add(merged)
    documents = Documents([task.path for task in tasks], [result["rows"] for result in merged])
    dropped: list[Path] = []
    if section.url:
        paths, results = cap(work, documents, "address", 1, "same_address", dropped)
        dropped += paths
        add(results)
    if section.documents_per_host is not None:
        paths, results = cap(work, documents, "host", section.documents_per_host, "host_cap", dropped)
        dropped += paths
        add(results)
    found: dict[str, Any] = {}
    if section.near and len(documents):
        paths, found, results = near_duplicates(work, documents, dropped, section, task_bytes * SHARE_OF_MEMORY)
        dropped += paths
        add(results)
    return Survivors(documents, tuple(dropped)), found


def deduplicate(
    documents: Iterable[Document],
    section: Dedup,
    *,
    url_field: str | None = "url",
    quality_field: str | None = None,
    workers: int = 1,
    memory_mb: int = 256,
    folder: Path | None = None,
) -> Iterator[Document]:
    """The documents that stay, in the order of their content hashes: exact, address and near-duplicates removed.

    Streams through sorted files in a temporary folder below `folder`, of about twice the size of the texts, so that
    memory is bounded by `memory_mb` for each of `workers` processes, and not by the corpus (near-duplicates take some
    50 bytes each on top). Which documents stay depends on the documents alone, not on their order: of duplicates the
    one of the highest quality (a number in the metadata field `quality_field`), then of the smallest content hash.
    """
    sources: list[str] = []
    with tempfile.TemporaryDirectory(dir=folder) as place, make_executor("local", workers) as engine:
        work = Work(Path(place), engine, lambda line: None)
        task_bytes = memory_mb * 2**20 // SHARE_OF_MEMORY
        tally = PipelineStats()
        batch: list[Document] = []
        size = 0
        for document in documents:
            batch.append(document)
            size += len(document.text)
            if size >= task_bytes or len(batch) >= UNIT_RECORDS:
                _write_unit(work, batch, sources, tally, Fields(url_field, quality_field))
                batch, size = [], 0
        _write_unit(work, batch, sources, tally, Fields(url_field, quality_field))
        survivors, _ = remove_duplicates(work, tally, section, task_bytes)
        for partition in range(len(survivors)):
            table = survivors.table(partition, ["text", "domain", "where", "meta"])
            for row in (row for piece in table.to_batches(256) for row in piece.to_pylist()):
                meta = json.loads(row["meta"]) if row["meta"] else {}
                yield Document(row["text"], sources[row["domain"]], row["where"], meta)


def _write_unit(work: Work, batch: list[Document], sources: list[str], tally: PipelineStats, fields: Fields) -> None:
    folder = work.place("read")
    rows: dict[str, list[Any]] = {name: [] for name in COLUMNS.names}
    for document in batch:
        if document.source not in sources:
            sources.append(document.source)
        cleaning = Cleaning(sources.index(document.source), 0, False, fields.url, True, fields.quality, Filters(), ())
        add_row(rows, document.text, content_hash(document.text), document.id, document.meta, cleaning)
        tally.kept.add(utf8_size(document.text))
    tally.metadata_bytes += metadata_bytes(rows)
    write_rows(folder / f"{len(list(folder.iterdir())):06d}.arrow", rows, {})
