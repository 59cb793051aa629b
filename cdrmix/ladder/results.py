"""Reads the files that a judgement is given: results of `cdrmix eval --suite ... --json`, and a forecast.

A result counts for a model only if it names the files of weights of that model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdrmix.durable import sha256_file
from cdrmix.errors import ConfigError
from cdrmix.json_text import parse_json

FIELDS = ("name", "value", "low", "high", "count", "problem")


def read_results(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The results in files, each with `origin`: its file and the SHA-256 of that.

    Raises ConfigError, naming the file, for one that is not a file of results.
    """
    results: list[dict[str, Any]] = []
    for path in paths:
        try:
            data = parse_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--results {path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"--results {path}: is not JSON: {error}") from error
        origin = {"file": path.name, "sha256": sha256_file(path)}
        results += [result | {"origin": origin} for result in _checked(path, data)]
    return results


def results_of(results: Iterable[dict[str, Any]], weights: Collection[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The results of a model, and sentences on those that are of another model. One that occurs twice counts once.

    weights: SHA-256 of the files of weights of the model.
    """
    known: list[dict[str, Any]] = []
    unused: list[str] = []
    for result in results:
        problem = _problem(result, weights)
        if problem is not None:
            unused.append(f"{result['origin']['file']}: the result of {result['suite']} {problem}")
        elif not any(_same(result, other) for other in known):
            known.append(result)
    return known, unused


def read_forecast(path: Path) -> dict[str, Any]:
    """The forecast in a file of `cdrmix ladder forecast --json`, as of `Facts`.

    Raises ConfigError, naming the file, for one that is not such a file.
    """
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--forecast {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--forecast {path}: is not JSON: {error}") from error
    names = ("rungs", "low", "high", "loss", "notes")
    if not isinstance(data, dict) or not set(names) <= set(data):
        raise _not_forecast(path, f"an object with {', '.join(names)}; found {_kind(data)}")
    numbers = [data[name] for name in ("low", "loss", "high")]
    for name, number in zip(("low", "loss", "high"), numbers, strict=True):
        if not (number is None or (_is_number(number) and math.isfinite(number))):
            raise _not_forecast(path, f"{name} to be a finite number or null; found {number!r}")
    if numbers != [None] * 3 and (None in numbers or sorted(numbers) != numbers):
        raise _not_forecast(path, f"low <= loss <= high, or null for all three; found {numbers}")
    rungs = data["rungs"]
    if not isinstance(rungs, list) or not all(isinstance(rung, dict) and "fitted" in rung for rung in rungs):
        raise _not_forecast(path, "rungs to be a list of objects, each with fitted")
    if not isinstance(data["notes"], list) or not all(isinstance(note, str) for note in data["notes"]):
        raise _not_forecast(path, "notes to be a list of texts")
    return forecast_facts(data)


def forecast_facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """What `Facts` has of a forecast. data: as of `cdrmix ladder forecast --json`."""
    rungs = sum(bool(rung["fitted"]) for rung in data["rungs"])
    figures = {name: data[name] for name in ("low", "high", "loss", "notes")}
    return {"band": data["low"] is not None, "rungs": rungs, **figures}


def _checked(path: Path, data: Any) -> Iterator[dict[str, Any]]:
    data = [data] if isinstance(data, dict) else data
    if not isinstance(data, list) or not data:
        raise _not_results(path, f"a list of at least one result; found {_kind(data)}")
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
                if measure[name] is not None and not _is_number(measure[name]):
                    raise _not_results(path, f"{measure['name']}: {name} to be a number; found {measure[name]!r}")
            if not isinstance(measure["count"], int):
                raise _not_results(path, f"{measure['name']}: count to be an integer; found {measure['count']!r}")
        yield result


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(data: Any) -> str:
    """What JSON data is, for a message."""
    if isinstance(data, dict):
        return f"an object with {', '.join(sorted(data))}" if data else "an empty object"
    if isinstance(data, list):
        return "a list" if data else "an empty list"
    return repr(data)


def _not_forecast(path: Path, expected: str) -> ConfigError:
    command = "`cdrmix ladder forecast LOSSES --rung NAME --json`"
    return ConfigError(f"--forecast {path}: is no output of {command}; expected {expected}")


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
