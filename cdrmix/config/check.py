"""From the merged YAML values of a run to a Config, or to everything that is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from cdrmix.config import schema_types as words
from cdrmix.config.core_param_autosizer import FOLLOWS, core_defaults
from cdrmix.config.problems import Problem, found
from cdrmix.config.reasoning_param_autosizer import reasoning_defaults
from cdrmix.config.scales import SCALES
from cdrmix.config.schema import Config, Size
from cdrmix.config.tree import Path, Place, Value, dotted, fill, find, get, matches, place_of, plain
from cdrmix.config.validators import conflicts
from cdrmix.registry import nearest


def check(tree: Value, whole: bool) -> tuple[Config | None, list[Problem]]:
    """Autosize and validate.

    Args:
        tree: what was written, all layers merged; a mapping.
        whole: False when a part of the configuration could not be read: then what seems to be
            missing, or is combined badly with a default, may be right in that part and is not reported.

    Returns:
        The configuration, which is None if there are problems, and the problems.
    """
    data = plain(tree)
    data = fill(data, core_defaults(data))
    data = fill(data, reasoning_defaults(data))
    problems: list[Problem] = []
    reasoning = find(tree, ("reasoning",))
    if reasoning and reasoning.blank:
        # The section's presence decides what kind of run this is; too much to guess.
        message = "{} for parameters by model.size, a section with keys, or null for a core run"
        problems.append(Problem(reasoning.place, "reasoning", "found a section without keys", message))
    config, refused, broken = _validate(tree, data, whole)
    problems += refused
    # What could not be read may change a default, and so a combination.
    values = dict(_known_values(words.root(), data, broken)) if whole else {}
    for conflict in conflicts(values):
        paths = [conflict.path, *(tuple(key.split(".")) for key in conflict.keys)]
        # The first key that is written: an autosized or default value has no line of its own.
        place = next((value.place for path in paths if (value := find(tree, path))), place_of(tree, paths[0]))
        problems.append(
            Problem(place, dotted(conflict.path), found(conflict.value), conflict.allowed, conflict.nearest)
        )
    return (None if problems else config), problems


def _validate(tree: Value, data: dict[str, Any], whole: bool) -> tuple[Config | None, list[Problem], set[Path]]:
    """The schema's opinion: a Config or problems, and the paths that have no usable value."""
    try:
        # As JSON, in which a list can be a tuple and 1 a float, and nothing else is lenient.
        return Config.model_validate_json(json.dumps(data)), [], set()
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
    problems: list[Problem] = []
    broken: set[Path] = set()
    misspelt: set[Path] = set()
    missing: list[Path] = []
    for detail in details:
        path = _without_kinds(detail["loc"])
        sort = detail["type"]
        if sort == "missing" and isinstance(path[-1], int):
            path, sort = path[:-1], "too_short"  # a list that should be longer, not a key
        if sort in ("union_tag_invalid", "union_tag_not_found"):
            path = (*path, "kind")
            sort = "missing" if sort == "union_tag_not_found" else sort
        if path[-1:] == ("[key]",):  # pydantic's mark of a free key that is refused itself
            path = path[:-1]
            problems.append(Problem(place_of(tree, path), dotted(path), "an empty name", "a name that is not empty"))
            continue
        if path in broken:
            continue
        if sort == "extra_forbidden":
            close = words.nearest_key(path, data)
            misspelt.update([close] if close else [])
            problems.append(_unknown(place_of(tree, path), path, close, data))
            continue
        broken.add(path)
        value = find(tree, path)
        if value and value.refused:
            continue
        if sort == "missing":
            missing.append(path)
        else:
            problems.append(_refused(place_of(tree, path), path, data))
    for path in missing:
        source = next((source for key, source in FOLLOWS.items() if f"{dotted(path)}.".startswith(f"{key}.")), None)
        follows = source is not None and any(dotted(other) == source for other in broken)
        # A misspelt key is reported once, under the name that was written.
        if whole and path not in misspelt and not follows:
            problems.append(_missing(place_of(tree, path), path, data))
    return None, problems, broken


def _without_kinds(location: tuple[str | int, ...]) -> Path:
    """pydantic's location less the name of the variant, which it inserts after a section that has kinds."""
    path: Path = ()
    inserted = False
    for part in location:
        if not inserted and matches(path, words.tagged()):
            inserted = True
        else:
            path = (*path, part)
    return path


def _unknown(place: Place, path: Path, close: Path | None, data: object) -> Problem:
    section = path[:-1]
    schema = words.at(section, data)
    known = words.keys(schema, get(data, section)) if schema else {}
    where = f"in {dotted(section)}" if section else "at the top"
    name, note = str(path[-1]), "unknown key"
    if name == "<<":
        note += " (settings are shared by `base: FILE`, not by merge keys)"
    elif "." in name:
        note += " (in a file, sections are nested, not written with dots)"
    return Problem(place, dotted(path), note, f"{where}: {', '.join(known)}", dotted(close) if close else None)


def _missing(place: Place, path: Path, data: object) -> Problem:
    schema = words.at(path, data)
    allowed = words.allowed(schema) if schema else ""
    if any(f"{key}.".startswith(f"{dotted(path)}.") for key in _sized()):
        sizes = ", ".join(get_args(Size))
        allowed += f"; or set model.size ({sizes}), which sets it"
    meaning = " ".join(schema.get("description", "").split()) if schema else ""
    return Problem(place, dotted(path), "missing, and it has no default", allowed, meaning=meaning)


def _sized() -> list[str]:
    """The keys that a size sets, dotted."""
    size = next(iter(SCALES))
    data = {"model": {"size": size}, "reasoning": {}}

    def walk(section: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for key, value in section.items():
            yield from walk(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [f"{prefix}{key}"]

    return [*walk(core_defaults(data), ""), *walk(reasoning_defaults(data), "")]


def _refused(place: Place, path: Path, data: object) -> Problem:
    value = get(data, path)
    schema = words.at(path, data)
    listed = words.choices(schema) if schema else []
    close = nearest(value, listed) if isinstance(value, str) else None
    return Problem(place, dotted(path), found(value), words.allowed(schema) if schema else "", close)


def _known_values(schema: words.Schema, data: object, broken: set[Path], path: Path = ()) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is set or has a default and was not refused by itself.

    Of a section that is written the mapping too, and None of one that is null. A list counts as refused when
    anything in it is.
    """
    needed = words.required(schema)
    section = data if isinstance(data, Mapping) else {}
    for key, inner in words.keys(schema, section).items():
        here = (*path, key)
        if here in broken or (
            isinstance(section.get(key), list) and any(other[: len(here)] == here for other in broken)
        ):
            continue
        if key in section:
            yield dotted(here), section[key]
        elif key not in needed and "default" in inner:
            yield dotted(here), inner["default"]
        if words.is_section(inner):
            absent = section.get(key) is None if key in section or key in needed else inner.get("default", {}) is None
            if not absent:
                yield from _known_values(inner, section.get(key, {}), broken, here)
