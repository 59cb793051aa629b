"""A judgement as text and as plain data: a line for each gate, with its figures and the reason."""

from __future__ import annotations

import textwrap
from typing import Any

from cdrmix.ladder.evidence import Evidence
from cdrmix.ladder.gates import figure
from cdrmix.ladder.judgement import Judgement
from cdrmix.ladder.verdict import Outcome, Verdict

WIDTH = 100  # columns
SIGNS = {"at most": "<=", "below": "<", "at least": ">="}


def judgement_text(judgement: Judgement) -> str:
    """The verdicts as a table, then the reasons of those that did not pass, then the outcome."""
    width = max(map(len, judgement.verdicts)) + 2
    lines = [f"{'gate':<{width}}{'verdict':<14}{'value':>12}{'95 % bounds':>21}{'threshold':>13}{'n':>10}"]
    lines += [_line(name, verdict, width, name in judgement.required) for name, verdict in judgement.verdicts.items()]
    if len(judgement.required) < len(judgement.verdicts):
        lines.append("* not required")
    lines.append("")
    for name, verdict in judgement.verdicts.items():
        if verdict.outcome is not Outcome.PASS:
            lines += _wrapped(f"{name}: {verdict.outcome.value}: {verdict.reason}")
    lines += _wrapped(outcome_line(judgement))
    if judgement.evidence is not None:
        lines.append(f"evidence: {judgement.evidence}")
    if judgement.exported_evidence is not None:
        lines.append(f"          {judgement.exported_evidence}")
    return "\n".join(lines)


def _line(name: str, verdict: Verdict, width: int, required: bool) -> str:
    threshold = ""
    if verdict.threshold is not None:
        threshold = f"{SIGNS[verdict.comparison]} {figure(verdict.threshold, verdict.unit)}"
    outcome = verdict.outcome.value + ("" if required else " *")
    count = f"{verdict.n:,}" if verdict.n else ""
    value = "" if verdict.value is None else figure(verdict.value, verdict.unit)
    cells = f"{value:>12}{_bounds(verdict):>21}{threshold:>13}{count:>10}"
    return f"{name:<{width}}{outcome:<14}{cells}".rstrip()


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def outcome_line(judged: Judgement | Evidence) -> str:
    """What a judgement adds up to, in one line, and how far the run was if it is not finished."""
    text = f"{judged.preset}: {judged.outcome.value}"
    if judged.stopping:
        text += f", because of {', '.join(judged.stopping)}"
    if judged.lenient is not None and judged.stopping:
        text += f"; passes leniently: {judged.lenient}"
    return text + (f"; the run is not finished: {judged.progress}" if judged.progress else "")


def judgement_json(judgement: Judgement) -> dict[str, Any]:
    """The judgement as plain data."""
    return {
        "preset": judgement.preset,
        "outcome": judgement.outcome.value,
        "passed": judgement.passed,
        "lenient": judgement.lenient,
        "unfinished": judgement.progress or None,
        "stopping": list(judgement.stopping),
        "verdicts": {
            name: {"required": name in judgement.required, **verdict.as_json()}
            for name, verdict in judgement.verdicts.items()
        },
        "evidence": None if judgement.evidence is None else str(judgement.evidence),
        "exported_evidence": None if judgement.exported_evidence is None else str(judgement.exported_evidence),
    }


def evidence_text(evidence: Evidence) -> str:
    """What verified evidence says."""
    signed = "" if evidence.signer is None else f"; signed by {evidence.signer}"
    first = f"{evidence.path}: the files are those that were judged{signed}"
    return "\n".join([first, *_wrapped(outcome_line(evidence), "  ")])


def _bounds(verdict: Verdict) -> str:
    if verdict.low is None and verdict.high is None:
        return ""
    low, high = ("-" if bound is None else _plain(bound, verdict.unit) for bound in (verdict.low, verdict.high))
    return f"{low} to {high}"


def _plain(bound: float, unit: str) -> str:
    """The number alone: the value beside it has the unit."""
    return figure(bound, unit).removesuffix(unit).rstrip() if unit else figure(bound, unit)
