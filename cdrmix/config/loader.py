"""The loader: YAML files with `base:` inheritance and `key.path=value` overrides to a validated configuration.

A configuration file is one mapping. Its key `base:` names another file, relative to the folder of the file itself.
The loader reads that file first and merges this one into it, mapping by mapping. The base file may have a base file.
Overrides are merged last, all together: their order among the keys of one section does not matter. Paths inside a
configuration (corpus, tokenizer, `run.root`, `data.cache`) are not changed: they are relative to the working directory.

YAML 1.2 applies where it differs from PyYAML: `3e-4` is a number, `yes` and `on` are strings, and `010` is ten. Values
are plain data: a tag never constructs an object.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cdrmix.config import schema_types
from cdrmix.config.check import Model, Problem, check, config_error
from cdrmix.config.conflicts.conflict import Conflict
from cdrmix.config.nodes import COMMAND_LINE, Location, Node, Scalar, find, found, merge, with_sections
from cdrmix.errors import ConfigError
from cdrmix.plugins import load_plugins
from cdrmix.registry import nearest

SNAPSHOT = "config_snapshot.yaml"  # the file of a run or export: `Config.to_yaml`
MAX_FILE_BYTES = 1 << 20  # a configuration has a few thousand
MAX_VALUES = 20_000  # of a file; each use of an alias counts
MAX_DEPTH = 50  # nested mappings and lists

_TAG = "tag:yaml.org,2002:"
_SCALARS = [
    (_TAG + "null", re.compile(r"(?:~|null|Null|NULL|)\Z")),
    (_TAG + "bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")),
    (_TAG + "int", re.compile(r"[-+]?(?:0x[0-9a-fA-F]+|[0-9]+(?:_[0-9]+)*)\Z")),
    (_TAG + "float", re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")),
    (_TAG + "float", re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z")),
]
_SURROGATE = re.compile("[\ud800-\udfff]")  # an escape in YAML can produce one, but UTF-8 cannot hold it
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
_KEY_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\Z")


class _Reader(yaml.SafeLoader):
    """Parses YAML text to nodes with line numbers. It constructs no objects."""

    yaml_implicit_resolvers = {None: _SCALARS}


class _Writer(yaml.SafeDumper):
    """Writes YAML. It quotes every string that YAML 1.1 or this module would read as another type."""

    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, None: _SCALARS}

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # In single quotes, PyYAML writes the line break U+0085 unchanged and reads it as a line feed.
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\x85" in data else None)


_Writer.add_representer(str, _Writer.represent_str)


def load_yaml(
    path: str | Path,
    overrides: Sequence[str],
    model: type[Model],
    conflicts: Callable[[Model], Iterable[Conflict]] = lambda _: (),
) -> tuple[Model, Node]:
    """Reads a YAML file with all files it inherits from, applies overrides and autosizers, and validates.

    Args:
        path: a YAML file.
        overrides: `key.path=value` each, the value in YAML; a later one takes precedence.
        model: the class of the configuration.
        conflicts: what combinations of its keys do not allow.

    Returns:
        The configuration, and what was written, with its locations.

    Raises:
        ConfigError: with every problem, its file and line, what is allowed and the nearest name.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"path must be a string or a Path; found {path!r}")
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in overrides):
        raise ConfigError(f"overrides must be a list of key.path=value; found {overrides!r}")
    load_plugins()  # the configuration may use names that plugins register
    reader = _ConfigReader(model)
    root = reader.file(Path(path), Location(str(path)), ()) or Node({}, Location(str(path)))
    if overriding := reader.overrides(overrides):
        root = merge(root, overriding, reader.tagged)
    config, problems = check(root, reader.complete, model, conflicts)
    if reader.problems or problems or config is None:
        raise config_error(reader.problems + problems)
    return config, root


def dump_yaml(data: Mapping[str, Any]) -> str:
    """Plain data as YAML text, which load_yaml reads as equal data."""
    return yaml.dump(data, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120)


class _UnreadableError(Exception):
    """A file or an override that cannot be used at all."""

    def __init__(self, location: Location, found: str, allowed: str = "", nearest: str | None = None) -> None:
        super().__init__(found)
        self.location, self.found, self.allowed, self.nearest = location, found, allowed, nearest


