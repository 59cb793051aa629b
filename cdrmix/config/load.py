"""YAML files to a Config and back: `base:` inheritance, `key.path=value` overrides, every problem told at once.

A configuration file is one mapping. Its key `base:` names another file, relative to the folder of
the file that says so; that file is read first and this one laid on top, mapping by mapping, at any
depth of inheritance. Overrides come last, all together: which of them says a section's `kind` and
which its other keys, and in what order, makes no difference. Paths *inside* a configuration (corpus, tokenizer,
`run.root`, `data.cache`) are left as they are written, and so are relative to the working directory.

YAML is read by its 1.2 rules where they differ from PyYAML's: `3e-4` is a number, `yes` and `on`
are strings, and `010` is ten. Values are plain data: no tag builds an object.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from cdrmix.config import schema_types as words
from cdrmix.config.check import check
from cdrmix.config.problems import Problem, failure, found
from cdrmix.config.schema import Config
from cdrmix.config.tree import COMMAND_LINE, Place, Scalar, Value, find, merge
from cdrmix.errors import ConfigError
from cdrmix.registry import nearest

LARGEST_FILE = 1 << 20  # bytes; a configuration is a few thousand
LARGEST_COUNT = 20_000  # values, counted after aliases are followed
# Keys that change no weight and no measurement, only where things are kept, what is told of them and how long it
# takes. The device is not among them: it decides the order in which sums are rounded.
NOT_HASHED: dict[str, Any] = {
    "run": {"root", "name", "threads"},
    "data": {"cache", "engine", "workers", "memory_mb"},  # the shards are the same
    "train": {"keep_last", "log_every", "expert_parallel", "profile"},
    "logging": True,
    "export": True,
}
DEEPEST = 50  # mappings and lists inside each other

_TAG = "tag:yaml.org,2002:"
_SCALARS = [
    (_TAG + "null", re.compile(r"(?:~|null|Null|NULL|)\Z")),
    (_TAG + "bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")),
    (_TAG + "int", re.compile(r"[-+]?(?:0x[0-9a-fA-F]+|[0-9]+(?:_[0-9]+)*)\Z")),
    (_TAG + "float", re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")),
    (_TAG + "float", re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z")),
]
_SURROGATE = re.compile("[\ud800-\udfff]")  # YAML can write one as an escape; no file or tokenizer can
_KEY_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\Z")


class _Reader(yaml.SafeLoader):
    """YAML text to nodes with their lines; nothing is constructed from them."""

    yaml_implicit_resolvers = {None: _SCALARS}


class _Writer(yaml.SafeDumper):
    """Quotes whatever this module's rules or YAML 1.1's would not read as a string."""

    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, None: _SCALARS}

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Between single quotes PyYAML writes U+0085, a line break, as it is, and reads it as a line feed.
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\x85" in data else None)


_Writer.add_representer(str, _Writer.represent_str)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, inherit, override, autosize and validate.

    Args:
        path: a YAML file.
        overrides: `key.path=value` each, the value in YAML; a later one wins.

    Raises:
        ConfigError: naming every problem with its file and line, what is allowed and the nearest name.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides must be a list of key.path=value; found the string {overrides!r}")
    reading = _Reading()
    tree = reading.chain(Path(path), Place(str(path)), ()) or Value({}, Place(str(path)))
    if above := reading.overrides(overrides):
        tree = merge(tree, above, words.tagged())
    config, wrong = check(tree, reading.whole)
    problems = reading.problems + wrong
    if problems or config is None:
        raise failure(problems)
    return config


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML without a `base:`: load_config gives an equal Config back from it alone."""
    data = config.model_dump(mode="json")
    for section in ("reasoning", "ablation"):
        if data[section] is None:
            del data[section]
    text = yaml.dump(data, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120)
    return f"# One {config.kind} run of cdrmix, fully resolved: every key, inherited, autosized or default.\n{text}"


def config_hash(config: Config) -> str:
    """SHA-256 (hex) of what of the resolved configuration makes a run another run.

    Every key counts but NOT_HASHED, so that a run may be moved, renamed, logged elsewhere, given
    less disk or its experts shared out otherwise, and still go on. How the values came about (inherited,
    overridden, autosized, default) and their order do not count.
    """
    data = config.model_dump(mode="json", exclude=NOT_HASHED)
    del data["ablation"]  # each of its arms is a configuration of its own
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class _Refusal(Exception):
    """A text that cannot be used at all."""

    def __init__(self, place: Place, found: str, allowed: str = "", nearest: str | None = None) -> None:
        super().__init__(found)
        self.place, self.found, self.allowed, self.nearest = place, found, allowed, nearest


