"""The section of a report on the domains of the held-out text: bits per byte before, during and after a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from cdrmix.eval.changes import changes, table
from cdrmix.page import escaped, picture
from cdrmix.records import StepRecord
from cdrmix.report.plots import DARK, LIGHT, Palette, label, plain, png

NOTE = (
    "Lower is better. The table is for the whole held-out text. The curves are for the rows of it that are evaluated "
    "during the training (train.evaluate_rows)."
)


def domains_section(rows: Sequence[StepRecord], summary: Mapping[str, Any], title: str) -> str:
    """HTML; empty if the text has one domain and the training did not start from trained weights.

    rows: rows of stage A in metrics.jsonl. summary: metrics.json.
    """
    before, after = summary.get("held_out_before"), summary.get("held_out")
    first_step = summary.get("held_out_before_step", 0)
    curves = [draw_domains(rows, before, first_step, title=title, palette=palette) for palette in (LIGHT, DARK)]
    light_dark = [drawn for drawn in curves if drawn is not None]
    # Stage B has a paragraph of its own on the whole text.
    tabulated = after is not None and bool(after.get("domains") or (before and not summary.get("stage_b")))
    if not light_dark and not tabulated:
        return ""
    note = NOTE
    if before:
        note += f" Before: at step {first_step:,}, in the plot a diamond. A positive change is forgetting."
    return (
        "<h2>Held-out text by domain, bits per byte</h2>"
        + (_table(before, after) if after is not None and tabulated else "")
        + (picture(light_dark, "Bits per byte of each domain over the steps") if light_dark else "")
        + f'<p class="soft">{note}</p>'
    )


def _table(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> str:
    head, *body = table(changes(before, after))
    lines = [f"<tr>{''.join(f'<th>{escaped(cell)}</th>' for cell in head)}</tr>"]
    for cells in body:
        worse = cells[-1].startswith("+") and float(cells[-1]) > 0
        last = f"<td{' class=bad' if worse else ''}>{escaped(cells[-1])}</td>"
        lines.append(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in cells[:-1])}{last}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def draw_domains(
    rows: Sequence[StepRecord],
    before: Mapping[str, Any] | None,
    first_step: int,
    *,
    title: str,
    palette: Palette = LIGHT,
) -> bytes | None:
    """Draws the bits per byte of each domain over the steps; returns the PNG, or None without domains.

    rows: of stage A in metrics.jsonl. before: `held_out_before` of metrics.json, drawn at `first_step`.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.valid_domains))
    if not names:
        return None
    figure = Figure(
        figsize=(8.0, max(3.2, 0.9 + 0.19 * len(names))),
        dpi=160,
        facecolor=palette.paper,
        layout=ConstrainedLayoutEngine(h_pad=0.07, w_pad=0.07),
    )
    axes = figure.add_subplot()
    plain(axes, palette)
    colours = matplotlib.colormaps[palette.layers]
    domains_before = (before or {}).get("domains", {})
    for number, name in enumerate(names):
        colour = colours(0.15 + 0.75 * number / max(1, len(names) - 1))
        points = [(row.step, row.valid_domains[name]) for row in rows if name in row.valid_domains]
        steps, bits = zip(*points, strict=True)
        axes.plot(steps, bits, color=colour, marker="o", markersize=3.5, linewidth=1.4, label=name)
        if name in domains_before:
            axes.plot([first_step], [domains_before[name]["bits_per_byte"]], color=colour, marker="D", markersize=6)
    label(axes, "step", "bits per byte", palette)
    axes.set_title(title, loc="left", color=palette.ink, fontsize=11, fontweight="bold")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9, labelcolor=palette.ink)
    return png(figure, palette)
