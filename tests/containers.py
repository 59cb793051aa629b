"""Rows in the containers that sources of text read: JSON lines, compressed or not, Parquet, CSV."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import zstandard

Row = dict[str, Any]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: list[Row], **options: Any) -> bytes:
    """Columns whose structs have the fields of all rows, as every writer makes them."""
    stream = io.BytesIO()
    table = pa.table({name: [row.get(name) for row in rows] for name in names_of(rows)})
    pyarrow.parquet.write_table(table, stream, **options)
    return stream.getvalue()


def comma_separated(rows: list[Row]) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, names_of(rows))
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def names_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


CONTAINERS: dict[str, Callable[[list[Any]], bytes]] = {
    "jsonl": lines,
    "jsonl.gz": lambda rows: gzip.compress(lines(rows), mtime=0),
    "jsonl.zst": lambda rows: zstandard.compress(lines(rows)),
    "parquet": parquet,
    "csv": comma_separated,
}
