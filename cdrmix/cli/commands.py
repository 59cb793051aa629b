"""What the modules of the commands are added to: names, help and the function of each command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

OVERRIDES = "Arguments of the form key.path=value override keys of the file. Example: train.steps=100"

Run = Callable[[argparse.Namespace], int]  # from the parsed options to the exit code


class Commands:
    """The commands of the program, or of one of its commands that has further ones, such as `cdrmix data`."""

    def __init__(self, parser: argparse.ArgumentParser, prefix: str = "", *, required: bool = True) -> None:
        dest = "action" if prefix else "name"
        self._subparsers = parser.add_subparsers(dest=dest, required=required, metavar="COMMAND")
        self._prefix = prefix

    def add(self, name: str, run: Run, text: str, *, epilog: str | None = None) -> argparse.ArgumentParser:
        """The parser of a new command, for its arguments. text: what it does."""
        sub = self._subparsers.add_parser(name, help=text, description=text, allow_abbrev=False, epilog=epilog)
        sub.set_defaults(command=run, name=f"{self._prefix}{name}")
        return sub

    def add_with_config(self, name: str, run: Run, text: str, *, required: bool = True) -> argparse.ArgumentParser:
        """The same for a command that takes --config and overrides."""
        sub = self.add(name, run, text, epilog=OVERRIDES)
        sub.add_argument("--config", required=required, type=Path, metavar="YAML", help="the configuration file")
        return sub

    def group(self, name: str, text: str) -> Commands:
        """The commands of a new command that has further ones."""
        sub = self._subparsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        return Commands(sub, f"{name} ")
