"""Problems of a configuration, each told by place, key, what was found, what is allowed and the nearest name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cdrmix.config.tree import COMMAND_LINE, Place
from cdrmix.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `key` is a dotted path, or empty when the problem is a whole file's."""

    place: Place
    key: str
    found: str
    allowed: str = ""
    nearest: str | None = None
    meaning: str = ""

    def __str__(self) -> str:
        lines = [": ".join(part for part in (str(self.place), self.key, self.found) if part)]
        if self.allowed:
            lines.append(f"allowed: {self.allowed}")
        if self.meaning:
            lines.append(f"meaning: {self.meaning}")
        if self.nearest:
            lines.append(f"did you mean {self.nearest}?")
        return "\n    ".join(map(_printable, lines))


def _printable(text: str) -> str:
    """Control characters escaped: a configuration must not steer the terminal or fake a line of ours."""
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in text)


def failure(problems: Iterable[Problem]) -> ConfigError:
    """One error that tells every problem: files in alphabetical order, their lines in order, the command line last."""
    ordered = sorted(
        dict.fromkeys(problems),
        key=lambda it: (it.place.source.startswith(COMMAND_LINE), it.place.source, it.place.line, it.key),
    )
    count = "one problem" if len(ordered) == 1 else f"{len(ordered)} problems"
    return ConfigError("\n".join([f"the configuration has {count}:", *map(str, ordered)]))


def found(value: Any) -> str:
    """A value from YAML and its type, in at most about a hundred characters."""
    if value is None:
        return "found null (nothing)"
    if isinstance(value, Mapping):
        return "found a section"
    if isinstance(value, list):
        return f"found a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False)  # as YAML shows it; control characters escaped
    kind = {bool: "true/false", int: "an integer", float: "a number", str: "a string"}[type(value)]
    return f"found {text if len(text) <= 80 else text[:77] + '...'} ({kind})"
