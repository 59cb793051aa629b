"""Rules about the section `evaluation`: names of suites, steps and sampling."""

from __future__ import annotations

from collections.abc import Sequence

from cdrmix.config.rule import Rule, Violation, registered_name


def _suites(names: Sequence[str]) -> Violation | None:
    for place, name in enumerate(names):
        if (violation := registered_name("suite", name)) is not None:
            return violation._replace(path=(place,))
        if name in names[:place]:
            return Violation((place,), "each suite once")
    return None


def _every(every: int | None, checkpoint_every: int) -> str | None:
    refused = every is not None and every % checkpoint_every
    return f"null, or a multiple of train.checkpoint_every={checkpoint_every}" if refused else None


def _temperature(temperature: float, samples: int) -> str | None:
    refused = samples > 1 and temperature == 0
    return f"above 0 with evaluation.samples={samples}: at 0 all samples of a problem are the same" if refused else None


RULES = (
    Rule(("evaluation.suites",), _suites),
    Rule(("evaluation.every", "train.checkpoint_every"), _every),
    Rule(("evaluation.temperature", "evaluation.samples"), _temperature),
)
