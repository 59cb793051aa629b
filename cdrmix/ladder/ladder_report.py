"""The state of a ladder as a table of text, as JSON, and as an HTML page with the picture of the newest forecast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cdrmix.durable import write_atomically
from cdrmix.ladder.ladder_files import run_path
from cdrmix.ladder.ledger import Ledger
from cdrmix.ladder.presentation import forecast_json, forecast_picture, wrapped
from cdrmix.ladder.state import RungState, rung_states, stopping
from cdrmix.ladder.verdict import Outcome
from cdrmix.page import escaped, html_page, picture, tiles
from cdrmix.records import read_records
from cdrmix.report.plots import DARK, LIGHT
from cdrmix.units import amount, clock

REPORT, PICTURE, FORECASTS = "report.html", "forecast.png", "forecasts"
LONG = 40  # characters of a cell that is one line
HEADS = ("rung", "FLOP", "forecast", "band", "loss", "seeds", "in band", "gates", "state")


def write_ladder_report(ledger: Ledger) -> Path:
    """Writes report.html, forecast.png and forecasts/RUNG.png in the folder of the ladder. Returns report.html.

    They hold nothing that the ledger does not have, so they may be deleted.
    """
    states = rung_states(ledger)
    shown: Sequence[bytes] = ()
    title = ""
    for state in states:
        made = state.forecast_with_loss()
        if made is None or made.at is None:
            continue
        shown, title = [forecast_picture(made, palette) for palette in (LIGHT, DARK)], f"Forecast of {state.name}"
        folder = ledger.root / FORECASTS
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"{state.name}.png", shown[0])
    if shown:
        write_atomically(ledger.root / PICTURE, shown[0])
    report = ledger.root / REPORT
    write_atomically(report, _page(ledger, states, shown, title))
    return report


def status_text(ledger: Ledger, states: Sequence[RungState]) -> str:
    """The table of the rungs, and lines of at most 100 columns on what stopped them and what is being trained."""
    lines = [HEADS, *(_cells(state) for state in states)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADS))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    for state in states:
        if state.judged is not None and state.promoted is None and state.judged.facts["stopping"]:
            rows.append(wrapped(f"{state.name} was stopped by {stopping(state.judged)}"))
        if line := _progress(ledger, state):
            rows.append(line)
    return "\n".join(rows)


def status_json(states: Sequence[RungState]) -> list[dict[str, Any]]:
    """The rungs as plain data."""
    found = []
    for state in states:
        made = state.forecast_with_loss()
        found.append(
            {
                **state.plan,
                "state": state.status,
                "losses": list(state.losses),
                "forecast": None if made is None else forecast_json(made),
                "judged": None if state.judged is None else state.judged.facts,
                "promoted": None if state.promoted is None else state.promoted.facts,
                "earlier_attempts": state.earlier,
            }
        )
    return found


def _cells(state: RungState) -> tuple[str, ...]:
    made = state.forecast_with_loss()
    at = None if made is None else made.at
    losses = state.losses
    return (
        state.name,
        f"{state.plan['compute']:.2e}",
        "-" if at is None else f"{at.loss:.4f}",
        "-" if at is None else f"{at.low:.4f} to {at.high:.4f}",
        f"{sum(losses) / len(losses):.4f}" if losses else "-",
        f"{len(losses)} of {len(state.plan['seeds'])}",
        _in_band(state),
        "-" if state.judged is None else state.judged.facts["outcome"],
        state.status,
    )


def _in_band(state: RungState) -> str:
    """The verdict of the gate `band`; a rung that has no band was not asked for one."""
    found = None if state.judged is None else state.judged.facts["verdicts"].get("band")
    return "-" if found in (None, Outcome.NOT_MEASURED) else str(found)


def _progress(ledger: Ledger, state: RungState) -> str:
    """The newest step of a run that is not in the ledger yet."""
    if state.forecast is None or state.complete:
        return ""
    seed = next(seed for seed in state.plan["seeds"] if seed not in state.trained)
    logs = (ledger.root / "runs" / state.name / f"seed-{seed}").glob("*/metrics.jsonl")
    last = max((read_records(path).last for path in logs), default=0)
    return f"{state.name}, seed {seed}: step {last} of {state.plan['steps']}"


def _page(ledger: Ledger, states: Sequence[RungState], shown: Sequence[bytes], title: str) -> str:
    plans = ledger.of("ladder")
    name = plans[-1].facts["name"] if plans else ledger.root.name
    promoted = [state for state in states if state.promoted is not None]
    seconds = sum(entry.record["seconds"] for state in states for entry in state.trained.values())
    facts = [
        (f"{len(promoted)} of {len(states)}", "rungs promoted"),
        (promoted[-1].name if promoted else "none", "largest promoted rung"),
        (clock(seconds), "training"),
        (str(len(ledger.entries)), "lines of the ledger"),
    ]
    sections = [
        f"<h1>{escaped(name)}</h1>",
        tiles(facts, stress_first=True),
        _table(HEADS, [_cells(state) for state in states]),
        f"<h2>{escaped(title)}</h2>" + picture(shown, title) if shown else "",
        *(_gates(state) for state in states),
        _runs(ledger, states),
        _machine(ledger),
    ]
    return html_page(f"Ladder {name}", sections)


def _gates(state: RungState) -> str:
    if state.judged is None:
        return ""
    facts = state.judged.facts
    rows = [
        (gate, "yes" if gate in facts["required"] else "no", outcome, state.judged.record["reasons"][gate])
        for gate, outcome in facts["verdicts"].items()
    ]
    reason = f"<p>Lenient: {escaped(facts['lenient'])}</p>" if facts["lenient"] else ""
    head = f"<h2>Gates of {escaped(state.name)}, preset {escaped(facts['preset'])}</h2>"
    return head + reason + _table(("gate", "required", "verdict", "reason"), rows)


def _runs(ledger: Ledger, states: Sequence[RungState]) -> str:
    rows = [
        (
            state.name,
            str(seed),
            f"{entry.facts['loss']:.4f}",
            f"{entry.facts['bits_per_byte']:.4f}",
            f"{amount(round(entry.record['tokens_per_second']))}",
            clock(entry.record["seconds"]),
            run_path(ledger.root, entry).name,
        )
        for state in states
        for seed, entry in state.trained.items()
    ]
    heads = ("rung", "seed", "loss", "bits per byte", "tokens per second", "training", "run")
    return "<h2>Runs</h2>" + _table(heads, rows) if rows else ""


def _machine(ledger: Ledger) -> str:
    found = ledger.of("infrastructure")
    if not found:
        return ""
    rows = [
        (check["name"], check["outcome"], f"{check['seconds']:.1f} s", check["detail"])
        for check in found[-1].record["checks"]
    ]
    return "<h2>Checks of the machine</h2>" + _table(("check", "result", "time", "found"), rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escaped(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    """A cell; long texts are broken into lines, results that stop a rung are marked."""
    kind = ' class="text"' if len(text) > LONG else ' class="bad"' if text in ("FAIL", "HOLD") else ""
    return f"<td{kind}>{escaped(text)}</td>"