class _Reading:
    """The layers of one configuration as they are read, and what was wrong with them."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.whole = True  # every file was readable

    def chain(self, path: Path, said_at: Place, heirs: tuple[Path, ...]) -> Value | None:
        """A file laid over the file that it names as base, and so on; None if it cannot be read.

        Args:
            said_at: where the file is named: its heir's `base:` line, or the file's own name for the first.
            heirs: the files that inherit from this one, the first one first.
        """
        key = "base" if heirs else ""
        try:
            text = _read(path, said_at)
            if any(os.path.realpath(path) == os.path.realpath(heir) for heir in heirs):
                circle = " -> ".join(map(str, [*heirs, path]))
                raise _Refusal(said_at, f"inherits in a circle: {circle}", "a file that does not inherit from this one")
            tree = self._sections(text, Place(str(path), 1))
        except _Refusal as refusal:
            key = key if refusal.place == said_at else ""
            self.problems.append(Problem(refusal.place, key, refusal.found, refusal.allowed, refusal.nearest))
            self.whole = False
            return None
        assert isinstance(tree.content, dict)
        base = tree.content.pop("base", None)
        if base is None:
            return tree
        if not isinstance(base.content, str) or not base.content:
            self.problems.append(Problem(base.place, "base", found(_outline(base)), "the path of a YAML file"))
            self.whole = False
            return tree
        below = self.chain(Path(os.path.normpath(path.parent / base.content)), base.place, (*heirs, path))
        return merge(below, tree, words.tagged()) if below else tree

    def _sections(self, text: str, place: Place) -> Value:
        tree = _parse(text, place, "", self.problems)
        if isinstance(tree.content, dict):
            return tree
        what = "the file is empty" if tree.blank else f"{found(_outline(tree))} at the top of the file"
        raise _Refusal(tree.place, what, f"a mapping with the sections {', '.join(words.keys(words.root()))}")

    def overrides(self, texts: Sequence[str]) -> Value | None:
        """All overrides as one tree, a later one laid over the earlier ones."""
        tree: Value | None = None
        for text in texts:
            if layer := self.override(text):
                # `data.source.kind=jsonl` says one key, whatever kind the keys beside it were written for; a
                # mapping, as in `data.source={kind: jsonl, ...}`, says the section.
                said = find(layer, tuple(text.partition("=")[0].split(".")))
                whole = said is not None and isinstance(said.content, dict)
                tree = merge(tree, layer, words.tagged() if whole else frozenset()) if tree else layer
        return tree

    def override(self, text: str) -> Value | None:
        """`a.b=c` as the tree {a: {b: c}}, or None and a problem."""
        place = Place(f"{COMMAND_LINE} ({text!r})")
        key, equals, value_text = text.partition("=")
        try:
            if not equals or not _KEY_PATH.match(key):
                raise _Refusal(place, "not an override", "key.path=value, such as train.steps=1000")
            if key == "base":
                raise _Refusal(place, "can only stand in a file", "--config FILE, with `base:` in that file")
            if key.count(".") >= DEEPEST:
                raise _Refusal(place, "nested too deep", f"at most {DEEPEST} sections inside each other")
            value = _parse(value_text, place, key, self.problems)
        except _Refusal as refusal:
            self.problems.append(
                Problem(place, key if _KEY_PATH.match(key) and equals else "", refusal.found, refusal.allowed)
            )
            return None
        for part in reversed(key.split(".")):
            value = Value({part: value}, place)
        return value


def _outline(value: Value) -> object:
    """A value as plain data, without what is inside it."""
    if isinstance(value.content, dict):
        return {}
    return [None] * len(value.content) if isinstance(value.content, list) else value.content


def _read(path: Path, said_at: Place) -> str:
    """The text of a file; `said_at` is blamed when there is no such file."""
    name = "" if str(path) == said_at.source else f"{path}: "
    try:
        if not path.exists():
            near = nearest(path.name, (other.name for other in path.parent.glob("*.y*ml")))
            raise _Refusal(said_at, f"{name}no such file", nearest=str(path.parent / near) if near else None)
        if not path.is_file():  # a folder, a device, a pipe
            raise _Refusal(said_at, f"{name}{'a folder' if path.is_dir() else 'not a regular file'}", "a YAML file")
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise _Refusal(said_at, f"{name}cannot be read: {error.strerror}") from error
    except ValueError as error:  # a null byte in the name
        raise _Refusal(said_at, f"{str(path)!r} cannot be a file's name: {error}") from error
    if len(raw) > LARGEST_FILE:
        raise _Refusal(Place(str(path), 1), "too large for a configuration", f"at most {LARGEST_FILE} bytes")
    if b"\0" in raw:
        raise _Refusal(Place(str(path), 1), "a binary file, not YAML", "UTF-8 text")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _Refusal(
            Place(str(path), line), f"the byte 0x{raw[error.start]:02x} is not UTF-8", "UTF-8 text"
        ) from error


def _parse(text: str, place: Place, key: str, problems: list[Problem]) -> Value:
    """YAML text to a tree. Its lines count from `place`, if that has a line; its keys from `key`."""

    def at(line: int) -> Place:
        return Place(place.source, line if place.line else 0)

    reader = _Reader("")
    try:
        reader = _Reader(text)
        node = reader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise _Refusal(at(mark.line + 1 if mark else 1), f"not valid YAML: {said}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _Refusal(at(line), f"not valid YAML: the character U+{ord(text[error.position]):04X}") from error
    except RecursionError as error:
        raise _Refusal(at(1), "nested too deep", f"at most {DEEPEST} mappings or lists inside each other") from error
    finally:
        reader.dispose()
    if node is None:
        return Value(None, place, blank=True)
    return _Conversion(place, problems).convert(node, place, key, 0)


class _Conversion:
    """Nodes of one text to Values; what cannot be converted becomes a problem and a refused Value."""

    def __init__(self, place: Place, problems: list[Problem]) -> None:
        self._place, self._problems = place, problems
        self._count = 0

    def _at(self, node: yaml.Node) -> Place:
        return Place(self._place.source, node.start_mark.line + 1 if self._place.line else 0)

    def convert(self, node: yaml.Node, place: Place, key: str, depth: int) -> Value:
        """The value of a node, whose key (dotted: `key`) stands at `place`."""
        self._count += 1
        if self._count > LARGEST_COUNT or depth > DEEPEST:
            # Aliases: one of itself is endlessly deep, ones of ones grow exponentially.
            limits = f"at most {LARGEST_COUNT} values in a file (each use of an alias counts), {DEEPEST} deep"
            raise _Refusal(self._at(node), "too many values, or nested too deep", limits)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Value(self._mapping(node, key, depth), place)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            inner = enumerate(node.value)
            return Value([self.convert(item, self._at(item), f"{key}[{i}]", depth + 1) for i, item in inner], place)
        try:
            return Value(_scalar(node), place, blank=_is_blank(node))
        except ValueError as error:
            self._problems.append(Problem(self._at(node), key, *error.args))
            return Value(None, place, refused=True)

    def _mapping(self, node: yaml.MappingNode, key: str, depth: int) -> dict[str, Value]:
        entries: dict[str, Value] = {}
        for key_node, value_node in node.value:
            place = self._at(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._problems.append(Problem(place, key, "a list or mapping as a key", "a name"))
                continue
            name = key_node.value
            full = f"{key}.{name}" if key else name
            if _SURROGATE.search(name):
                self._problems.append(Problem(place, key, "half of a surrogate pair in a key", "a name"))
                continue
            if name in entries:
                first = entries[name].place
                self._problems.append(Problem(place, full, f"written twice, first at {first}", "each key once"))
            entries[name] = self.convert(value_node, place, full, depth + 1)
        return entries


def _is_blank(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value == "" and node.style is None


def _scalar(node: yaml.Node) -> Scalar:
    """A scalar's value. Raises ValueError(what was found, what is allowed)."""
    text, tag = node.value, node.tag
    if tag == _TAG + "str":
        if _SURROGATE.search(text):
            raise ValueError("half of a surrogate pair, which is no character", "Unicode text")
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
