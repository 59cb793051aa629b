"""`cdrmix data`: prepares text without training, and inspects prepared text."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from cdrmix.cli.arguments import positive_integer, show_every_character
from cdrmix.cli.commands import Commands
from cdrmix.config.schema import Config

GUTTER = (
    "Each line of text has a prefix: the loss weight if it is not 1, then | for a new line, : for the continuation "
    "of a long line, > for a special token. Control characters are printed as <U+001B>."
)


def add(commands: Commands) -> None:
    actions = commands.group("data", "prepare text without training, and inspect prepared text")
    text = "clean, deduplicate, tokenise and pack the text into shards, which later runs reuse; print their folder"
    actions.add_with_config("prepare", prepare, text)
    text = "print statistics of prepared shards, and decoded rows with their documents"
    sub = actions.add("inspect", inspect, text, epilog=GUTTER)
    sub.add_argument("shards", type=Path, metavar="SHARDS", help="the folder that `cdrmix data prepare` prints")
    sub.add_argument("--split", choices=["train", "valid"], default="train", help="which split (default: train)")
    sub.add_argument("--row", type=int, metavar="N", help="first row to print, counted from 0 (default 0)")
    sub.add_argument(
        "--rows", type=positive_integer, default=1, metavar="N", help="number of rows to print (default 1)"
    )
    sub.add_argument("--domain", metavar="NAME", help="print only rows of this domain")


def prepare(options: argparse.Namespace) -> int:
    from cdrmix.data import prepare as preparation

    print(preparation.prepare(Config.from_yaml(options.config, options.overrides)).path)
    return 0


def inspect(options: argparse.Namespace) -> int:
    from cdrmix.data import inspection

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    show_every_character()
    for line in inspection.inspect(
        options.shards,
        split=options.split,
        row=options.row,
        rows=options.rows,
        domain=options.domain,
        coloured=coloured,
    ):
        print(line)
    return 0
