"""Verdicts: what a gate answers about the recorded facts of a run, and what a forecast answers about a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, Literal, get_args

from cdrmix.errors import GateError, UndecidedGateError
from cdrmix.run_folder import finite

Comparison = Literal["at most", "below", "at least"]
MOST_NAMES = 3  # gates that an error names; the table has all


class Outcome(StrEnum):
    """The result of a comparison with a threshold or a band.

    HOLD: the figures do not decide it, or a person has to. NOT_MEASURED: something is missing.
    """

    PASS = "PASS"
    FAIL = "FAIL"
    HOLD = "HOLD"
    NOT_MEASURED = "NOT_MEASURED"


def exit_code(outcome: Outcome, lenient: str | None) -> int:
    """The exit code of a judgement with this outcome. lenient: the reason why it passes nevertheless."""
    if outcome is Outcome.PASS or lenient is not None:
        return 0
    return GateError.exit_code if outcome is Outcome.FAIL else UndecidedGateError.exit_code


def refuse(preset: str, outcome: Outcome, stopping: Sequence[str], lenient: str | None) -> None:
    """Raises GateError or UndecidedGateError for a judgement with this outcome, unless it passes.

    stopping: the required gates that did not pass. lenient: as of `exit_code`.
    """
    if exit_code(outcome, lenient) != 0:
        kind = GateError if outcome is Outcome.FAIL else UndecidedGateError
        more = f" and {len(stopping) - MOST_NAMES} more" if len(stopping) > MOST_NAMES else ""
        raise kind(f"the gates of {preset} stop the run ({outcome.value}): {', '.join(stopping[:MOST_NAMES])}{more}")


@dataclass(frozen=True)
class Verdict:
    """What a gate answers.

    value: the figure, in the unit of the gate. low, high: its one-sided 95 % confidence bounds; None for a figure
    without a sampling error. threshold, comparison: the value must be at most, below or at least this. n: items that
    the value is of. p_value: the probability of a figure at least as bad if the true one is at the threshold; None for
    a figure without a sampling error. inputs_sha256: of the facts that the gate read; whoever calls the gate sets it.
    unit: of the value, its bounds and the threshold in tables; % shows a share, such as 0.05, as 5 %.
    """

    outcome: Outcome
    reason: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    threshold: float | None = None
    n: int = 0
    comparison: Comparison = "at most"
    p_value: float | None = None
    inputs_sha256: str = ""
    unit: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON data. A bound that is infinite is null."""
        return finite(vars(self) | {"outcome": self.outcome.value})


def checked(answer: object) -> Verdict:
    """What a gate returned, with plain Python values. An infinite bound becomes None.

    Raises ValueError if it is no Verdict, or if a field has another type or is out of its range.
    """
    if not isinstance(answer, Verdict):
        raise ValueError(f"{answer!r}, which is no Verdict")
    fields: dict[str, Any] = vars(answer)  # a gate is anybody's code: the annotations of Verdict may not hold
    if not isinstance(fields["outcome"], str) or fields["outcome"] not in set(Outcome):
        raise _wrong("outcome", fields["outcome"], f"one of {', '.join(Outcome)}")
    for name in ("reason", "unit"):
        if not _is_text(fields[name]):
            raise _wrong(name, fields[name], "text")
    if isinstance(fields["n"], bool) or not isinstance(fields["n"], Integral) or int(fields["n"]) < 0:
        raise _wrong("n", fields["n"], "an integer of at least 0")
    comparison: Comparison | None = next((each for each in get_args(Comparison) if each == fields["comparison"]), None)
    if comparison is None:
        raise _wrong("comparison", fields["comparison"], f"one of {', '.join(get_args(Comparison))}")
    low, high = (_number(name, fields[name], infinite=True) for name in ("low", "high"))
    if low is not None and high is not None and low > high:
        raise _wrong("low", low, f"at most high, {high!r}")
    p_value = _number("p_value", fields["p_value"])
    if p_value is not None and not 0 <= p_value <= 1:
        raise _wrong("p_value", p_value, "a number from 0 to 1")
    return Verdict(
        Outcome(fields["outcome"]),
        str(fields["reason"]),
        _number("value", fields["value"]),
        low,
        high,
        _number("threshold", fields["threshold"]),
        int(fields["n"]),
        comparison,
        p_value,
        unit=str(fields["unit"]),
    )


def _is_text(value: object) -> bool:
    """Whether a value is text that can be written to a file: a lone surrogate cannot."""
    return isinstance(value, str) and value == value.encode("utf-8", errors="replace").decode("utf-8")


def _number(name: str, value: Any, *, infinite: bool = False) -> float | None:
    """A field as a Python number. infinite: whether it may be infinite; it is None then."""
    if value is None:
        return None
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError as error:
            raise _wrong(name, value, "a finite number or None") from error
        if infinite and math.isinf(number):
            return None
        if math.isfinite(number):
            return int(value) if isinstance(value, Integral) else number
    raise _wrong(name, value, "a finite number or None")


def _wrong(name: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"a Verdict whose {name} is {value!r}; allowed: {allowed}")
