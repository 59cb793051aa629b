"""The record of an error that the tests must find."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """In `file`, `old` (which is there once) becomes `new`; one of `tests` (files or node ids of pytest) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
