"""The configuration reference: every key with its type, bounds, default and meaning, as Markdown text.

The schema alone determines the text. `cdrmix config` prints it, and docs/configuration.md is a copy of it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from cdrmix.config import schema_types
from cdrmix.config.autosizers import DERIVED_FROM
from cdrmix.config.nodes import ANY
from cdrmix.config.schema import Config
from cdrmix.config.schema_types import Schema
from cdrmix.errors import ConfigError
from cdrmix.registry import nearest

WIDTH = 110  # characters of a line
HEAD = """\
# Configuration reference

All keys of a configuration file. `cdrmix config` prints this page, and `cdrmix config KEY` prints one key or one
section. `cdrmix validate --config FILE` checks a file and prints the value of every key.

- A *required* key has no default. `model.size` sets some of the required keys.
- `<name>` is a name of your choice. `[]` is an item of a list.
- `train.steps=1000` on the command line overrides a key of the file.
- `base: OTHER.yaml` at the top of a file inherits all keys of the other file. A `config_snapshot.yaml` has no base.
"""


class Entry(NamedTuple):
    """The heading of a section, or a key: its dotted name and its Markdown text."""

    name: str
    text: str
    is_heading: bool = False


def reference(key: str | None = None) -> str:
    """The reference of one key, of one section with all sections in it, or of the whole configuration (None).

    Raises ConfigError with the nearest name if there is no such key.
    """
    if key is None:
        return HEAD + "".join(entry.text for entry in _sections(schema_types.root(Config), "", {}))
    entries = _entries()
    chosen = [entry for entry in entries if entry.name == key or entry.name.startswith((f"{key}.", f"{key}["))]
    if any(entry.is_heading for entry in chosen):  # a section: its line in the section above is left out
        chosen = [entry for entry in chosen if entry.is_heading or entry.name != key]
    if not chosen:
        names = {entry.name.rpartition(".")[2]: entry.name for entry in reversed(entries)}
        close = nearest(key.rpartition(".")[2], names)
        hint = f"did you mean {names[close]}?" if close else "`cdrmix config` prints all keys"
        raise ConfigError(f"the configuration has no key {key}; {hint}")
    return "".join(entry.text for entry in chosen).lstrip("\n")


@cache
def _entries() -> tuple[Entry, ...]:
    """The entries of the whole configuration, all sections written out."""
    return tuple(_sections(schema_types.root(Config), ""))


def _sections(schema: Schema, name: str, seen: dict[str, str] | None = None) -> Iterator[Entry]:
    """The entries of a section: its heading, its keys, then the sections in it.

    seen: the type of each section so far to its first name; a second section of that type refers to the first. None:
    all sections are written out.
    """
    types = {kind: schema_types.resolve(variant) for kind, variant in schema_types.kinds(schema).items()}
    for kind, section in (types or {"": schema_types.resolve(schema)}).items():
        if name:
            heading = f"\n## `{name}`" + (f" with `kind: {kind}`" if kind else "")
            first = seen.setdefault(section["title"], name) if seen is not None else name
            if first != name:
                yield Entry(name, f"\n## `{name}`\n\nThe same keys as `{first}`.\n", is_heading=True)
                return
            yield Entry(name, f"{heading}\n\n{_paragraph(section.get('description', ''))}\n\n", is_heading=True)
        keys = {f"{name}.{key}" if name else key: inner for key, inner in schema_types.keys(section).items()}
        for path, inner in keys.items() if name else ():
            required = path.rpartition(".")[2] in schema_types.required(section)
            yield Entry(path, _key(path, inner, required))
        inside = [(path, *_content(inner)) for path, inner in keys.items()]
        for path, suffix, content in sorted(inside, key=lambda item: item[1] != ""):  # lists and mappings last
            if schema_types.is_section(content):
                yield from _sections(content, path + suffix, seen)


def _content(schema: Schema) -> tuple[str, Schema]:
    """What a mapping with free keys or a list holds, with the suffix of its name; the schema itself for other keys."""
    inner = schema_types.free(schema)
    if inner is not None:
        return f".{ANY}", inner
    items = schema_types.resolve(schema).get("items")
    if items is not None and "properties" in schema_types.resolve(items):
        return "[]", items
    return "", schema


def _key(name: str, schema: Schema, required: bool) -> str:
    source = next((source for key, source in DERIVED_FROM.items() if f"{name}.".startswith(f"{key}.")), None)
    default = f"default `{_yaml(schema['default'])}`" if "default" in schema else ""
    if required:
        default = f"derived from `{source}`" if source else "*required*"
    allowed = ", ".join(part for part in (_allowed(schema), default) if part)
    meaning = schema.get("description") or schema_types.resolve(schema).get("description", "")
    return _paragraph(f"- `{name}`: {allowed}. {meaning}", indent="  ") + "\n"


def _allowed(schema: Schema) -> str:
    suffix, content = _content(schema)
    if not schema_types.is_section(content):
        return schema_types.allowed(schema)
    return {"": "a section", "[]": "a list of sections"}.get(suffix, "a mapping from names to sections")


def _yaml(value: object) -> str:
    """A default value as a configuration file writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _paragraph(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()), WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
