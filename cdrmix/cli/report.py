"""`cdrmix report`: the plots and the page of a run, made again."""

from __future__ import annotations

import argparse
from pathlib import Path

from cdrmix.cli.commands import Commands


def add(commands: Commands) -> None:
    sub = commands.add("report", run, "write loss.png, load.png and report.html of a run again")
    sub.add_argument("run", type=Path, metavar="RUN", help="the run folder")


def run(options: argparse.Namespace) -> int:
    from cdrmix.report.report import write_report
    from cdrmix.run_folder import RunFolder

    print(write_report(RunFolder.open(options.run)))
    return 0
