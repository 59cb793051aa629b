"""Files of the preparation: Arrow tables and numpy arrays, written atomically and read memory-mapped."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cdrmix.data.dedup.minhash import PackedTexts
from cdrmix.durable import sync_file
from cdrmix.json_text import parse_json

Array = np.ndarray[Any, np.dtype[Any]]

REPORT = b"report"


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to. On exit, the file is flushed to the disk and renamed to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_table(path: Path, table: pa.Table, report: dict[str, Any]) -> None:
    """Writes an Arrow file. report: JSON values, stored in the schema."""
    schema = table.schema.with_metadata({REPORT: json.dumps(report).encode()})
    with (
        atomic_file(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        writer.write_table(table.cast(schema).combine_chunks())


def read_table(path: Path) -> pa.Table:
    """The table, memory-mapped."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def read_report(path: Path) -> dict[str, Any]:
    """The report of a table."""
    with pa.memory_map(str(path)) as source:
        return dict(parse_json(pa.ipc.open_file(source).schema.metadata[REPORT]))


def column(table: pa.Table, name: str) -> Array:
    """A numeric column without nulls, as a numpy array."""
    return np.asarray(table.column(name).to_numpy())


def hashes_of(table: pa.Table) -> Array:
    """uint8 [n, 16]: the content hashes."""
    array = whole(table.column("hash"))
    data = np.frombuffer(array.buffers()[1] or b"", np.uint8)
    return data[16 * array.offset : 16 * (array.offset + len(array))].reshape(-1, 16)


def rows_between(table: pa.Table, low: int, high: int) -> tuple[int, int]:
    """[first, last): the rows whose first 8 bytes of the content hash, big-endian, are in low .. high - 1.

    The table must be sorted by its hashes. The binary search reads only a few of them.
    """
    hashes = hashes_of(table)

    def key(row: int) -> int:
        return int.from_bytes(hashes[row, :8].tobytes(), "big")

    first, last = (bisect_left(range(len(hashes)), bound, key=key) for bound in (low, high))
    return first, last


def texts_of(table: pa.Table) -> PackedTexts:
    """The texts of a table, not copied: their UTF-8 bytes end to end, and the offset of each."""
    array = whole(table.column("text"))
    _, offsets, data = array.buffers()
    starts = np.frombuffer(offsets or bytes(8), np.int64)[array.offset : array.offset + len(array) + 1]
    return PackedTexts(data or b"", starts)


def whole(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array. It is copied only if it has several chunks."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def write_array(path: Path, array: Array) -> None:
    """Writes a numpy array."""
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.save(file, array)


def read_array(path: Path) -> Array:
    """The array, memory-mapped."""
    return np.asarray(np.load(path, mmap_mode="r"))


def write_run(path: Path, entries: Array) -> None:
    """Writes a structured array, sorted by its fields in their order."""
    write_array(path, entries[_order(entries)])


def read_range(paths: Sequence[Path], low: int, high: int) -> Array:
    """The entries of sorted runs whose first field is in low .. high - 1, sorted by all fields.

    With the ranges of `key_ranges` this is an external radix sort: the writer sorts each run, and every range is read
    from all runs. So memory holds one run or one range at a time.
    """
    parts = []
    for path in paths:
        run = np.load(path, mmap_mode="r")
        first, last = (bisect_left(run, bound, key=itemgetter(0)) for bound in (low, high))  # reads a few pages
        parts.append(np.array(run[first:last]))
    entries = np.concatenate(parts)
    return entries[_order(entries)]


def key_ranges(count: int, end: int = 2**64) -> list[tuple[int, int]]:
    """[low, high) of `count` ranges of equal size that cover the keys below `end`."""
    cuts = [end * part // count for part in range(count + 1)]
    return list(pairwise(cuts))


def _order(entries: Array) -> Array:
    assert entries.dtype.names is not None
    return np.lexsort([entries[name] for name in reversed(entries.dtype.names)])
