"""Measures what works with which architecture of transformers, and writes the table of docs/huggingface.md.

python benchmarks/hf_matrix.py [--architecture NAME ...] [--column NAME ...] [--again] [--seconds N]

Each cell runs in a process of its own with a time limit and appends a line to benchmarks/results/hf_matrix.jsonl. Cells
that the file has for the installed version of transformers are not run again without --again. The table is written
between `<!-- matrix -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import re
import sys
import time
import warnings
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hf_training
import machine
from hf_architectures import ARCHITECTURES
from hf_columns import COLUMNS, cell
from hf_tiny import Cell

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "hf_matrix.jsonl"
PAGE = HERE.parent / "docs" / "huggingface.md"
MARKED = re.compile(r"<!-- matrix -->\n.*?<!-- end -->", re.DOTALL)
FORK = multiprocessing.get_context("fork")  # a new process would import PyTorch and transformers for every cell
GRACE = 10.0  # seconds for a process to end after its cell
Row = dict[str, Any]


def main() -> int:
    """Exit code 0: every cell is as promised; 1: one is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", action="append", choices=ARCHITECTURES, metavar="NAME", help="default: all")
    parser.add_argument("--column", action="append", choices=tuple(COLUMNS), help="default: all")
    parser.add_argument("--again", action="store_true", help="also run the cells that have results")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of a cell (default 300)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page with the table")
    arguments = parser.parse_args()
    hf_training.preload()
    where = machine.facts()
    known = {} if arguments.again else latest(read(arguments.results), where["versions"]["transformers"])
    for architecture in arguments.architecture or ARCHITECTURES:
        for column in arguments.column or COLUMNS:
            if (architecture, column) not in known:
                row = run(architecture, column, arguments.seconds) | where
                append(arguments.results, row)
                print(
                    f"{architecture} {column}: {row['verdict']}{'' if row['good'] else ' (NOT as promised)'}",
                    flush=True,
                )
    cells = latest(read(arguments.results))
    text = arguments.page.read_text(encoding="utf-8")
    arguments.page.write_text(with_table(text, cells), encoding="utf-8")
    return 0 if all(row["good"] for row in cells.values()) else 1


def run(architecture: str, column: str, seconds: float) -> Row:
    """The row of one cell, run in a process of its own; a failure or the time limit is its verdict."""
    started = time.monotonic()
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=report, args=(sender, architecture, column))
    process.start()
    sender.close()  # the process has its own end, so that the pipe ends with it
    found = Cell(f"more than {seconds:g} s", good=False)
    try:
        if receiver.poll(seconds):
            found = receiver.recv()
            process.join(GRACE)  # a failure prints its traceback after it was sent
    except EOFError:
        found = Cell("the process died", good=False)
    process.kill()
    process.join()
    return {
        "suite": "hf_matrix",
        "architecture": architecture,
        "column": column,
        **found._asdict(),
        "seconds": round(time.monotonic() - started, 1),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def report(sender: Connection, architecture: str, column: str) -> None:
    """Sends the Cell; if it fails, a Cell that says so, before the error is raised."""
    warnings.simplefilter("ignore")
    try:
        sender.send(cell(architecture, column))
    except Exception as error:
        sender.send(Cell(f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}", good=False))
        raise


def read(results: Path) -> list[Row]:
    """The rows of a file; none if it does not exist."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []


def append(results: Path, row: Row) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def latest(rows: Iterable[Row], version: str | None = None) -> dict[tuple[str, str], Row]:
    """The last row of each cell; only of a version of transformers if one is given."""
    return {
        (row["architecture"], row["column"]): row
        for row in rows
        if version is None or row["versions"]["transformers"] == version
    }


def with_table(text: str, cells: dict[tuple[str, str], Row]) -> str:
    """The page with the table of the cells, in bold what is not as promised. Raises ValueError without the markers."""
    lines = [
        f"| architecture | {' | '.join(title for title, _ in COLUMNS.values())} |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    for architecture in ARCHITECTURES:
        rows = [cells.get((architecture, column)) for column in COLUMNS]
        shown = [
            "not run" if row is None else row["verdict"] if row["good"] else f"**{row['verdict']}**" for row in rows
        ]
        lines.append(f"| {architecture} | {' | '.join(verdict.replace('|', '/') for verdict in shown)} |")
    if not MARKED.search(text):
        raise ValueError("the page has no <!-- matrix --> and <!-- end -->: add both where the table belongs")
    versions = sorted({row["versions"]["transformers"] for row in cells.values()})
    table = "\n".join(["<!-- matrix -->", "", *lines, "", f"transformers {', '.join(versions)}.", "<!-- end -->"])
    return MARKED.sub(lambda _: table, text)


if __name__ == "__main__":
    sys.exit(main())
