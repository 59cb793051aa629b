"""What the lines of a ledger must say: the facts and the record of each kind, and the order of the lines of a rung.

The chain of hashes shows that a line was changed. These rules refuse a line that was added with a correct hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from cdrmix.ladder.verdict import Outcome, exit_code

NUMBER, TEXT, OPTIONAL = (int, float), str, (int, float, type(None))
RUNG = {"name": TEXT, "compute": NUMBER, "parameters": NUMBER, "tokens": NUMBER}
# A shape is a type, several types, a list of one shape, or a mapping with these keys and perhaps others.
FACTS: dict[str, Any] = {
    "ladder": {
        "name": TEXT,
        "rungs": [RUNG | {"identity": TEXT, "seeds": [int], "steps": int}],
        "exponents": [NUMBER],
        "slack": NUMBER,
    },
    "infrastructure": {"rung": TEXT, "checks": dict},
    "forecast": {
        "identity": TEXT,
        "tokenizer": TEXT,
        "exponents": [NUMBER],
        "slack": NUMBER,
        "rungs": [RUNG | {"losses": [NUMBER]}],
        "loss": OPTIONAL,
        "low": OPTIONAL,
        "high": OPTIONAL,
    },
    "trained": {
        "identity": TEXT,
        "seed": int,
        "step": int,
        "exported_step": int,
        "text": TEXT,
        "loss": NUMBER,
        "bits_per_byte": NUMBER,
        "tokenizer": TEXT,
        "weights": dict,
    },
    "judged": {
        "identity": TEXT,
        "preset": TEXT,
        "outcome": TEXT,
        "exit_code": int,
        "lenient": (str, type(None)),
        "stopping": [str],
        "verdicts": dict,
        "required": [str],
    },
    "promoted": {"identity": TEXT, "outcome": TEXT, "lenient": (str, type(None))},
}
RECORDS: dict[str, Any] = {
    "ladder": {},
    "infrastructure": {"machine": dict, "checks": [dict]},
    "forecast": {},
    "trained": {"run": TEXT, "seconds": NUMBER, "tokens_per_second": NUMBER, "files": dict},
    "judged": {"reasons": dict, "files": dict},
    "promoted": {},
}


class Line(Protocol):
    """The parts of a line that the rules read."""

    @property
    def number(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def rung(self) -> str: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...


def missing_part(kind: str, facts: Any, record: Any) -> str | None:
    """The first part of a line that is missing or of another type, such as `facts.losses`; None if there is none."""
    return _missing(FACTS[kind], facts, "facts") or _missing({"time": TEXT} | RECORDS[kind], record, "record")


def _missing(shape: Any, value: Any, where: str) -> str | None:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return where
        wrong = (_missing(part, value.get(key, ...), f"{where}.{key}") for key, part in shape.items())
        return next((each for each in wrong if each), None)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return where
        wrong = (_missing(shape[0], each, f"{where}[{number}]") for number, each in enumerate(value))
        return next((each for each in wrong if each), None)
    return None if isinstance(value, shape) else where


def out_of_order(lines: Iterable[Line]) -> tuple[int, str] | None:
    """The number of the first line that cannot follow from those before it, and the reason; None if there is none.

    A rung with one configuration is planned, forecast, trained with each seed, judged by these runs and this forecast,
    and promoted if that judgement lets it pass.
    """
    seeds: dict[tuple[str, str], list[int]] = {}
    begun: dict[tuple[str, str], _Progress] = {}
    for line in lines:
        if line.kind == "ladder":
            seeds |= {(rung["name"], rung["identity"]): rung["seeds"] for rung in line.facts["rungs"]}
            continue
        if line.kind == "infrastructure":
            continue
        key = (line.rung, line.facts["identity"])
        if key not in seeds:
            return line.number, f"{line.rung} with this configuration is in no plan before it"
        if problem := begun.setdefault(key, _Progress(seeds[key])).add(line):
            return line.number, problem
    return None


class _Progress:
    """How far a rung with one configuration is."""

    def __init__(self, seeds: list[int]) -> None:
        self.missing = list(seeds)
        self.forecast = self.promoted = False
        self.judged: Mapping[str, Any] | None = None

    def add(self, line: Line) -> str | None:
        """Adds a line. Returns why it cannot be the next one."""
        facts = line.facts
        if self.promoted:
            return f"{line.rung} was promoted before it"
        if line.kind != "forecast" and not self.forecast:
            return f"{line.rung} was not forecast before it"
        if line.kind == "forecast":
            self.forecast, self.judged = True, None  # a judgement is one by the newest forecast
        elif line.kind == "trained":
            if facts["seed"] not in self.missing:
                return f"{line.rung} has no seed {facts['seed']} that was not trained before it"
            self.missing.remove(facts["seed"])
        elif line.kind == "judged":
            if self.missing:
                return f"{line.rung} was not trained with all seeds before it"
            self.judged = facts
            return _judgement_problem(facts)
        else:
            self.promoted = True
            if self.judged is None or self.judged["exit_code"] != 0:
                return f"no judgement before it lets {line.rung} pass"
            if facts["outcome"] != self.judged["outcome"]:
                return f"{line.rung} was judged {self.judged['outcome']}"
        return None


def _judgement_problem(facts: Mapping[str, Any]) -> str | None:
    """Why the parts of a judgement do not fit together."""
    if facts["outcome"] not in [each.value for each in Outcome]:
        return f"there is no outcome {facts['outcome']}"
    outcome = Outcome(facts["outcome"])
    stopping = [name for name, found in facts["verdicts"].items() if name in facts["required"] and found != "PASS"]
    if facts["stopping"] != stopping or (outcome is Outcome.PASS) != (not stopping):
        return "its outcome does not follow from its verdicts"
    if facts["exit_code"] != exit_code(outcome, facts["lenient"]):
        return "its exit code does not follow from its outcome"
    return None
