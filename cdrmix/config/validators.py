"""Rules about combinations of keys, each of which is valid by itself.

A rule reads the keys that it names. It is skipped if one of them is missing or invalid. So a configuration with other
errors can be checked too. The rules are in validators_*.py, by topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cdrmix.config import (
    best_metric,
    validators_data,
    validators_evaluation,
    validators_huggingface,
    validators_model,
    validators_objectives,
    validators_optimizer,
    validators_parallel,
    validators_reasoning,
    validators_training,
)
from cdrmix.config.nodes import Path, found, get
from cdrmix.config.rule import Violation

TOPICS = (
    validators_huggingface,
    validators_model,
    validators_training,
    validators_parallel,
    validators_optimizer,
    validators_reasoning,
    validators_data,
    validators_objectives,
    best_metric,
    validators_evaluation,
)
RULES = tuple(rule for topic in TOPICS for rule in topic.RULES)


class Conflict(NamedTuple):
    """A violated rule: its keys, the path of the value, what was found (text), what is allowed, the nearest name."""

    keys: tuple[str, ...]
    path: Path
    found: str
    allowed: str
    nearest: str | None


def conflicts(values: Mapping[str, Any]) -> list[Conflict]:
    """All violated rules. values: dotted key to value, defaults included."""
    violated = []
    for keys, check in RULES:
        if all(key in values for key in keys):
            inputs = [values[key] for key in keys]
            result = check(*inputs)
            if result:
                violation = result if isinstance(result, Violation) else Violation((), result)
                what = violation.found or found(get(inputs[0], violation.path))
                path = (*keys[0].split("."), *violation.path)
                violated.append(Conflict(keys, path, what, violation.allowed, violation.nearest))
    return violated
