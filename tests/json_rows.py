"""Reads files of JSON lines as plain data, where a test compares what is in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdrmix.records import complete_lines


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a file; [] without the file."""
    return [line.data() for line in complete_lines(path)]
