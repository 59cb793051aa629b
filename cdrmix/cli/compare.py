"""`cdrmix compare`: the final weights of two runs, bit for bit."""

from __future__ import annotations

import argparse
from pathlib import Path

from cdrmix.cli.commands import Commands


def add(commands: Commands) -> None:
    text = "compare the final weights of two runs bit for bit; exit code 0 if identical, 1 if not"
    sub = commands.add("compare", run, text)
    sub.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="a run, checkpoint or export folder")


def run(options: argparse.Namespace) -> int:
    from cdrmix.compare import compare

    comparison = compare(*options.runs)
    print("\n".join(comparison.lines))
    return 0 if comparison.identical else 1