class _ConfigReader:
    """Reads the files and overrides of one configuration, and collects their problems."""

    def __init__(self, model: type[Model]) -> None:
        self.schema, self.tagged = schema_types.root(model), schema_types.tagged(model)
        self.problems: list[Problem] = []
        self.complete = True  # every file was readable

    def file(self, path: Path, referenced_at: Location, children: tuple[Path, ...]) -> Node | None:
        """A file merged into the files that it inherits from, or None if the file cannot be read.

        Args:
            referenced_at: where the file is named: the `base:` line of its child, or the name of the first file.
            children: the files that inherit from this one, the first one first.
        """
        key = "base" if children else ""
        try:
            text = _read(path, referenced_at)
            if any(os.path.realpath(path) == os.path.realpath(child) for child in children):
                circle = " -> ".join(map(str, [*children, path]))
                allowed = "a file that does not inherit from this one"
                raise _UnreadableError(referenced_at, f"inherits in a circle: {circle}", allowed)
            root = self._parse_file(text, Location(str(path), 1))
        except _UnreadableError as error:
            key = key if error.location == referenced_at else ""
            self.problems.append(Problem(error.location, key, error.found, error.allowed, error.nearest))
            self.complete = False
            return None
        assert isinstance(root.content, dict)
        base = root.content.pop("base", None)
        if base is None:
            return root
        if not isinstance(base.content, str) or not base.content:
            self.problems.append(Problem(base.location, "base", found(_outline(base)), "the path of a YAML file"))
            self.complete = False
            return root
        parent = self.file(Path(os.path.normpath(path.parent / base.content)), base.location, (*children, path))
        return merge(parent, root, self.tagged) if parent else root

    def _parse_file(self, text: str, location: Location) -> Node:
        problems: list[Problem] = []
        root = _parse(text, location, "", problems)
        sections = schema_types.keys(self.schema)
        allowed = f"a mapping with the sections {', '.join(sections)}"
        if not isinstance(root.content, dict):
            # Not what was found: `base` may name a file that is no configuration and that others may not read.
            what = "a list" if isinstance(root.content, list) else "a single value"
            what = "the file is empty" if root.blank else f"found {what} at the top of the file"
            raise _UnreadableError(root.location, what, allowed)
        if root.content and not root.content.keys() & {"base", *sections}:
            close = next(filter(None, (nearest(key, sections) for key in root.content)), None)
            raise _UnreadableError(root.location, "not a configuration: it has no section of one", allowed, close)
        if (base := root.content.get("base")) is not None and Path(location.source).name == SNAPSHOT:
            # It has every key, and may come from elsewhere, whose files it must not name.
            raise _UnreadableError(base.location, "base: a snapshot inherits from no file", "a snapshot without `base`")
        self.problems += problems
        return with_sections(root)

    def overrides(self, texts: Sequence[str]) -> Node | None:
        """All overrides as one mapping. A later one takes precedence."""
        root: Node | None = None
        for text in texts:
            if override := self._override(text):
                # `data.source.kind=jsonl` sets one key, and other overrides may set keys of the new kind. A mapping,
                # as in `data.source={kind: jsonl, ...}`, replaces a section of another kind.
                value = find(override, tuple(text.partition("=")[0].split(".")))
                is_section = value is not None and isinstance(value.content, dict)
                root = merge(root, override, self.tagged if is_section else frozenset()) if root else override
        return root

    def _override(self, text: str) -> Node | None:
        """`a.b=c` as the mapping {a: {b: c}}, or None and a problem."""
        location = Location(f"{COMMAND_LINE} ({text!r})")
        key, equals, value_text = text.partition("=")
        try:
            if not equals or not _KEY_PATH.match(key):
                raise _UnreadableError(location, "not an override", "key.path=value, such as train.steps=1000")
            if key == "base":
                raise _UnreadableError(location, "only allowed in a file", "--config FILE, with `base:` in that file")
            if key.count(".") >= MAX_DEPTH:
                raise _UnreadableError(location, "nested too deep", f"at most {MAX_DEPTH} nested sections")
            node = _parse(value_text, location, key, self.problems)
        except _UnreadableError as error:
            self.problems.append(
                Problem(location, key if _KEY_PATH.match(key) and equals else "", error.found, error.allowed)
            )
            return None
        for part in reversed(key.split(".")):
            node = Node({part: node}, location)
        return with_sections(node)


def _without_words(quoted: re.Match[str]) -> str:
    """What an error of PyYAML quotes, unless it is a word of the file, which may be one that others may not read."""
    text = quoted[1] or quoted[2] or ""
    if text == "\\t":
        return "tab"
    return quoted[0] if len(text) < 2 or text.startswith("<") else "a word"


def _outline(node: Node) -> object:
    """A node as plain data without its inner values."""
    if isinstance(node.content, dict):
        return {}
    return [None] * len(node.content) if isinstance(node.content, list) else node.content


