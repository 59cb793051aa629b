"""Documents by address: one a canonical URL, and no more than so many a registrable domain; the best ones stay.

Entries (hash, rank, document) are sorted in one run a partition; each range of hashes is then read from all runs, so
that what shares an address meets in one task.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cdrmix.data.pipeline.columns import Array, bounds, column, read_range, read_table, texts_of, write_run
from cdrmix.data.pipeline.merging import Documents, drop
from cdrmix.data.pipeline.stats import PipelineStats
from cdrmix.data.pipeline.work import Work

ENTRY = np.dtype(
    [("key", "<u8"), ("minus_quality", "<f8"), ("minus_priority", "<i8"), ("number", "<i8"), ("size", "<i8")]
)
NUMBER = np.dtype([("number", "<i8")])


@dataclass(frozen=True)
class Collect:
    """Entries of a partition's documents by `key`, without those that `dropped` (runs) name."""

    path: Path
    table: Path
    span: tuple[int, int]
    key: str
    dropped: tuple[Path, ...]


@dataclass(frozen=True)
class Cap:
    """Of the documents of each key in low .. high - 1 all but the first `most` are dropped."""

    path: Path
    runs: tuple[Path, ...]
    low: int
    high: int
    most: int
    rule: str
    documents: Documents


def cap(
    work: Work, documents: Documents, key: str, most: int, rule: str, dropped: list[Path]
) -> tuple[list[Path], list[dict[str, Any]]]:
    """Runs of the numbers dropped so that each value of the column `key` (0 aside) has no more than `most` documents;
    and the results of the stage, with tallies.

    dropped: runs of earlier stages, whose documents do not count. The stages of work: `<rule>_entries` and `<rule>`.
    """
    folder = work.place(f"{rule}_entries")
    collected = [
        Collect(folder / f"{number:06d}.npy", path, documents.span(number), key, tuple(dropped))
        for number, path in enumerate(documents.paths)
    ]
    work.stage(f"{rule}_entries", collect, collected, about="addresses")
    runs = tuple(task.path for task in collected)
    out = work.place(rule)
    tasks = [
        Cap(out / f"{number:06d}.npy", runs, low, high, most, rule, documents)
        for number, (low, high) in enumerate(bounds(len(runs)))
    ]
    results = work.stage(rule, drop_beyond, tasks, about="documents of one address")
    work.forget(f"{rule}_entries")
    return [task.path for task in tasks], results


def dropped_rows(runs: tuple[Path, ...], span: tuple[int, int]) -> Array:
    """bool [n]: which of the documents span[0] .. span[1] - 1 the runs name."""
    mask = np.zeros(span[1] - span[0], np.bool_)
    if runs:
        mask[read_range(runs, *span)["number"] - span[0]] = True
    return mask


def collect(task: Collect) -> dict[str, Any]:
    """Write the run of a partition."""
    table = read_table(task.table)
    keys = column(table, task.key)
    rows = np.flatnonzero((keys != 0) & ~dropped_rows(task.dropped, task.span))
    entries = np.zeros(len(rows), ENTRY)
    entries["key"] = keys[rows]
    entries["minus_quality"] = -column(table, "quality")[rows]
    entries["minus_priority"] = -column(table, "priority")[rows].astype(np.int64)
    entries["number"] = rows + task.span[0]
    entries["size"] = np.diff(texts_of(table).offsets)[rows]
    write_run(task.path, entries)
    return {"bytes": int(entries["size"].sum())}


def drop_beyond(task: Cap) -> dict[str, Any]:
    """Write the run of numbers that are too many of their key."""
    entries = read_range(task.runs, task.low, task.high)
    first = np.concatenate([[True], entries["key"][1:] != entries["key"][:-1]]) if len(entries) else np.zeros(0, bool)
    begins = np.flatnonzero(first)
    place = np.arange(len(entries)) - np.repeat(begins, np.diff([*begins, len(entries)]))
    beyond = np.sort(entries["number"][place >= task.most])
    numbers = np.zeros(len(beyond), NUMBER)
    numbers["number"] = beyond
    tally = PipelineStats()
    for chunk in np.array_split(beyond, max(len(beyond) // 1000, 1)):
        table = task.documents.take(chunk, ["hash", "where", "text"])
        drop(tally, task.rule, table, np.arange(len(table)))
    write_run(task.path, numbers)
    return {"tally": tally.as_json()}
