"""Custom gates: entry points of the group cdrmix.gates, each a function from the facts of a run to a verdict.

    [project.entry-points."cdrmix.gates"]
    chemistry = "my_package.gates:chemistry"

Only the gates that a configuration or the command line names are imported. The evidence has their distribution, its
version, and the SHA-256 of the file with the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from cdrmix.durable import sha256_file
from cdrmix.errors import ConfigError, PluginError
from cdrmix.ladder.facts import Facts
from cdrmix.ladder.gates import Gate
from cdrmix.registry import nearest

GROUP = "cdrmix.gates"


def load_gates(names: Sequence[str]) -> dict[str, tuple[Gate, dict[str, str]]]:
    """The gates with these names, each with its origin: distribution, version, entry point and SHA-256 of its file.

    Raises ConfigError for a name that no installed distribution has, or that two have; PluginError if the import of a
    gate fails, or if it is no function of one argument.
    """
    known = entry_points(group=GROUP)
    found = {}
    for name in dict.fromkeys(names):
        entries = [entry for entry in known if entry.name == name]
        if not entries:
            close = nearest(name, sorted(known.names))
            hint = f"; did you mean {close!r}?" if close else ""
            have = ", ".join(sorted(known.names)) or "none"
            raise ConfigError(f"there is no gate {name!r} of the group {GROUP}; installed are: {have}{hint}")
        if len(entries) > 1:
            owners = ", ".join(sorted(_distribution(entry) for entry in entries))
            raise ConfigError(f"the gate {name!r} is declared by {owners}; uninstall all but one of them")
        found[name] = _load(entries[0])
    return found


def _distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "(unknown)"


def _load(entry: EntryPoint) -> tuple[Gate, dict[str, str]]:
    where = f"the gate {entry.name!r} = {entry.value!r} of the distribution {_distribution(entry)}"
    try:
        gate = entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: an import must not end the command
        raise PluginError(f"{where} failed with {type(error).__name__}: {error}. Correct that distribution") from error
    try:
        inspect.signature(gate).bind(Facts(run={}, settings={}))
        file = inspect.getsourcefile(inspect.unwrap(gate))
    except (TypeError, ValueError) as error:
        raise PluginError(f"{where} must be a function of one argument, the facts: {error}") from error
    origin = {
        "distribution": "(unknown)" if entry.dist is None else entry.dist.name,
        "version": "(unknown)" if entry.dist is None else entry.dist.version,
        "entry_point": entry.value,
        "file": "(unknown)" if file is None else Path(file).name,
        "sha256": "(unknown)" if file is None else sha256_file(Path(file)),
    }
    return gate, origin
