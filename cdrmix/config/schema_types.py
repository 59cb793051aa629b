"""The schema in words: what a key may hold, which keys there are, and the name most like a misspelt one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import takewhile
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.config.tree import ANY, Path, get
from cdrmix.registry import nearest

Schema = Mapping[str, Any]  # a node of pydantic's JSON schema


@cache
def _document() -> dict[str, Any]:
    return Config.model_json_schema()


def root() -> Schema:
    """The schema of a whole configuration."""
    return _document()


def resolve(schema: Schema) -> Schema:
    """Follow references, and look through "or null"; a choice between several kinds of scalars stays one."""
    if "$ref" in schema:
        return resolve(_document()["$defs"][schema["$ref"].rsplit("/", 1)[-1]])
    if "anyOf" in schema:
        others = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        return resolve(others[0]) if len(others) == 1 else schema
    return schema


def kinds(schema: Schema) -> dict[str, Schema]:
    """The variants of a section whose keys depend on its `kind`; empty for any other key."""
    mapping = resolve(schema).get("discriminator", {}).get("mapping", {})
    return {kind: resolve({"$ref": reference}) for kind, reference in mapping.items()}


def free(schema: Schema) -> Schema | None:
    """What a mapping whose keys are free holds under each of them; None for any other key."""
    inner = resolve(schema).get("additionalProperties")
    return inner if isinstance(inner, Mapping) else None


def keys(schema: Schema, data: object = None) -> dict[str, Schema]:
    """The keys of a section (given its `data`, where they depend on the kind or are free); empty for no section."""
    if inner := free(schema):
        return {key: inner for key in data if isinstance(key, str)} if isinstance(data, Mapping) else {}
    variants = kinds(schema)
    if variants:
        kind = data.get("kind") if isinstance(data, Mapping) else None
        return keys(variants[kind]) if isinstance(kind, str) and kind in variants else {"kind": {"enum": [*variants]}}
    return dict(resolve(schema).get("properties", {}))


def is_section(schema: Schema) -> bool:
    """Whether the key holds a mapping of further keys, which the schema names or which are free."""
    return bool(kinds(schema)) or "properties" in resolve(schema) or free(schema) is not None


def required(schema: Schema) -> list[str]:
    """The keys of a section that have no default."""
    return list(resolve(schema).get("required", []))


def at(path: Path, data: object) -> Schema | None:
    """The schema of the key at `path` in `data`, or None where the schema has no such key."""
    schema: Schema = _document()
    for part in path:
        if isinstance(part, int):
            items = resolve(schema)
            prefix = items.get("prefixItems", [])
            schema = prefix[part] if part < len(prefix) else items.get("items", {})
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
    """The keys of a section without looking at its data: of a mapping with free keys, ANY."""
    inner = free(schema)
    return {ANY: inner} if inner is not None else keys(schema)


@cache
def tagged() -> frozenset[Path]:
    """The paths of the sections whose keys depend on their `kind`, ANY standing for a free key."""

    def walk(schema: Schema, path: Path) -> Iterator[Path]:
        if kinds(schema):
            yield path
        else:
            for key, inner in _named(schema).items():
                yield from walk(inner, (*path, key))

    return frozenset(walk(_document(), ()))


def every_key() -> list[Path]:
    """The path of every key and section that a configuration may hold, in the schema's order; ANY for free keys."""

    def walk(schema: Schema, path: Path) -> Iterator[Path]:
        for variant in kinds(schema).values() or [schema]:
            for key, inner in _named(variant).items():
                yield (*path, key)
                yield from walk(inner, (*path, key))

    return list(dict.fromkeys(walk(_document(), ())))


def nearest_key(path: Path, data: object) -> Path | None:
    """The key most like the unknown one at `path`: among its siblings if any is, else anywhere."""
    *section, name = path
    parent = at(tuple(section), data)
    close = nearest(str(name), keys(parent, get(data, tuple(section)))) if parent else None
    if close:
        return (*section, close)
    known = [other for other in every_key() if other[-1] != ANY]
    close = nearest(str(name), {str(other[-1]): other for other in known})
    if not close:
        return None

    def together(other: Path) -> int:
        """How many sections the two paths share."""
        shared = takewhile(lambda pair: pair[1] in (ANY, pair[0]), zip(section, other[:-1], strict=False))
        return sum(1 for _ in shared)

    best = max((other for other in known if other[-1] == close), key=together)  # of equal ones the first
    return (*section[: together(best)], *best[together(best) :])


def allowed(schema: Schema) -> str:
    """What a key may hold, for a person: type, range or choices."""
    text = _allowed(resolve(schema))
    null = any(choice.get("type") == "null" for choice in schema.get("anyOf", ()))
    return f"{text}, or null" if null else text


def choices(schema: Schema) -> list[str]:
    """The strings that a key may be one of; empty where it is not such a key."""
    schema = resolve(schema)
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return [choice for choice in listed if isinstance(choice, str)]


def _allowed(schema: Schema) -> str:
    if "enum" in schema or "const" in schema:
        listed = [str(choice) for choice in schema.get("enum", [schema.get("const")])]
        return listed[0] if len(listed) == 1 else f"one of {', '.join(listed[:-1])} or {listed[-1]}"
    if "anyOf" in schema:
        return " or ".join(_allowed(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if variants := kinds(schema):
        return f"a section whose kind is one of {', '.join(variants)}"
    if inner := free(schema):
        return f"names of your own, each with {allowed(inner)}"
    if "properties" in schema:
        needed = required(schema)
        return f"a section with the keys {', '.join(schema['properties'])}" + (
            f" (required: {', '.join(needed)})" if needed else ""
        )
    if schema.get("type") == "array":
        return _allowed_list(schema)
    if schema.get("type") == "string":
        return "a string that is not empty" if schema.get("minLength") else "a string"
    if schema.get("type") == "boolean":
        return "true or false"
    return _allowed_number(schema)


def _allowed_list(schema: Schema) -> str:
    if prefix := schema.get("prefixItems"):
        return f"a list of {len(prefix)}, each {allowed(prefix[0])}"
    least = f"at least {schema['minItems']}" if schema.get("minItems") else "any length"
    return f"a list of {least}, each {allowed(schema.get('items', {}))}"


def _allowed_number(schema: Schema) -> str:
    integer = schema.get("type") == "integer"
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if integer and above is not None:
        low, above = above + 1, None
    noun = "an integer" if integer else "a number"
    if low is not None and high is not None:
        return f"{noun} from {low:g} to {high:g}"
    lower = f"of at least {low:g}" if low is not None else f"above {above:g}" if above is not None else ""
    upper = f"of at most {high:g}" if high is not None else f"below {below:g}" if below is not None else ""
    return " ".join([noun, " and ".join(bound for bound in (lower, upper) if bound)]).strip()
