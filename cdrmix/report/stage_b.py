"""The sections of stage B in a report: the mechanisms on and off, the phases, and the change on held-out text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdrmix.page import escaped, picture
from cdrmix.records import PhaseRecord, Rollout, read_lines
from cdrmix.report.plots import DARK, LIGHT
from cdrmix.report.plots_stage_b import TITLES, draw_mechanisms, draw_phases

SHOWN_STEPS = 3  # of those whose rollouts are kept, the last ones
MOST_LOST = 0.01  # largest accepted increase of the bits per byte of stage A


def stage_b_sections(rows: Sequence[PhaseRecord], summary: Mapping[str, Any], title: str) -> list[str]:
    """HTML sections; [] if stage B has not begun. rows: rows of phases in metrics.jsonl. summary: metrics.json."""
    measured = summary.get("mechanisms") or {}
    mechanisms = [draw_mechanisms(measured, title=f"Mechanisms: {title}", palette=palette) for palette in (LIGHT, DARK)]
    phases = [draw_phases(rows, title=f"Phases: {title}", palette=palette) for palette in (LIGHT, DARK)]
    sections = []
    if light_dark := [drawn for drawn in mechanisms if drawn is not None]:
        sections.append(
            "<h2>Stage B: each mechanism on and off</h2>"
            + picture(light_dark, "Accuracy over the number of chunks, each mechanism on and off")
            + "".join(_table(name, measured[name]) for name in TITLES if name in measured)
            + '<p class="soft">Held-out episodes, greedy decoding. Swapped: with the fast weights of another episode. '
            "Never: nothing is committed. Accept good, accept bad: share of the true and of the false chunks that are "
            "committed. Captured: share of the requested facts that are in memory after the chunk with the fact. "
            "Retained: share of these that are still in memory at the end.</p>"
        )
    sections.append(_text(summary))
    if light_dark := [drawn for drawn in phases if drawn is not None]:
        sections.append("<h2>Stage B: phases</h2>" + picture(light_dark, "Measures of each phase over the steps"))
        sections.append(_last(rows))
    return sections


def rollouts_section(path: Path) -> str:
    """Groups of rollouts as text, of the last steps that rollouts.jsonl has; empty without the file."""
    rows = read_lines(path, Rollout)
    if not rows:
        return ""
    steps = sorted({row.step for row in rows})[-SHOWN_STEPS:]
    text = ""
    for step in steps:
        group = [row for row in rows if row.step == step]
        body = "".join(
            f"<tr><td>{_figure(row.reward)}</td><td>{_figure(row.task)}</td>"
            f'<td class="text">{escaped(row.answer)}</td>'
            f'<td class="text">{"<br>".join(escaped(memory) for memory in row.memories)}</td></tr>'
            for row in group
        )
        right = " or ".join(group[0].right)
        text += (
            f"<details><summary>Step {step:,}: {escaped(group[0].question)} (right: {escaped(right)})</summary>"
            '<div class="scroll"><table><tr><th>reward</th><th>of the answer</th><th class="text">answer</th>'
            f'<th class="text">written after each chunk</th></tr>{body}</table></div></details>'
        )
    return f"<h2>Rollouts of the policy phase</h2>{text}"


def _figure(value: float | None) -> str:
    return "failed" if value is None else f"{value:.3f}"


def _table(name: str, curve: Mapping[str, Mapping[str, float]]) -> str:
    measures = list(dict.fromkeys(measure for figures in curve.values() for measure in figures))
    head = "".join(f"<th>{escaped(chunks)}</th>" for chunks in curve)
    body = "".join(
        f"<tr><td>{escaped(measure.replace('_', ' '))}</td>"
        + "".join(
            f"<td>{figures[measure]:.3f}</td>" if measure in figures else "<td>-</td>" for figures in curve.values()
        )
        + "</tr>"
        for measure in measures
    )
    return (
        f'<details><summary>{escaped(TITLES[name])}: values by number of chunks</summary><div class="scroll">'
        f"<table><tr><th>chunks</th>{head}</tr>{body}</table></div></details>"
    )


def _text(summary: Mapping[str, Any]) -> str:
    before, after = summary.get("held_out_before"), summary.get("held_out")
    if not before or not after or not summary.get("stage_b") or not before["bits_per_byte"] > 0:
        return ""
    change = after["bits_per_byte"] / before["bits_per_byte"] - 1
    bad = ' class="bad"' if change > MOST_LOST else ""
    return (
        f"<p>Held-out text after stage A: {before['bits_per_byte']:.4f} bits per byte, after stage B "
        f"{after['bits_per_byte']:.4f}: <span{bad}>{change:+.2%}</span> (accepted: at most {MOST_LOST:+.0%}).</p>"
    )


def _last(rows: Sequence[PhaseRecord]) -> str:
    """A table with the last row of each phase."""
    last = {row.phase: row for row in rows}
    text = ""
    for phase, row in last.items():
        figures = ", ".join(
            f"{name.replace('_', ' ')} {value:.4g}" for name, value in row.measures.items() if math.isfinite(value)
        )
        text += f"<tr><td>{escaped(phase.replace('_', ' '))}</td><td>{row.phase_step:,}</td>"
        text += f'<td class="text">{escaped(figures)}</td></tr>'
    return (
        '<div class="scroll"><table><tr><th>phase</th><th>step</th><th class="text">last logged</th></tr>'
        f"{text}</table></div>"
    )
