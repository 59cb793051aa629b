"""Validation of the merged configuration: a Config, or every problem with its file, line, key and allowed values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from cdrmix.config import schema_types
from cdrmix.config.autosizers import (
    DERIVED_FROM,
    REASONING_SIZES,
    SCALES,
    Size,
    core_param_autosizer,
    reasoning_param_autosizer,
)
from cdrmix.config.conflicts.conflict import Conflict
from cdrmix.config.hyperparameters import RULE_READS, SET_BY_A_RULE, hyperparameters
from cdrmix.config.nodes import (
    COMMAND_LINE,
    DEFAULT_KINDS,
    Location,
    Node,
    Path,
    dotted,
    fill,
    find,
    found,
    get,
    location_of,
    matches,
    plain,
)
from cdrmix.errors import ConfigError
from cdrmix.registry import nearest

Model = TypeVar("Model", bound=BaseModel)
_NAMED = re.compile(r"\b[a-z]+(?:\.[a-z_0-9]+)+")  # a dotted key in a text


@dataclass(frozen=True)
class Problem:
    """One problem. key: a dotted path; empty if the problem concerns a whole file."""

    location: Location
    key: str
    found: str
    allowed: str = ""
    nearest: str | None = None
    meaning: str = ""

    def __str__(self) -> str:
        lines = [": ".join(part for part in (str(self.location), self.key, self.found) if part)]
        if self.allowed:
            lines.append(f"allowed: {self.allowed}")
        if self.meaning:
            lines.append(f"meaning: {self.meaning}")
        if self.nearest:
            lines.append(f"did you mean {self.nearest}?")
        return "\n    ".join(map(_printable, lines))


def _printable(text: str) -> str:
    """The text with control characters escaped, so that it can neither control the terminal nor imitate a message."""
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in text)


def config_error(problems: Iterable[Problem]) -> ConfigError:
    """One error with all problems, sorted by file, line and key. Problems of the command line come last."""
    ordered = sorted(
        dict.fromkeys(problems),
        key=lambda it: (it.location.source.startswith(COMMAND_LINE), it.location.source, it.location.line, it.key),
    )
    count = "one problem" if len(ordered) == 1 else f"{len(ordered)} problems"
    return ConfigError("\n".join([f"the configuration has {count}:", *map(str, ordered)]))


def check(
    root: Node, complete: bool, model: type[Model], conflicts: Callable[[Model], Iterable[Conflict]]
) -> tuple[Model | None, list[Problem]]:
    """Adds the autosizers' defaults and validates.

    Args:
        root: the merged configuration, a mapping.
        complete: False if a file could not be read. Then missing keys, and combinations of keys, are not reported,
            because that file may contain the keys.
        model: the class of the configuration.
        conflicts: what combinations of its keys do not allow. It is asked if each key by itself is valid.

    Returns:
        The configuration, or None if there are problems; and the problems.
    """
    data = plain(root)
    if isinstance(data.get("model"), Mapping):
        data = fill(data, {"model": {"kind": DEFAULT_KINDS[("model",)]}})
    data = fill(data, core_param_autosizer(data))
    data = fill(data, reasoning_param_autosizer(data))
    data = fill(data, hyperparameters(dict(_known_values(schema_types.root(model), data))))
    problems: list[Problem] = []
    reasoning = find(root, ("reasoning",))
    if reasoning and reasoning.blank:
        # The section makes the run a reasoning run, so an empty one is ambiguous.
        message = "{} for parameters by model.size, a section with keys, or null for a core run"
        problems.append(Problem(reasoning.location, "reasoning", "found a section without keys", message))
    validation = _Validation(root, data, complete, model)
    config = validation.run()
    problems += validation.problems
    if config is not None and complete:  # a file that could not be read may change any value
        problems += [_problem(root, config, conflict) for conflict in conflicts(config)]
    return (None if problems else config), problems


def _problem(root: Node, config: BaseModel, conflict: Conflict) -> Problem:
    """A conflict with the location of the first written key: its own, then those that decide."""
    keys = [conflict.key, *conflict.others, *_NAMED.findall(conflict.allowed)]
    paths = [conflict.path, *(tuple(key.split(".")) for key in keys)]
    # An autosized or default value has no location.
    location = next((node.location for path in paths if (node := find(root, path))), location_of(root, paths[0]))
    written = find(root, conflict.path)
    value = plain(written) if written else get(config.model_dump(mode="json"), conflict.path)
    what = conflict.found or found(value)
    return Problem(location, dotted(conflict.path), what, conflict.allowed, conflict.nearest)


class _Validation(Generic[Model]):
    """Validation by pydantic, with its errors as problems.

    problems: what pydantic refuses. broken: the paths that have no usable value.
    """

    def __init__(self, root: Node, data: dict[str, Any], complete: bool, model: type[Model]) -> None:
        self.root, self.data, self.complete, self.model = root, data, complete, model
        self.schema = schema_types.root(model)
        self.problems: list[Problem] = []
        self.broken: set[Path] = set()

    def run(self) -> Model | None:
        try:
            # As JSON: then a list is accepted as a tuple and 1 as a float, and all other types are strict.
            return self.model.model_validate_json(json.dumps(self.data))
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
        misspelt: set[Path] = set()
        missing: list[Path] = []
        tagged = schema_types.tagged(self.model)
        for detail in details:
            path = _without_variant(detail["loc"], tagged)
            error_type = detail["type"]
            if error_type == "missing" and isinstance(path[-1], int):
                path, error_type = path[:-1], "too_short"  # an item of a list, not a key
            if error_type in ("union_tag_invalid", "union_tag_not_found"):
                path = (*path, "kind")
                error_type = "missing" if error_type == "union_tag_not_found" else error_type
            if path[-1:] == ("[key]",):  # pydantic's marker: the name of a free key is invalid
                self._add(path[:-1], "an empty name", "a name that is not empty")
                continue
            if path in self.broken:
                continue
            if error_type == "extra_forbidden":
                close = schema_types.nearest_key(self.schema, path, self.data)
                misspelt.update([close] if close else [])
                self._add_unknown(path, close)
                continue
            self.broken.add(path)
            node = find(self.root, path)
            if node and node.invalid:
                continue
            if error_type == "missing":
                missing.append(path)
            else:
                self._add_invalid(path)
        for path in missing:
            # A misspelt key is reported once, under the name that was written.
            if self.complete and path not in misspelt and not self._is_derived(path):
                self._add_missing(path)
        return None

    def _add(self, path: Path, what: str, allowed: str = "", *, nearest: str | None = None, meaning: str = "") -> None:
        self.problems.append(Problem(location_of(self.root, path), dotted(path), what, allowed, nearest, meaning))

    def _is_derived(self, path: Path) -> bool:
        """Whether the key is derived from another key that has no usable value."""
        key = f"{dotted(path)}."
        source = next((source for derived, source in DERIVED_FROM.items() if key.startswith(f"{derived}.")), None)
        if source is None and dotted(path) in SET_BY_A_RULE and self._has_rule():  # it counts the model's parameters
            return any(other[0] == "model" or dotted(other) in RULE_READS for other in self.broken)
        return source is not None and any(dotted(other) == source for other in self.broken)

    def _has_rule(self) -> bool:
        return get(self.data, ("train", "hyperparameters")) not in (None, "none")

    def _add_unknown(self, path: Path, close: Path | None) -> None:
        section = path[:-1]
        schema = schema_types.at(self.schema, section, self.data)
        known = schema_types.keys(schema, get(self.data, section)) if schema else {}
        where = f"in {dotted(section)}" if section else "at the top"
        name, what = str(path[-1]), "unknown key"
        if name == "<<":
            what += " (settings are shared by `base: FILE`, not by merge keys)"
        elif "." in name:
            what += " (in a file, sections are nested, not written with dots)"
        elif schema and (others := schema_types.kinds_with(schema, name)):
            what, close = f"not a key of kind={get(self.data, (*section, 'kind'))}, but of {', '.join(others)}", None
        self._add(path, what, f"{where}: {', '.join(known)}", nearest=dotted(close) if close else None)

    def _add_missing(self, path: Path) -> None:
        schema = schema_types.at(self.schema, path, self.data)
        allowed = schema_types.allowed(schema) if schema else ""
        if any(f"{key}.".startswith(f"{dotted(path)}.") for key in _autosized_keys()):
            sizes = ", ".join(REASONING_SIZES if path[0] == "reasoning" else get_args(Size))
            allowed += f"; or set model.size ({sizes}), which sets it"
        if dotted(path) in SET_BY_A_RULE and self._has_rule():
            allowed += "; or set train.tokens_per_parameter, from which train.hyperparameters derives it"
        meaning = " ".join(schema.get("description", "").split()) if schema else ""
        self._add(path, "missing, and it has no default", allowed, meaning=meaning)

    def _add_invalid(self, path: Path) -> None:
        value = get(self.data, path)
        schema = schema_types.at(self.schema, path, self.data)
        choices = schema_types.choices(schema) if schema else []
        close = nearest(value, choices) if isinstance(value, str) else None
        self._add(path, found(value), schema_types.allowed(schema) if schema else "", nearest=close)


def _without_variant(location: tuple[str | int, ...], tagged: frozenset[Path]) -> Path:
    """pydantic's location of an error, without the variant name that pydantic inserts behind a tagged section."""
    path: Path = ()
    inserted = False
    for part in location:
        if not inserted and matches(path, tagged):
            inserted = True
        else:
            path = (*path, part)
    return path


def _autosized_keys() -> list[str]:
    """The keys that a size sets, dotted."""
    data = {"model": {"size": next(iter(SCALES))}, "reasoning": {}}

    def walk(section: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for key, value in section.items():
            yield from walk(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [f"{prefix}{key}"]

    return [*walk(core_param_autosizer(data), ""), *walk(reasoning_param_autosizer(data), "")]


def _known_values(schema: schema_types.Schema, data: object, path: Path = ()) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every key that has a value or a default. A written section is included as a mapping, or as
    None if it is null."""
    required = schema_types.required(schema)
    section = data if isinstance(data, Mapping) else {}
    for key, inner in schema_types.keys(schema, section).items():
        here = (*path, key)
        if key in section:
            yield dotted(here), section[key]
        elif key not in required and "default" in inner:
            yield dotted(here), inner["default"]
        if schema_types.is_section(inner):
            written = key in section or key in required
            absent = section.get(key) is None if written else inner.get("default", {}) is None
            if not absent:
                yield from _known_values(inner, section.get(key, {}), here)