def _read(path: Path, referenced_at: Location) -> str:
    """The text of a file. If there is no such file, the error has the location `referenced_at`."""
    name = "" if str(path) == referenced_at.source else f"{path}: "
    try:
        if not path.exists():
            close = nearest(path.name, (other.name for other in path.parent.glob("*.y*ml")))
            suggestion = str(path.parent / close) if close else None
            raise _UnreadableError(referenced_at, f"{name}no such file", nearest=suggestion)
        if not path.is_file():  # a folder, a device, a pipe
            what = "a folder" if path.is_dir() else "not a regular file"
            raise _UnreadableError(referenced_at, f"{name}{what}", "a YAML file")
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # not for want of this file
            raise
        raise _UnreadableError(referenced_at, f"{name}cannot be read: {error.strerror}") from error
    except ValueError as error:  # a null byte in the name
        raise _UnreadableError(referenced_at, f"{str(path)!r} cannot be a file's name: {error}") from error
    start = Location(str(path), 1)
    if len(raw) > MAX_FILE_BYTES:
        raise _UnreadableError(start, "too large for a configuration", f"at most {MAX_FILE_BYTES} bytes")
    if b"\0" in raw:
        raise _UnreadableError(start, "a binary file, not YAML", "UTF-8 text")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        what = f"the byte 0x{raw[error.start]:02x} is not UTF-8"
        raise _UnreadableError(Location(str(path), line), what, "UTF-8 text") from error


def _parse(text: str, location: Location, key: str, problems: list[Problem]) -> Node:
    """YAML text to a node. Lines are counted if `location` has a line. The dotted keys of problems begin with `key`."""

    def at(line: int) -> Location:
        return Location(location.source, line if location.line else 0)

    try:
        node = _compose(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        what = _QUOTED.sub(_without_words, what)
        raise _UnreadableError(at(mark.line + 1 if mark else 1), f"not valid YAML: {what}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _UnreadableError(at(line), f"not valid YAML: the character U+{ord(text[error.position]):04X}") from error
    except RecursionError as error:
        allowed = f"at most {MAX_DEPTH} nested mappings or lists"
        raise _UnreadableError(at(1), "nested too deep", allowed) from error
    if node is None:
        return Node(None, location, blank=True)
    return _Conversion(location, problems).convert(node, location, key, 0)


@functools.lru_cache(maxsize=256)  # a command reads its files several times, and PyYAML takes 50 ms for one
def _compose(text: str) -> yaml.Node | None:
    """The YAML nodes of a text. They must not be changed."""
    reader = _Reader("")
    try:
        reader = _Reader(text)
        return reader.get_single_node()
    finally:
        reader.dispose()


class _Conversion:
    """Converts the YAML nodes of one text. A node that cannot be converted becomes a problem and an invalid Node."""

    def __init__(self, location: Location, problems: list[Problem]) -> None:
        self._location, self._problems = location, problems
        self._count = 0

    def _at(self, node: yaml.Node) -> Location:
        return Location(self._location.source, node.start_mark.line + 1 if self._location.line else 0)

    def convert(self, node: yaml.Node, location: Location, key: str, depth: int) -> Node:
        """The Node of a YAML node. key: its dotted key. location: of its key."""
        self._count += 1
        if self._count > MAX_VALUES or depth > MAX_DEPTH:
            # An alias of itself has no depth limit, and aliases of aliases grow exponentially.
            limits = f"at most {MAX_VALUES} values in a file (each use of an alias counts), {MAX_DEPTH} deep"
            raise _UnreadableError(self._at(node), "too many values, or nested too deep", limits)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Node(self._mapping(node, key, depth), location)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            inner = enumerate(node.value)
            return Node([self.convert(item, self._at(item), f"{key}[{i}]", depth + 1) for i, item in inner], location)
        try:
            return Node(_scalar(node), location, blank=_is_blank(node))
        except ValueError as error:
            self._problems.append(Problem(self._at(node), key, *error.args))
            return Node(None, location, invalid=True)

    def _mapping(self, node: yaml.MappingNode, key: str, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            location = self._at(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._problems.append(Problem(location, key, "a list or mapping as a key", "a name"))
                continue
            name = key_node.value
            full = f"{key}.{name}" if key else name
            if _SURROGATE.search(name):
                self._problems.append(Problem(location, key, "half of a surrogate pair in a key", "a name"))
                continue
            if name in entries:
                first = entries[name].location
                self._problems.append(Problem(location, full, f"written twice, first at {first}", "each key once"))
            entries[name] = self.convert(value_node, location, full, depth + 1)
        return entries


def _is_blank(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value == "" and node.style is None


def _scalar(node: yaml.Node) -> Scalar:
    """The value of a scalar. Raises ValueError with two arguments: what was found, what is allowed."""
    text, tag = node.value, node.tag
    if tag == _TAG + "str":
        if _SURROGATE.search(text):
            raise ValueError("half of a surrogate pair, which is not a character", "Unicode text")
        return str(text)
    if not isinstance(node, yaml.ScalarNode) or not any(tag == known and form.match(text) for known, form in _SCALARS):
        raise ValueError(f"the tag {tag}", "untagged mappings, lists, strings, numbers, true, false and null")
    if tag == _TAG + "null":
        return None
    if tag == _TAG + "bool":
        return bool(text.lower() == "true")
    if tag == _TAG + "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    number = int(text, 16 if "x" in text else 10) if len(text) <= 40 else 1 << 64
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError("an integer of more than 64 bits", "an integer that fits in 64 bits")
    return number
