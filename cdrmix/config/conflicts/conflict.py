"""A conflict between keys of a configuration that are valid by themselves."""

from __future__ import annotations

from typing import NamedTuple

from cdrmix.config.names import known
from cdrmix.config.nodes import Path
from cdrmix.registry import nearest


class Conflict(NamedTuple):
    """A value that other keys do not allow.

    key: dotted. allowed: text; it names the other keys. inside: the path of the value below the key. nearest: the most
    similar valid name. found: text; None: the value itself. others: keys that the text does not name.
    """

    key: str
    allowed: str
    inside: Path = ()
    nearest: str | None = None
    found: str | None = None
    others: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return (*self.key.split("."), *self.inside)


def unknown_name(key: str, kind: str, name: str, inside: Path = ()) -> Conflict | None:
    """The conflict of a key that has no registered name of this kind."""
    names = known(kind)
    return None if name in names else Conflict(key, f"one of {', '.join(names)}", inside, nearest(name, names))
