"""Configuration nodes: YAML values with their source locations, and functions to find and merge them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

Path = tuple[str | int, ...]
Scalar = str | int | float | bool | None
COMMAND_LINE = "command line"
ANY = "<name>"  # in a path pattern: matches any key
DEFAULT_KINDS: dict[Path, str] = {("model",): "cdrmix"}  # the kind of a section that does not write it
# Sections that may be written as their kind alone, such as `optimizer: muon`.
KIND_ALONE: frozenset[Path] = frozenset(
    {("train", "optimizer"), ("train", "schedule"), ("train", "groups", ANY, "schedule")}
)


@dataclass(frozen=True)
class Location:
    """Where a value was written. source: a file name or a description. line: from 1; 0 if `source` has no lines."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True)
class Node:
    """A scalar, a list or a mapping of nodes. location: of its key; for a whole file, of the start of the file."""

    content: Scalar | list[Node] | dict[str, Node]
    location: Location
    blank: bool = False  # `key:` without a value; `key: null` is not blank
    invalid: bool = False  # the value cannot be used, and this problem has been reported


def dotted(path: Path) -> str:
    """`("data", "source", "paths", 1)` as text: `data.source.paths[1]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def matches(path: Path, patterns: Set[Path]) -> bool:
    """Whether `path` is one of `patterns`. ANY in a pattern matches any key."""
    return path in patterns or any(
        ANY in pattern
        and len(pattern) == len(path)
        and all(expected in (ANY, part) for expected, part in zip(pattern, path, strict=True))
        for pattern in patterns
    )


def plain(node: Node) -> Any:
    """The node without locations: dicts, lists and scalars."""
    if isinstance(node.content, dict):
        return {key: plain(inner) for key, inner in node.content.items()}
    if isinstance(node.content, list):
        return [plain(inner) for inner in node.content]
    return node.content


def get(data: object, path: Path) -> Any:
    """The value at `path` in plain data, or None if there is none."""
    for part in path:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def find(root: Node, path: Path) -> Node | None:
    """The node at `path`, or None if nothing was written there."""
    node: Node | None = root
    for part in path:
        content = node.content if node else None
        if isinstance(content, dict) and isinstance(part, str):
            node = content.get(part)
        elif isinstance(content, list) and isinstance(part, int) and part < len(content):
            node = content[part]
        else:
            return None
    return node


def location_of(root: Node, path: Path) -> Location:
    """The location of `path`, or of the innermost section around it that was written."""
    for length in range(len(path), 0, -1):
        if node := find(root, path[:length]):
            return node.location
    return root.location


def with_sections(node: Node, path: Path = ()) -> Node:
    """The node with a section in place of each kind that is written alone."""
    if isinstance(node.content, str) and matches(path, KIND_ALONE):
        return Node({"kind": node}, node.location)
    if not isinstance(node.content, dict) or path[:1] not in ((), ("train",)):
        return node
    inner = {key: with_sections(value, (*path, key)) for key, value in node.content.items()}
    return replace(node, content=inner)


def merge(base: Node, override: Node, tagged: Set[Path], path: Path = ()) -> Node:
    """`override` merged into `base`: mappings are merged key by key, other values are replaced.

    Args:
        tagged: path patterns of the sections whose keys depend on their `kind`. If `override` has another kind than
            `base`, it replaces the whole section, because the keys of the old kind do not apply to the new one. So it
            is for KIND_ALONE.
    """
    old, new = base.content, override.content
    if not isinstance(old, dict) or not isinstance(new, dict):
        return override
    if matches(path, tagged | KIND_ALONE) and "kind" in new:
        kind = old["kind"].content if "kind" in old else DEFAULT_KINDS.get(path)
        if kind is not None and kind != new["kind"].content:
            return override
    merged = dict(old)
    for key, node in new.items():
        merged[key] = merge(old[key], node, tagged, (*path, key)) if key in old else node
    # Prefer a location in a file: an override on the command line has no line of its own for the section.
    return Node(merged, override.location if override.location.line else base.location)


def fill(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with its missing keys taken from `defaults`, section by section."""
    filled = {**defaults, **data}
    for key, default in defaults.items():
        if isinstance(default, Mapping) and isinstance(filled[key], Mapping):
            filled[key] = fill(filled[key], default)
    return filled


def found(value: Any) -> str:
    """A value from YAML and its type, in about 100 characters at most."""
    if value is None:
        return "found null (nothing)"
    if isinstance(value, Mapping):
        return "found a section"
    if isinstance(value, list):
        return f"found a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False)  # as in YAML, with control characters escaped
    kind = {bool: "true/false", int: "an integer", float: "a number", str: "a string"}[type(value)]
    return f"found {text if len(text) <= 80 else text[:77] + '...'} ({kind})"
