"""Stage B's part of a run's report: its mechanisms on and off, its phases, what the text lost by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cdrmix.page import escaped, picture
from cdrmix.report.plots import DARK, LIGHT
from cdrmix.report.plots_stage_b import TITLES, draw_mechanisms, draw_phases

MOST_LOST = 0.01  # of stage A's bits per byte, that stage B may add


def stage_b_sections(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], title: str) -> list[str]:
    """HTML sections; none where stage B has not begun. rows: metrics.jsonl's of phases; summary: metrics.json."""
    found = summary.get("mechanisms") or {}
    mechanisms = [draw_mechanisms(found, title=f"Mechanisms: {title}", palette=palette) for palette in (LIGHT, DARK)]
    phases = [draw_phases(rows, title=f"Phases: {title}", palette=palette) for palette in (LIGHT, DARK)]
    sections = []
    if light_dark := [drawn for drawn in mechanisms if drawn is not None]:
        sections.append(
            "<h2>Stage B: every mechanism on and off</h2>"
            + picture(light_dark, "Share of right answers over chunks read, each mechanism on and off")
            + "".join(_table(name, found[name]) for name in TITLES if name in found)
            + '<p class="soft">Episodes that no phase trained on, answered greedily. Swapped: with the fast weights of '
            "another episode. Never: nothing committed. Accept good, accept bad: of the chunks that tell the truth "
            "and of those that lie, the share committed. Captured: of the facts asked for, those in memory behind the "
            "chunk that tells them; retained: of those, the ones that are still there at the end.</p>"
        )
    sections.append(_text(summary))
    if light_dark := [drawn for drawn in phases if drawn is not None]:
        sections.append("<h2>Stage B: phases</h2>" + picture(light_dark, "What each phase measured by step"))
        sections.append(_last(rows))
    return sections


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
        f'<details><summary>{escaped(TITLES[name])}: figures by chunks read</summary><div class="scroll">'
        f"<table><tr><th>chunks</th>{head}</tr>{body}</table></div></details>"
    )


def _text(summary: Mapping[str, Any]) -> str:
    before, after = summary.get("held_out_before"), summary.get("held_out")
    if not before or not after or not summary.get("stage_b"):
        return ""
    change = after["bits_per_byte"] / before["bits_per_byte"] - 1
    bad = ' class="bad"' if change > MOST_LOST else ""
    return (
        f"<p>Held-out text after stage A: {before['bits_per_byte']:.4f} bits per byte, after stage B "
        f"{after['bits_per_byte']:.4f}: <span{bad}>{change:+.2%}</span> (at most {MOST_LOST:+.0%} is meant to be).</p>"
    )


def _last(rows: Sequence[Mapping[str, Any]]) -> str:
    """The last record of every phase."""
    last = {row["phase"]: row for row in rows}
    text = ""
    for phase, row in last.items():
        figures = ", ".join(
            f"{name.replace('_', ' ')} {value:.4g}" for name, value in row["measures"].items() if value is not None
        )
        text += f"<tr><td>{escaped(phase.replace('_', ' '))}</td><td>{row['phase_step']:,}</td>"
        text += f'<td class="text">{escaped(figures)}</td></tr>'
    return (
        '<div class="scroll"><table><tr><th>phase</th><th>step</th><th class="text">last logged</th></tr>'
        f"{text}</table></div>"
    )
