"""`cdrmix config`: the keys of a configuration file, with types, defaults and meanings."""

from __future__ import annotations

import argparse

from cdrmix.cli.commands import Commands


def add(commands: Commands) -> None:
    text = "print every key of a configuration file, or one key or section: type, default, meaning"
    commands.add("config", run, text).add_argument(
        "key", nargs="?", metavar="KEY", help="a key or a section, for example train.zero_stage or data (default: all)"
    )


def run(options: argparse.Namespace) -> int:
    from cdrmix.config.reference import reference

    print(reference(options.key), end="")
    return 0
