"""Deduplication: exact duplicates, duplicate URLs, near-duplicates; as stages of a preparation, or by itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cdrmix.config.schema_data import Dedup, Filters
from cdrmix.data.pipeline.executor import make_executor
from cdrmix.data.pipeline.merging import Documents, Merge, merge
from cdrmix.data.pipeline.near_duplicates import near_duplicates
from cdrmix.data.pipeline.reading import (
    COLUMNS,
    UNIT_RECORDS,
    Cleaning,
    add_row,
    content_hash,
    metadata_bytes,
    write_rows,
)
from cdrmix.data.pipeline.stages import StageRunner
from cdrmix.data.pipeline.stats import PipelineStats
from cdrmix.data.pipeline.storage import Array, key_ranges, read_table
from cdrmix.data.pipeline.url_duplicates import filtered_rows, limit_per_key
from cdrmix.data.sources.base import Document, utf8_size
from cdrmix.json_text import parse_json

MEMORY_PER_TEXT_BYTE = 16  # bytes of memory for a byte of text of a task, with its tokens and Python objects
OVERHEAD_BYTES = 1024  # of a document: signature, band entries and columns


class Fields(NamedTuple):
    """The metadata fields with the URL and the quality of a document. None: there is no such field."""

    url: str | None
    quality: str | None


class Survivors:
    """The merged documents without those in the runs `filtered`."""

    def __init__(self, documents: Documents, filtered: tuple[Path, ...]) -> None:
        self.documents, self.filtered = documents, filtered

    def __len__(self) -> int:
        """The number of partitions."""
        return len(self.documents.paths)

    def rows(self, partition: int) -> Array:
        """int64 [n]: the rows of a partition that are kept."""
        return np.flatnonzero(~filtered_rows(self.filtered, self.documents.span(partition)))

    def table(self, partition: int, columns: list[str]) -> pa.Table:
        """Columns of the kept documents of a partition."""
        return read_table(self.documents.paths[partition]).select(columns).take(pa.array(self.rows(partition)))


def remove_duplicates(
    runner: StageRunner, stats: PipelineStats, section: Dedup, task_bytes: int
) -> tuple[Survivors, dict[str, Any]]:
    """Removes duplicates from the units of the first stage.

    stats: of the units; the filtered documents are added to it. task_bytes: bytes of text per task.

    Returns the documents that are kept, and the results of the near-duplicate stage for the report.
    """

    def add(results: list[dict[str, Any]]) -> None:
        for result in results:
            stage = PipelineStats.from_json(result["stats"])
            stage.kept.documents = stage.kept.bytes = 0
            stats.merge(stage)

    units = tuple(sorted((runner.folder / "read").glob("*.arrow")))
    size = stats.kept.bytes + stats.metadata_bytes
    count = max(1, -(-size // task_bytes), -(-stats.kept.documents * OVERHEAD_BYTES // task_bytes))
    count = runner.task_count("exact_duplicate", count)
    folder = runner.folder_of("merged")
    tasks = [
        Merge(folder / f"{number:06d}.arrow", units, low, high, section.exact)
        for number, (low, high) in enumerate(key_ranges(count))
    ]
    merged = runner.stage("exact_duplicate", merge, tasks, about="merging")
    runner.remove("read")
    add(merged)
    documents = Documents([task.path for task in tasks], [result["rows"] for result in merged])
    filtered: list[Path] = []
    if section.url:
        paths, results = limit_per_key(runner, documents, "url_hash", 1, "duplicate_url", filtered)
        filtered += paths
        add(results)
    if section.documents_per_host is not None:
        paths, results = limit_per_key(
            runner, documents, "host_hash", section.documents_per_host, "documents_per_host", filtered
        )
        filtered += paths
        add(results)
    pairs: dict[str, Any] = {}
    if section.near_duplicates and len(documents):
        paths, pairs, results = near_duplicates(runner, documents, filtered, section, task_bytes * MEMORY_PER_TEXT_BYTE)
        filtered += paths
        add(results)
    return Survivors(documents, tuple(filtered)), pairs


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
    """The documents without exact duplicates, duplicate URLs and near-duplicates, in the order of their content hashes.

    The function writes sorted files of about twice the size of the texts to a temporary folder in `folder`. So memory
    is bounded by `memory_mb` for each of `workers` processes and not by the corpus; near-duplicates take about 50 bytes
    each in addition. The result does not depend on the order of the documents. Of duplicates, the document with the
    highest quality (a number in the metadata field `quality_field`) is kept, then the one with the smallest content
    hash.
    """
    sources: list[str] = []
    with tempfile.TemporaryDirectory(dir=folder) as work_folder, make_executor("local", workers) as executor:
        runner = StageRunner(Path(work_folder), executor, lambda line: None)
        task_bytes = memory_mb * 2**20 // MEMORY_PER_TEXT_BYTE
        stats = PipelineStats()
        batch: list[Document] = []
        size = 0
        for document in documents:
            batch.append(document)
            size += len(document.text)
            if size >= task_bytes or len(batch) >= UNIT_RECORDS:
                _write_unit(runner, batch, sources, stats, Fields(url_field, quality_field))
                batch, size = [], 0
        _write_unit(runner, batch, sources, stats, Fields(url_field, quality_field))
        survivors, _ = remove_duplicates(runner, stats, section, task_bytes)
        for partition in range(len(survivors)):
            table = survivors.table(partition, ["text", "domain", "where", "meta"])
            for row in (row for piece in table.to_batches(256) for row in piece.to_pylist()):
                metadata = parse_json(row["meta"]) if row["meta"] else {}
                yield Document(row["text"], sources[row["domain"]], row["where"], metadata)


def _write_unit(
    runner: StageRunner, batch: list[Document], sources: list[str], stats: PipelineStats, fields: Fields
) -> None:
    folder = runner.folder_of("read")
    rows: dict[str, list[Any]] = {name: [] for name in COLUMNS.names}
    for document in batch:
        if document.source not in sources:
            sources.append(document.source)
        cleaning = Cleaning(sources.index(document.source), 0, False, fields.url, True, fields.quality, Filters(), ())
        add_row(rows, document.text, content_hash(document.text), document.id, document.metadata, cleaning)
        stats.kept.add(utf8_size(document.text))
    stats.metadata_bytes += metadata_bytes(rows)
    write_rows(folder / f"{len(list(folder.iterdir())):06d}.arrow", rows, {})
