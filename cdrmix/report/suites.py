"""The section of a report on suites that were measured on checkpoints: a table of the newest results, and curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from cdrmix.eval.rows import Row, last_results, measured
from cdrmix.eval.rows import figure as figure_of
from cdrmix.page import escaped, picture
from cdrmix.report.plots import DARK, LIGHT, Palette, label, plain, png

MOST_REASONS = 10


def suites_section(rows: Sequence[Row], title: str) -> str:
    """HTML; empty if no suite was begun. rows: of eval/metrics.jsonl."""
    if not rows:
        return ""
    counts = Counter(row["status"] for row in rows)
    reasons = [
        f"step {row['step']:,}, {row['suite'] or 'all suites'}: {row['status']}: {row.get('reason')}"
        for row in rows
        if row["status"] in ("failed", "interrupted")
    ]
    results = last_results(rows)
    drawn = [draw_suites(rows, title=title, palette=palette) for palette in (LIGHT, DARK)]
    curves = [each for each in drawn if each is not None]
    told = ", ".join(f"{count:,} {status}" for status, count in sorted(counts.items()))
    return (
        "<h2>Suites on checkpoints</h2>"
        + (_table(results) if results else "")
        + (picture(curves, "Figures of each suite over the steps") if curves else "")
        + f'<p class="soft">Evaluations: {told}. Intervals, and bands in the plot, are 95 % intervals.</p>'
        + "".join(f'<p class="soft">{escaped(reason)}</p>' for reason in reasons[-MOST_REASONS:])
    )


def _table(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = "".join(
        f"<tr><td>{escaped(suite)}</td><td>{row['step']:,}</td>"
        f'<td class="text">{escaped(measure["name"])}</td><td class="text">{escaped(figure_of(measure))}</td></tr>'
        for suite, row in results.items()
        for measure in row["measures"]
    )
    head = "<tr><th>suite</th><th>step</th><th>measure</th><th>value (interval)</th></tr>"
    return f'<div class="scroll"><table>{head}{lines}</table></div>'


def draw_suites(rows: Sequence[Row], *, title: str, palette: Palette = LIGHT) -> bytes | None:
    """Draws the figures of each suite over the steps, with 95 % intervals; returns the PNG, or None without figures."""
    curves = {suite: found for suite, of_suite in measured(rows).items() if (found := _curves(of_suite))}
    if not curves:
        return None
    figure = Figure(
        figsize=(8.0, 0.5 + 2.9 * len(curves)),
        dpi=160,
        facecolor=palette.paper,
        layout=ConstrainedLayoutEngine(h_pad=0.07, w_pad=0.07),
    )
    grid = figure.subplots(len(curves), 1, squeeze=False, sharex=True)
    colours = matplotlib.colormaps[palette.layers]
    for place, (suite, of_suite) in enumerate(curves.items()):
        axes = grid[place, 0]
        plain(axes, palette)
        for number, (name, points) in enumerate(of_suite.items()):
            colour = colours(0.15 + 0.75 * number / max(1, len(of_suite) - 1))
            steps, values, low, high = zip(*points, strict=True)
            axes.plot(steps, values, color=colour, marker="o", markersize=3.5, linewidth=1.4, label=name)
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        label(axes, "step" if place == len(curves) - 1 else "", suite, palette)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9, labelcolor=palette.ink)
    grid[0, 0].set_title(title, loc="left", color=palette.ink, fontsize=11, fontweight="bold")
    return png(figure, palette)


def _curves(rows: Sequence[Row]) -> dict[str, list[tuple[int, float, float, float]]]:
    """Of each measure (step, value, low, high) where it has a value; without an interval low and high are the value."""
    curves: dict[str, list[tuple[int, float, float, float]]] = {}
    for row in rows:
        for measure in row["measures"]:
            if (value := measure["value"]) is not None:
                low, high = (value if measure.get(end) is None else measure[end] for end in ("low", "high"))
                curves.setdefault(measure["name"], []).append((row["step"], value, low, high))
    return curves
