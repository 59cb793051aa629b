"""What a ledger says of each rung: its plan, forecast, runs, verdicts and promotion."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cdrmix.errors import ConfigError
from cdrmix.ladder.forecast import Forecast, Law, Rung, forecast
from cdrmix.ladder.ladder_files import check_run
from cdrmix.ladder.ledger import LEDGER, Entry, Ledger, check_files
from cdrmix.ladder.rungs import rung_named
from cdrmix.ladder.verdict import Outcome


@dataclass
class RungState:
    """A rung of the newest plan of a ledger, with the entries that belong to that plan.

    plan: the facts of `RungPlan.facts`. trained: by seed. earlier: the number of earlier attempts, with another
    configuration. promoted_otherwise: the rung was promoted with another configuration.
    """

    name: str
    plan: dict[str, Any]
    forecast: Entry | None = None
    trained: dict[int, Entry] = field(default_factory=dict)
    judged: Entry | None = None
    promoted: Entry | None = None
    earlier: int = 0
    promoted_otherwise: bool = False

    @property
    def complete(self) -> bool:
        """Whether every seed is trained."""
        return all(seed in self.trained for seed in self.plan["seeds"])

    @property
    def losses(self) -> tuple[float, ...]:
        """The held-out loss of each trained seed, nats per token."""
        return tuple(entry.facts["loss"] for entry in self.trained.values())

    @property
    def measured(self) -> Rung | None:
        """The rung for a forecast; None before all seeds are trained."""
        if not self.complete:
            return None
        return Rung(self.name, self.plan["compute"], self.losses, self.plan["parameters"], self.plan["tokens"])

    def forecast_with_loss(self) -> Forecast | None:
        """The recorded forecast, judged by the loss if there is one. None before it is made."""
        if self.forecast is None:
            return None
        facts = self.forecast.facts
        rungs = [Rung(**{**rung, "losses": tuple(rung["losses"])}) for rung in facts["rungs"]]
        law = Law(tuple(facts["exponents"]), facts["slack"])
        measured = self.measured
        return forecast(rungs, self.name, self.plan["compute"], None if measured is None else measured.loss, law)

    @property
    def status(self) -> str:
        """One or two words for tables."""
        if self.promoted is not None:
            return "promoted, lenient" if self.promoted.facts["lenient"] else "promoted"
        if self.judged is not None:
            outcome = self.judged.facts["outcome"]
            return f"stopped: {outcome}" if outcome != Outcome.PASS else "judged"
        if self.complete:
            return "trained"
        if self.forecast is not None:
            return f"training, {len(self.trained)} of {len(self.plan['seeds'])} seeds done"
        return "planned"


def rung_states(ledger: Ledger, plan: list[dict[str, Any]] | None = None) -> list[RungState]:
    """The state of each rung of a plan, by default that of the last `ladder` line. Empty without a line."""
    if plan is None:
        plans = ledger.of("ladder")
        plan = plans[-1].facts["rungs"] if plans else []
    states = {rung["name"]: RungState(rung["name"], rung) for rung in plan}
    for entry in ledger.entries:
        state = states.get(entry.rung)
        if state is None:
            continue
        if entry.facts["identity"] != state.plan["identity"]:
            state.earlier += entry.kind == "forecast"
            state.promoted_otherwise |= entry.kind == "promoted"
        elif entry.kind == "forecast":
            state.forecast, state.judged = entry, None  # a judgement is one by the newest forecast
        elif entry.kind == "trained":
            state.trained[entry.facts["seed"]] = entry
        elif entry.kind == "judged":
            state.judged = entry
        elif entry.kind == "promoted":
            state.promoted = entry
    return list(states.values())


def check_states(ledger: Ledger, states: list[RungState]) -> None:
    """Raises LedgerError or CheckpointError, with the file, where a recorded file is missing or was changed.

    Raises ConfigError for a promoted rung whose configuration has changed since.
    """
    for state in states:
        if state.promoted_otherwise and state.promoted is None:
            raise ConfigError(
                f"{state.name} is promoted in {ledger.path}, but its configuration has changed since: restore it, or "
                "climb in a new folder (ladder.root)"
            )
        for entry in state.trained.values():
            check_run(ledger.root, entry)
        if state.judged is not None:
            check_files(ledger.root, state.judged)


def something_missing(judged: Entry) -> bool:
    """Whether a required gate of a `judged` entry was not measured."""
    verdicts = judged.facts["verdicts"]
    return any(verdicts[name] == Outcome.NOT_MEASURED for name in judged.facts["stopping"])


def stopping(judged: Entry) -> str:
    """The required gates of a `judged` entry that did not pass, with their reasons."""
    return "; ".join(f"{name}: {judged.record['reasons'][name]}" for name in judged.facts["stopping"])


def forecast_of_ladder(root: Path, target: str | None = None) -> Forecast:
    """The forecast of a rung of a ladder from its promoted rungs, as the ledger records it.

    target: a rung; None: the first one that is not promoted, or the last one. A rung that the ladder has not forecast
    yet is forecast from the rungs that are promoted by now.
    Raises ConfigError for a folder without a ledger and for an unknown rung, and what `check_states` raises.
    """
    if not (root / LEDGER).is_file():
        raise ConfigError(f"{root} is neither a table of losses nor the folder of a ladder: it has no {LEDGER}")
    ledger = Ledger(root)
    states = rung_states(ledger)
    if not states:
        raise ConfigError(f"{ledger.path} has no rungs yet: `cdrmix ladder run` plans them")
    check_states(ledger, states)
    if target is None:
        chosen = next((state for state in states if state.promoted is None), states[-1])
    else:
        name = rung_named(target, [state.name for state in states], "--rung")
        chosen = next(state for state in states if state.name == name)
    recorded = chosen.forecast_with_loss()
    if recorded is not None:
        return recorded
    facts = ledger.of("ladder")[-1].facts
    law = Law(tuple(facts["exponents"]), facts["slack"])
    rungs = [state.measured for state in states if state.promoted is not None and state.measured is not None]
    return forecast(rungs, chosen.name, chosen.plan["compute"], None, law)
