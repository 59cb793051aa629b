"""The configuration of a run: read from YAML with overrides, written, and hashed."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import PrivateAttr

from cdrmix.config.check import Problem, config_error
from cdrmix.config.conflicts import conflicts
from cdrmix.config.hashing import MEMORY, NOT_HASHED
from cdrmix.config.loader import dump_yaml, load_yaml
from cdrmix.config.nodes import Location, Node, found, location_of
from cdrmix.config.schema_run import Sections
from cdrmix.json_text import parse_json


@dataclass(frozen=True)
class Written:
    """What the files and overrides of a configuration have, with locations. All are equal: a Config is its values."""

    root: Node = field(compare=False)


@functools.lru_cache(maxsize=8)
def _as_yaml(data: str) -> str:
    """JSON as YAML. A run writes the same text with every checkpoint, and PyYAML takes longer than a small step."""
    return dump_yaml(parse_json(data))


class Config(Sections):
    """One run. A `reasoning` section makes it a reasoning run (stage A, then stage B)."""

    _written: Written = PrivateAttr(default=Written(Node({}, Location("the configuration"))))

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Reads a YAML file with all files that it inherits from, applies overrides, and validates.

        Args:
            path: a YAML file.
            overrides: `key.path=value` each, the value in YAML; a later one takes precedence.

        Raises:
            ConfigError: with every problem, its file and line, what is allowed and the nearest name.
        """
        config, written = load_yaml(path, overrides, cls, conflicts)
        config._written = Written(written)
        return config

    def refuse(self, problems: Iterable[tuple[str, object, str]]) -> None:
        """Raises ConfigError if there are problems: (key, its value, what is allowed), which are found after loading.

        The message has the file and line of each key.
        """
        root = self._written.root
        found_problems = [
            Problem(location_of(root, tuple(key.split("."))), key, found(value), allowed)
            for key, value, allowed in problems
        ]
        if found_problems:
            raise config_error(found_problems)

    def to_yaml(self) -> str:
        """The configuration as YAML with every key and without `base:`. `from_yaml` reads it as an equal Config."""
        data = self.model_dump(mode="json")
        for section in ("reasoning", "ablation"):
            if data[section] is None:
                del data[section]
        comment = f"# One {self.kind} run of cdrmix, fully resolved: every key, inherited, autosized or default.\n"
        return comment + _as_yaml(json.dumps(data))

    def hash(self) -> str:
        """SHA-256 (hexadecimal) of all keys except NOT_HASHED. Runs with the same hash have the same results.

        So a run can be resumed after it was moved, renamed, or given other logging or disk; or another expert
        parallelism, ZeRO stage or other MEMORY, which change the rounding at most; or smaller micro-batches
        (train.micro_batch_parts). The origin of a value (inherited, override, autosizer, default) and the order of the
        keys do not matter.
        """
        return hashlib.sha256(json.dumps(self.hashed(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def hashed(self) -> dict[str, Any]:
        """The keys that `hash` depends on, as plain data."""
        data = self.model_dump(mode="json", exclude=NOT_HASHED)
        data["train"] |= MEMORY
        data["train"]["micro_batch_rows"] *= self.train.micro_batch_parts
        del data["ablation"]  # each arm of an ablation is a configuration of its own
        return data
