"""A judgement as text and as plain data: a line for each gate, with its figures and the reason."""

from __future__ import annotations

import textwrap
from typing import Any

from cdrmix.ladder.evidence import Evidence
from cdrmix.ladder.judgement import Judgement
from cdrmix.ladder.verdict import Outcome, Verdict

WIDTH = 118


def judgement_text(judgement: Judgement) -> str:
    """The verdicts as a table, then the reasons of those that did not pass, then the outcome."""
    width = max(map(len, judgement.verdicts)) + 2
    lines = [f"{'gate':<{width}}{'verdict':<15}{'value':>11}{'95 % bounds':>24}{'threshold':>14}{'n':>12}"]
    lines += [_line(name, verdict, width, name in judgement.required) for name, verdict in judgement.verdicts.items()]
    if len(judgement.required) < len(judgement.verdicts):
        lines.append("* not required")
    lines.append("")
    for name, verdict in judgement.verdicts.items():
        if verdict.outcome is not Outcome.PASS:
            text = f"{name}: {verdict.outcome.value}: {verdict.reason}"
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    lines.append(outcome_line(judgement.preset, judgement.outcome, judgement.stopping, judgement.lenient))
    if judgement.evidence is not None:
        lines.append(f"evidence: {judgement.evidence}")
    if judgement.exported_evidence is not None:
        lines.append(f"          {judgement.exported_evidence}")
    return "\n".join(lines)


def _line(name: str, verdict: Verdict, width: int, required: bool) -> str:
    threshold = ""
    if verdict.threshold is not None:
        threshold = f"{'<=' if verdict.comparison == 'at most' else '>='} {_number(verdict.threshold)}"
    outcome = verdict.outcome.value + ("" if required else " *")
    count = f"{verdict.n:,}" if verdict.n else ""
    cells = f"{_number(verdict.value):>11}{_bounds(verdict):>24}{threshold:>14}{count:>12}"
    return f"{name:<{width}}{outcome:<15}{cells}".rstrip()


def outcome_line(preset: str, outcome: Outcome, stopping: tuple[str, ...], lenient: str | None) -> str:
    """What a judgement adds up to, in one line."""
    if not stopping:
        return f"{preset}: PASS"
    text = f"{preset}: {outcome.value}, because of {', '.join(stopping)}"
    return text if lenient is None else f"{text}; passes leniently: {lenient}"


def judgement_json(judgement: Judgement) -> dict[str, Any]:
    """The judgement as plain data."""
    return {
        "preset": judgement.preset,
        "outcome": judgement.outcome.value,
        "passed": judgement.passed,
        "lenient": judgement.lenient,
        "stopping": list(judgement.stopping),
        "verdicts": {
            name: {"required": name in judgement.required, **verdict.as_json()}
            for name, verdict in judgement.verdicts.items()
        },
        "evidence": None if judgement.evidence is None else str(judgement.evidence),
        "exported_evidence": None if judgement.exported_evidence is None else str(judgement.exported_evidence),
    }


def evidence_text(evidence: Evidence) -> str:
    """What verified evidence says, in one line."""
    signed = "" if evidence.signer is None else f"; signed by {evidence.signer}"
    return (
        f"{evidence.path}: the files are those that were judged{signed}\n"
        f"  {outcome_line(evidence.preset, evidence.outcome, evidence.stopping, evidence.lenient)}"
    )


def _bounds(verdict: Verdict) -> str:
    if verdict.low is None and verdict.high is None:
        return ""
    low, high = (("-" if bound is None else _number(bound)) for bound in (verdict.low, verdict.high))
    return f"{low} to {high}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
