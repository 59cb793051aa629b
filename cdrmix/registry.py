"""Registries: tables from names to classes or functions. Packages and plugins register their entries by decorators."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast

from cdrmix.plugins import load_plugins

Entry = TypeVar("Entry")
Registered = TypeVar("Registered")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to `name`, or None if none is similar (difflib ratio below 0.6)."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


class Registry(Generic[Entry]):
    """A table from names to classes or functions of one kind. A decorator adds an entry: `@SOURCES("jsonl")`."""

    _all: dict[str, Registry[Any]] = {}

    def __init__(self, kind: str) -> None:
        assert kind not in self._all, f"there are two registries of kind {kind!r}"
        self.kind = kind
        self._entries: dict[str, Entry] = {}
        self._all[kind] = self

    def __call__(self, name: str) -> Callable[[Registered], Registered]:
        """A decorator that adds a class or function under `name`. Raises ValueError if the name is taken."""

        def add(entry: Registered) -> Registered:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice; choose another name")
            self._entries[name] = cast(Entry, entry)
            return entry

        return add

    def __getitem__(self, name: str) -> Entry:
        """The entry with this name. Raises ValueError with the known names if there is none."""
        if name not in self._entries:
            load_plugins()
        if name not in self._entries:
            close = nearest(name, self._entries)
            hint = f" Did you mean {close!r}?" if close else ""
            raise ValueError(f"unknown {self.kind} {name!r}; known: {', '.join(sorted(self._entries))}.{hint}")
        return self._entries[name]

    def names(self) -> list[str]:
        """All registered names, sorted. Includes those of plugins."""
        load_plugins()
        return sorted(self._entries)


def registered(kind: str) -> list[str]:
    """The names that are registered so far under a kind, sorted. Empty if no module has created that registry yet.

    The configuration uses it to accept the names of plugins without importing the packages that own the registries.
    """
    load_plugins()
    registry = Registry._all.get(kind)
    return [] if registry is None else registry.names()
