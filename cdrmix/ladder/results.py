"""Reads files of results: of `cdrmix eval --suite ... --json`, and of `cdrmix eval --harness ... --json`.

A result counts for a model only if it names the files of weights of that model (of lm-eval: its step).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from cdrmix.durable import sha256_file
from cdrmix.errors import ConfigError

HARNESS = "harness"  # the suite under which the scores of lm-eval are known
Z = 1.959964  # two-sided, 95 %, as the intervals of suites
FIELDS = ("name", "value", "low", "high", "count", "problem")


def read_results(
    paths: Sequence[Path], weights: Collection[str], step: int | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """The results of a model in files, and sentences on those that are of another model.

    weights: SHA-256 of the files of weights of the model. step: of the model. A result that occurs twice counts once.
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
            problem = _problem(result, weights, step)
            if problem is not None:
                unused.append(f"{path.name}: the result of {result['suite']} {problem}")
            elif not any(_same(result, other) for other in results):
                results.append(result | {"origin": origin})
    return results, unused


def _checked(path: Path, data: Any) -> Iterator[dict[str, Any]]:
    if isinstance(data, dict) and isinstance(data.get("scores"), list):
        data = [_of_harness(path, data)]
    elif isinstance(data, dict):
        data = [data]
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
    return ConfigError(
        f"--results {path}: is no output of `cdrmix eval --suite A --json` or `--harness A --json`; expected {expected}"
    )


def _of_harness(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The scores of lm-eval as the result of a suite."""
    measures = []
    try:
        for score in data["scores"]:
            value, error = score["value"], score["standard_error"]
            known = value is not None and error is not None
            measures.append(
                {
                    "name": f"{score['task']} {score['metric']} {score['filter']}".removesuffix(" none"),
                    "value": value,
                    "low": value - Z * error if known else None,
                    "high": value + Z * error if known else None,
                    "count": score["documents"] or 0,
                    "problem": None,
                }
            )
        facts = {"step": data["step"], "model": None}
    except (LookupError, TypeError) as error:
        raise _not_results(path, f"scores of lm-eval ({error!r})") from error
    return {"suite": HARNESS, "measures": measures, "facts": facts, "notes": []}


def _problem(result: dict[str, Any], weights: Collection[str], step: int | None) -> str | None:
    """Why a result does not count for the model; None if it does."""
    facts = result["facts"]
    if result["suite"] == HARNESS:
        return None if facts["step"] == step else f"is of step {facts['step']}, not of step {step}"
    files = (facts.get("model") or {}).get("weights")
    if not files:
        return "does not name its model: measure it again"
    return None if set(files.values()) & set(weights) else "is of another model"


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("suite", "measures", "facts"))
