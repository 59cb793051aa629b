"""Runs commands of cdrmix in the process of the tests, which has its own settings again afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from cdrmix import cli
from cdrmix.runtime import restored_settings


def main(argv: Sequence[str]) -> int:
    """The exit code of `cdrmix` with these arguments."""
    with restored_settings():
        return cli.main(argv)
