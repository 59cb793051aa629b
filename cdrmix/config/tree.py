"""YAML values that remember where they were written, and how one layer of them covers another."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
Scalar = str | int | float | bool | None
COMMAND_LINE = "command line"
ANY = "<name>"  # in a pattern of paths: a key that the configuration names itself


@dataclass(frozen=True)
class Place:
    """Where a value was written: a file and its line (from 1), or all there is to say in `source` when `line` is 0."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True)
class Value:
    """A scalar, a list or a mapping of values, and the place of its key (of the file's start, for a whole file)."""

    content: Scalar | list[Value] | dict[str, Value]
    place: Place
    blank: bool = False  # `key:` with nothing after it; `key: null` is not blank
    refused: bool = False  # there was something that could not be read, and that has been reported


def dotted(path: Path) -> str:
    """`("data", "source", "paths", 1)` as people write it: `data.source.paths[1]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def matches(path: Path, patterns: Set[Path]) -> bool:
    """Whether `path` is one of `patterns`, in which ANY stands for any key."""
    return path in patterns or any(
        ANY in pattern
        and len(pattern) == len(path)
        and all(wanted in (ANY, part) for wanted, part in zip(pattern, path, strict=True))
        for pattern in patterns
    )


def plain(value: Value) -> Any:
    """The value without its places: dicts, lists and scalars."""
    if isinstance(value.content, dict):
        return {key: plain(inner) for key, inner in value.content.items()}
    if isinstance(value.content, list):
        return [plain(inner) for inner in value.content]
    return value.content


def get(data: object, path: Path) -> Any:
    """What plain data hold at `path`; None where they hold nothing."""
    for part in path:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def find(root: Value, path: Path) -> Value | None:
    """The value at `path`, or None where nothing was written there."""
    value: Value | None = root
    for part in path:
        content = value.content if value else None
        if isinstance(content, dict) and isinstance(part, str):
            value = content.get(part)
        elif isinstance(content, list) and isinstance(part, int) and part < len(content):
            value = content[part]
        else:
            return None
    return value


def place_of(root: Value, path: Path) -> Place:
    """Where `path` was written, or else the innermost section around it that was."""
    for length in range(len(path), 0, -1):
        if value := find(root, path[:length]):
            return value.place
    return root.place


def merge(base: Value, over: Value, tagged: Set[Path], path: Path = ()) -> Value:
    """`over` on top of `base`: mappings join key by key, anything else is replaced.

    Args:
        tagged: paths (ANY for any key) of sections whose keys depend on their `kind`. Where `over` names another
            kind than `base`, the section is replaced, for the old kind's keys mean nothing to it.
    """
    below, above = base.content, over.content
    if not isinstance(below, dict) or not isinstance(above, dict):
        return over
    if matches(path, tagged) and "kind" in above and "kind" in below and above["kind"].content != below["kind"].content:
        return over
    joined = dict(below)
    for key, value in above.items():
        joined[key] = merge(below[key], value, tagged, (*path, key)) if key in below else value
    # A section is best shown in a file: an override on the command line has no section header.
    return Value(joined, over.place if over.place.line else base.place)


def fill(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with the keys that it lacks taken from `defaults`, section by section."""
    filled = {**defaults, **data}
    for key, default in defaults.items():
        if isinstance(default, Mapping) and isinstance(filled[key], Mapping):
            filled[key] = fill(filled[key], default)
    return filled
