"""Queries on the JSON schema of the configuration: the keys of a section, what a key allows, the nearest known key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import takewhile
from typing import Any

from pydantic import BaseModel

from cdrmix.config.nodes import ANY, Path, get
from cdrmix.registry import nearest

Schema = Mapping[str, Any]  # a node of the JSON schema
_DEFINITION = "#/$defs/"


@cache
def root(model: type[BaseModel]) -> Schema:
    """The JSON schema of a whole configuration. Each reference in it is replaced by the definition itself."""
    document = model.model_json_schema()

    def linked(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: linked(inner) for key, inner in node.items()}
        if isinstance(node, list):
            return [linked(inner) for inner in node]
        if isinstance(node, str) and node.startswith(_DEFINITION):
            return linked(document["$defs"][node.removeprefix(_DEFINITION)])
        return node

    return {key: linked(node) for key, node in document.items() if key != "$defs"}


def resolve(schema: Schema) -> Schema:
    """The schema behind a reference or an "or null". A choice between several other types is returned unchanged."""
    if "$ref" in schema:
        return resolve(schema["$ref"])
    if "anyOf" in schema:
        others = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        return resolve(others[0]) if len(others) == 1 else schema
    return schema


def kinds(schema: Schema) -> dict[str, Schema]:
    """The variants of a section whose keys depend on its `kind`. Empty for other keys."""
    mapping = resolve(schema).get("discriminator", {}).get("mapping", {})
    return {kind: resolve(variant) for kind, variant in mapping.items()}


def free(schema: Schema) -> Schema | None:
    """The schema of the values of a mapping with free keys. None for other keys."""
    inner = resolve(schema).get("additionalProperties")
    return inner if isinstance(inner, Mapping) else None


def kinds_with(schema: Schema, key: str) -> list[str]:
    """The kinds of a section whose keys depend on its `kind` that have a key of this name."""
    return [kind for kind, variant in kinds(schema).items() if key in keys(variant)]


def keys(schema: Schema, data: object = None) -> dict[str, Schema]:
    """The keys of a section. Empty if the schema is not a section.

    data: the section itself, which determines its keys if they depend on its `kind` or are free.
    """
    if inner := free(schema):
        return {key: inner for key in data if isinstance(key, str)} if isinstance(data, Mapping) else {}
    variants = kinds(schema)
    if variants:
        kind = data.get("kind") if isinstance(data, Mapping) else None
        return keys(variants[kind]) if isinstance(kind, str) and kind in variants else {"kind": {"enum": [*variants]}}
    return dict(resolve(schema).get("properties", {}))


def is_section(schema: Schema) -> bool:
    """Whether the key holds a mapping of further keys, named by the schema or free."""
    return bool(kinds(schema)) or "properties" in resolve(schema) or free(schema) is not None


def required(schema: Schema) -> list[str]:
    """The keys of a section that have no default."""
    return list(resolve(schema).get("required", []))


def at(schema: Schema, path: Path, data: object) -> Schema | None:
    """The schema of the key at `path` in `data`, or None if the root schema `schema` has no such key."""
    for part in path:
        if isinstance(part, int):
            array = resolve(schema)
            prefix = array.get("prefixItems", [])
            schema = prefix[part] if part < len(prefix) else array.get("items", {})
            data = data[part] if isinstance(data, list) and part < len(data) else None
            continue
        inner = free(schema)
        if inner is None:
            inner = keys(schema, data).get(part)
        if inner is None:
            return None
        schema, data = inner, data.get(part) if isinstance(data, Mapping) else None
    return schema


def _named(schema: Schema) -> dict[str, Schema]:
    """The keys of a section without its data. For a mapping with free keys: ANY."""
    inner = free(schema)
    return {ANY: inner} if inner is not None else keys(schema)


@cache
def tagged(model: type[BaseModel]) -> frozenset[Path]:
    """The path patterns of the sections of a configuration whose keys depend on their `kind`."""

    def walk(node: Schema, path: Path) -> Iterator[Path]:
        if kinds(node):
            yield path
        else:
            for key, inner in _named(node).items():
                yield from walk(inner, (*path, key))

    return frozenset(walk(root(model), ()))


def every_key(schema: Schema) -> list[Path]:
    """The path pattern of every key and section, in the order of the schema."""

    def walk(node: Schema, path: Path) -> Iterator[Path]:
        for variant in kinds(node).values() or [node]:
            for key, inner in _named(variant).items():
                yield (*path, key)
                yield from walk(inner, (*path, key))

    return list(dict.fromkeys(walk(schema, ())))


def nearest_key(schema: Schema, path: Path, data: object) -> Path | None:
    """The known key that is most similar to the unknown key at `path`.

    Keys of the same section come first. If none of them is similar, all keys of the schema are searched.
    """
    *section, name = path
    parent = at(schema, tuple(section), data)
    close = nearest(str(name), keys(parent, get(data, tuple(section)))) if parent else None
    if close:
        return (*section, close)
    known = [other for other in every_key(schema) if other[-1] != ANY]
    close = nearest(str(name), {str(other[-1]): other for other in known})
    if not close:
        return None

    def shared_sections(other: Path) -> int:
        """The length of the common prefix of the two paths."""
        common = takewhile(lambda pair: pair[1] in (ANY, pair[0]), zip(section, other[:-1], strict=False))
        return sum(1 for _ in common)

    best = max((other for other in known if other[-1] == close), key=shared_sections)  # the first of equal ones
    return (*section[: shared_sections(best)], *best[shared_sections(best) :])


def allowed(schema: Schema) -> str:
    """What a key allows, as text: type, range or choices."""
    text = _allowed(resolve(schema))
    null = any(choice.get("type") == "null" for choice in schema.get("anyOf", ()))
    return f"{text}, or null" if null else text


def choices(schema: Schema) -> list[str]:
    """The strings that a key allows. Empty if the key does not have a fixed set of strings."""
    schema = resolve(schema)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return [value for value in values if isinstance(value, str)]


def _allowed(schema: Schema) -> str:
    if "enum" in schema or "const" in schema:
        found = schema.get("enum", [schema.get("const")])
        values = [str(value).lower() if isinstance(value, bool) else str(value) for value in found]
        return values[0] if len(values) == 1 else f"one of {', '.join(values[:-1])} or {values[-1]}"
    if "anyOf" in schema:
        return " or ".join(_allowed(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if variants := kinds(schema):
        return f"a section whose kind is one of {', '.join(variants)}"
    if inner := free(schema):
        return f"names of your own, each with {allowed(inner)}"
    if "properties" in schema:
        names = required(schema)
        return f"a section with the keys {', '.join(schema['properties'])}" + (
            f" (required: {', '.join(names)})" if names else ""
        )
    if schema.get("type") == "array":
        return _allowed_list(schema)
    if schema.get("type") == "string":
        return "a string that is not empty" if schema.get("minLength") else "a string"
    if schema.get("type") == "boolean":
        return "true or false"
    if schema.get("type") == "object":
        return "a mapping"
    return _allowed_number(schema)


def _allowed_list(schema: Schema) -> str:
    if prefix := schema.get("prefixItems"):
        return f"a list of {len(prefix)}, each {allowed(prefix[0])}"
    length = f"at least {schema['minItems']}" if schema.get("minItems") else "any length"
    return f"a list of {length}, each {allowed(schema.get('items', {}))}"


def _bound(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _allowed_number(schema: Schema) -> str:
    integer = schema.get("type") == "integer"
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if integer and above is not None:
        low, above = above + 1, None
    noun = "an integer" if integer else "a number"
    if low is not None and high is not None:
        return f"{noun} from {low:g} to {_bound(high)}"
    lower = f"of at least {low:g}" if low is not None else f"above {above:g}" if above is not None else ""
    upper = f"of at most {_bound(high)}" if high is not None else f"below {below:g}" if below is not None else ""
    return " ".join([noun, " and ".join(bound for bound in (lower, upper) if bound)]).strip()
