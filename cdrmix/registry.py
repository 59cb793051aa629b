"""Names to classes: a registry whose unknown names raise with the nearest match."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when none is similar (difflib ratio below 0.6)."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


class Registry(Generic[Entry]):
    """A table from a name to a class or function, filled by decorators: `@SOURCES("jsonl")`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def __call__(self, name: str) -> Callable[[Entry], Entry]:
        def add(entry: Entry) -> Entry:
            assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            close = nearest(name, self._entries)
            hint = f" Did you mean {close!r}?" if close else ""
            raise ValueError(f"unknown {self.kind} {name!r}; known: {', '.join(sorted(self._entries))}.{hint}")
        return self._entries[name]

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        return sorted(self._entries)
