"""Reads files of results of `cdrmix eval --suite ... --json`.

A result counts for a model only if it names the files of weights of that model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from cdrmix.durable import sha256_file
from cdrmix.errors import ConfigError

FIELDS = ("name", "value", "low", "high", "count", "problem")


def read_results(paths: Sequence[Path], weights: Collection[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The results of a model in files, and sentences on those that are of another model.

    weights: SHA-256 of the files of weights of the model. A result that occurs twice counts once.
    Raises ConfigError, naming the file, for one that is not a file of results.
    """
    results: list[dict[str, Any]] = []
    unused: list[str] = []
    for path in paths:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--results {path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"--results {path}: is not JSON: {error}") from error
        origin = {"file": path.name, "sha256": sha256_file(path)}
        for result in _checked(path, data):
            problem = _problem(result, weights)
            if problem is not None:
                unused.append(f"{path.name}: the result of {result['suite']} {problem}")
            elif not any(_same(result, other) for other in results):
                results.append(result | {"origin": origin})
    return results, unused


def _checked(path: Path, data: Any) -> Iterator[dict[str, Any]]:
    data = [data] if isinstance(data, dict) else data
    if not isinstance(data, list) or not data:
        raise _not_results(path, f"a list of results; found {type(data).__name__}")
    for number, result in enumerate(data, 1):
        where = f"result {number}"
        if not isinstance(result, dict) or not isinstance(result.get("suite"), str):
            raise _not_results(path, f"{where} to have a suite")
        if not isinstance(result.get("measures"), list) or not isinstance(result.get("facts"), dict):
            raise _not_results(path, f"{where} ({result['suite']}) to have measures and facts")
        for measure in result["measures"]:
            if not isinstance(measure, dict) or set(measure) != set(FIELDS):
                raise _not_results(path, f"each measure of {result['suite']} to have {', '.join(FIELDS)}")
            for name in ("value", "low", "high"):
                if measure[name] is not None and not isinstance(measure[name], int | float):
                    raise _not_results(path, f"{measure['name']}: {name} to be a number; found {measure[name]!r}")
            if not isinstance(measure["count"], int):
                raise _not_results(path, f"{measure['name']}: count to be an integer; found {measure['count']!r}")
        yield result


def _not_results(path: Path, expected: str) -> ConfigError:
    return ConfigError(f"--results {path}: is no output of `cdrmix eval --suite A --json`; expected {expected}")


def _problem(result: dict[str, Any], weights: Collection[str]) -> str | None:
    """Why a result does not count for the model; None if it does."""
    model = result["facts"].get("model")
    files = model.get("weights") if isinstance(model, dict) else None
    if not isinstance(files, dict) or not files:
        return "does not name its model: measure it again"
    return None if set(files.values()) & set(weights) else "is of another model"


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("suite", "measures", "facts"))
