"""Which keys of two configurations differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError

ABSENT = object()


class Change(NamedTuple):
    """A key with its values in two configurations. hashed: whether Config.hash depends on it."""

    key: str
    before: object
    after: object
    hashed: bool

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.before)} -> {_text(self.after)}"


def changes(before: Config, after: Config) -> list[Change]:
    """The keys whose values differ, in the order of the schema; a key that only one of them has is null in the other.

    What is hashed is compared as Config.hash compares it: keys under which a run has the same results are not.
    """
    old, new = (dict(_leaves(each.model_dump(mode="json"))) for each in (before, after))
    of_hash = [dict(_leaves(each.hashed())) for each in (before, after)]
    hashed = {key for each in of_hash for key in each if of_hash[0].get(key, ABSENT) != of_hash[1].get(key, ABSENT)}
    if "train.micro_batch_rows" in hashed:  # the hash has their product
        hashed.add("train.micro_batch_parts")
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [Change(key, old.get(key), new.get(key), any(_within(key, each) for each in hashed)) for key in keys]


def difference(snapshot: Path, config: Config) -> str:
    """The keys by which a configuration is not that of a run, as lines of a message. snapshot: of the run."""
    try:
        found = [each for each in changes(Config.from_yaml(snapshot), config) if each.hashed]
    except ConfigError as error:
        return f"  the keys cannot be compared, because {snapshot} cannot be read: {error}"
    lines = [f"  {each.key}: {_text(each.before)} in the run, {_text(each.after)} here" for each in found]
    return "\n".join(lines or ["  no key: another version of cdrmix wrote the hash of the run"])


def _leaves(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Each key of the sections with its dotted path."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _within(key: str, other: str) -> bool:
    """Whether one of two dotted paths is the other, or a section of it."""
    longer, shorter = sorted((f"{key}.", f"{other}."), key=len, reverse=True)
    return longer.startswith(shorter)


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def listed(found: Iterable[Change]) -> str:
    """Changes on one line."""
    return ", ".join(map(str, found))
