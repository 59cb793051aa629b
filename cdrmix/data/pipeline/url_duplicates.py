"""Limits on documents per URL and per host: one per canonical URL, at most N per registrable domain.

The documents of the highest quality are kept. Entries (hash, rank, document) are sorted in one run per partition. Each
range of hashes is then read from all runs, so that one task sees all documents with the same hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cdrmix.data.pipeline.merging import Documents, count_filtered
from cdrmix.data.pipeline.stages import StageRunner
from cdrmix.data.pipeline.stats import PipelineStats
from cdrmix.data.pipeline.storage import Array, column, key_ranges, read_range, read_table, texts_of, write_run

ENTRY = np.dtype(
    [("key", "<u8"), ("minus_quality", "<f8"), ("minus_priority", "<i8"), ("number", "<i8"), ("size", "<i8")]
)
NUMBER = np.dtype([("number", "<i8")])


@dataclass(frozen=True)
class Collect:
    """A task: collect the entries of a partition by `key`, without the documents in the runs `filtered`."""

    path: Path
    table: Path
    span: tuple[int, int]
    key: str
    filtered: tuple[Path, ...]


@dataclass(frozen=True)
class LimitPerKey:
    """A task: for each key in low .. high - 1, filter all documents except the first `most`."""

    path: Path
    runs: tuple[Path, ...]
    low: int
    high: int
    most: int
    rule: str
    documents: Documents


def limit_per_key(
    runner: StageRunner, documents: Documents, key: str, most: int, rule: str, filtered: list[Path]
) -> tuple[list[Path], list[dict[str, Any]]]:
    """Filters documents so that each value of the column `key`, except 0, has at most `most` documents.

    filtered: runs with the documents that earlier stages have filtered. The stages are `<rule>_entries` and `<rule>`.

    Returns runs with the numbers of the filtered documents, and the results of the stage with their statistics.
    """
    folder = runner.folder_of(f"{rule}_entries")
    collected = [
        Collect(folder / f"{number:06d}.npy", path, documents.span(number), key, tuple(filtered))
        for number, path in enumerate(documents.paths)
    ]
    runner.stage(f"{rule}_entries", collect, collected, about="URLs and hosts")
    runs = tuple(task.path for task in collected)
    out = runner.folder_of(rule)
    tasks = [
        LimitPerKey(out / f"{number:06d}.npy", runs, low, high, most, rule, documents)
        for number, (low, high) in enumerate(key_ranges(len(runs)))
    ]
    results = runner.stage(rule, remove_beyond_limit, tasks, about="documents of one URL or host")
    runner.remove(f"{rule}_entries")
    return [task.path for task in tasks], results


def filtered_rows(runs: tuple[Path, ...], span: tuple[int, int]) -> Array:
    """bool [n]: whether the runs contain the document, for the documents span[0] .. span[1] - 1."""
    mask = np.zeros(span[1] - span[0], np.bool_)
    if runs:
        mask[read_range(runs, *span)["number"] - span[0]] = True
    return mask


def collect(task: Collect) -> dict[str, Any]:
    """Writes the run of a partition."""
    table = read_table(task.table)
    keys = column(table, task.key)
    rows = np.flatnonzero((keys != 0) & ~filtered_rows(task.filtered, task.span))
    entries = np.zeros(len(rows), ENTRY)
    entries["key"] = keys[rows]
    entries["minus_quality"] = -column(table, "quality")[rows]
    entries["minus_priority"] = -column(table, "priority")[rows].astype(np.int64)
    entries["number"] = rows + task.span[0]
    entries["size"] = np.diff(texts_of(table).offsets)[rows]
    write_run(task.path, entries)
    return {"bytes": int(entries["size"].sum())}


def remove_beyond_limit(task: LimitPerKey) -> dict[str, Any]:
    """Writes the run of documents above the limit of their key."""
    entries = read_range(task.runs, task.low, task.high)
    first = np.concatenate([[True], entries["key"][1:] != entries["key"][:-1]]) if len(entries) else np.zeros(0, bool)
    begins = np.flatnonzero(first)
    position = np.arange(len(entries)) - np.repeat(begins, np.diff([*begins, len(entries)]))
    beyond = np.sort(entries["number"][position >= task.most])
    numbers = np.zeros(len(beyond), NUMBER)
    numbers["number"] = beyond
    stats = PipelineStats()
    for chunk in np.array_split(beyond, max(len(beyond) // 1000, 1)):
        table = task.documents.take(chunk, ["hash", "where", "text"])
        count_filtered(stats, task.rule, table, np.arange(len(table)))
    write_run(task.path, numbers)
    return {"stats": stats.as_json()}
