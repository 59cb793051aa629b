"""Verdicts: what a gate answers about the recorded facts of a run, and what a forecast answers about a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from cdrmix.errors import GateError, UndecidedGateError
from cdrmix.run_folder import finite


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
        raise kind(f"the gates of {preset} stop the run ({outcome.value}): {', '.join(stopping)}")


@dataclass(frozen=True)
class Verdict:
    """What a gate answers.

    value: the figure, in the unit of the gate. low, high: its one-sided 95 % confidence bounds; None for a figure
    without a sampling error. threshold, comparison: the value must be at most or at least this. n: items that the value
    is of. p_value: the probability of a figure at least as bad if the true one is at the threshold; None for a figure
    without a sampling error. inputs_sha256: of the facts that the gate read; whoever calls the gate sets it.
    """

    outcome: Outcome
    reason: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    threshold: float | None = None
    n: int = 0
    comparison: Literal["at most", "at least"] = "at most"
    p_value: float | None = None
    inputs_sha256: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON data. A bound that is infinite is null."""
        return finite(vars(self) | {"outcome": self.outcome.value})
