"""Registries: tables from names to classes or functions. Packages and plugins register their entries by decorators."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast

from cdrmix.plugins import load_plugins

Entry = TypeVar("Entry")
Registered = TypeVar("Registered")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, or None when none is near.

    Near is a name at an edit distance of at most a third of the shorter name's letters, as in the Rust compiler. Else
    all words of one name must be in the other (num_heads, heads), and be at least half of the longer name's letters;
    if both share another word, one may be cut after four letters or more (grad_clip, gradient_clip). Case does not
    count. Of several near names the one at the smallest distance is taken, of equal ones one that begins with `name`,
    else the first.
    """
    written = name.lower()
    ranked = [
        (rank, not other.lower().startswith(written), other)
        for other in known
        if (rank := _rank(written, other.lower())) is not None
    ]
    return min(ranked, key=lambda near: near[:2])[2] if ranked else None


def _rank(name: str, other: str) -> tuple[int, int] | None:
    """How near two names are, nearer ones first; None where they are not near."""
    most = min(len(name), len(other)) // 3
    # The distance is at least the difference of their lengths, and the number of letters that only one of them has.
    if (
        abs(len(name) - len(other)) <= most
        and len({*name} - {*other}) <= most
        and len({*other} - {*name}) <= most
        and (distance := edit_distance(name, other)) <= most
    ):
        return 0, distance
    ours, theirs = ([word for word in re.split(r"[^a-z0-9]+", text) if word] for text in (name, other))
    few, many = sorted((ours, theirs), key=len)
    pairs = [next(((word, like) for like in many if _same_word(word, like)), None) for word in few]
    if not any(pair and pair[0].rstrip("s") == pair[1].rstrip("s") for pair in pairs):
        return None
    letters = sum(min(map(len, pair)) for pair in pairs if pair)
    longest = max(sum(map(len, ours)), sum(map(len, theirs)))
    return (1, longest - letters) if None not in pairs and 2 * letters >= longest else None


def _same_word(a: str, b: str) -> bool:
    """Whether two words are one, in the plural perhaps, or one is the other's beginning."""
    short, long = sorted((a, b), key=len)
    return short.rstrip("s") == long.rstrip("s") or (len(short) >= 4 and long.startswith(short))


def edit_distance(a: str, b: str) -> int:
    """Insertions, deletions, substitutions and exchanges of two neighbours that make `b` of `a`, each letter once.

    The optimal string alignment distance (Boytsov 2011, ACM JEA 16, section 2.2).
    """
    before: list[int] = []
    row = [*range(len(b) + 1)]
    for i, letter in enumerate(a, 1):
        last, row = row, [i]
        for j, other in enumerate(b, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                row[-1] = min(row[-1], before[j - 2] + 1)
        before = last
    return row[-1]


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


def registers(module: str) -> bool:
    """Whether an entry of any registry is defined in the module of that name."""
    tables = Registry._all.values()
    return any(getattr(entry, "__module__", None) == module for table in tables for entry in table._entries.values())


def registered(kind: str) -> list[str]:
    """The names that are registered so far under a kind, sorted. Empty if no module has created that registry yet.

    The configuration uses it to accept the names of plugins without importing the packages that own the registries.
    """
    load_plugins()
    registry = Registry._all.get(kind)
    return [] if registry is None else registry.names()
