"""The page of `cdrmix eval --suite --page`: a table and a plot with intervals for each suite, notes and facts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import AutoLocator, ScalarFormatter

from cdrmix.eval.suites import Measure, SuiteResult
from cdrmix.page import escaped, html_page, picture, tiles
from cdrmix.report.plots import DARK, LIGHT, Palette, label, plain, png

# The axis of a figure by the end of its name; a figure with another name is a share if its interval is inside [0, 1].
AXES = {"bits_per_byte": "bits per byte", "_ms": "milliseconds"}
SHARE = "share"


def suites_page(results: Sequence[SuiteResult], title: str) -> str:
    """The HTML page of the results of one model. title: plain text, the name of the model."""
    about: dict[str, Any] = next((result.facts["model"] for result in results if "model" in result.facts), {})
    told = [f"step {about['step']:,}"] if "step" in about else []
    told += [f"{name}: SHA-256 {digest[:16]}" for name, digest in about.get("weights", {}).items()]
    first = [(result, next((each for each in result.measures if each.value is not None), None)) for result in results]
    figures = [(f"{each.value:.3f}", f"{result.suite}: {each.name}") for result, each in first if each is not None]
    head = f'<h1>Evaluation of {escaped(title)}</h1><p class="soft">{escaped("; ".join(told))}</p>'
    foot = '<p class="soft">Intervals are 95 % intervals. A line in a plot marks the score of guessing.</p>'
    return html_page(
        f"Evaluation of {title}", [head, tiles(figures, stress_first=False), *map(_section, results), foot]
    )


def _section(result: SuiteResult) -> str:
    drawn = [draw_suite(result, palette=palette) for palette in (LIGHT, DARK)]
    plots = [each for each in drawn if each is not None]
    lines = "".join(f"<tr>{_cells(measure)}</tr>" for measure in result.measures)
    head = "<tr><th>measure</th><th>value</th><th>95 % interval</th><th>count</th></tr>"
    facts = json.dumps(result.facts, indent=2, ensure_ascii=False)
    return (
        f"<h2>{escaped(result.suite)}</h2>"
        + (picture(plots, f"Figures of the suite {result.suite} with their intervals") if plots else "")
        + f'<div class="scroll"><table>{head}{lines}</table></div>'
        + "".join(f'<p class="soft">{escaped(note)}</p>' for note in result.notes)
        + f"<details><summary>What the figures depend on</summary><pre>{escaped(facts)}</pre></details>"
    )


def _cells(measure: Measure) -> str:
    if measure.value is None:
        reason = f'<td class="text" colspan="3">not measured: {escaped(measure.problem)}</td>'
        return f"<td>{escaped(measure.name)}</td>{reason}"
    interval = "" if measure.high is None else f"to {measure.high:.3f}"
    interval = interval if measure.low is None else f"{measure.low:.3f} {interval}"
    return f"<td>{escaped(measure.name)}</td><td>{measure.value:.3f}</td><td>{interval}</td><td>{measure.count:,}</td>"


def _axis(measure: Measure) -> str | None:
    """The axis on which a figure is drawn; None for one that only the table has."""
    for ending, name in AXES.items():
        if measure.name.endswith(ending):
            return name
    ends = [value for value in (measure.value, measure.low, measure.high) if value is not None]
    return SHARE if all(0 <= value <= 1 for value in ends) else None


def draw_suite(result: SuiteResult, *, palette: Palette = LIGHT) -> bytes | None:
    """Draws the figures of a suite with their intervals; returns the PNG, or None if nothing can be drawn.

    Figures of one unit share an axis. A vertical line marks the score of guessing, where the facts have it.
    """
    of_axes: dict[str, list[Measure]] = {}
    for measure in result.measures:
        if measure.value is not None and (axis := _axis(measure)) is not None:
            of_axes.setdefault(axis, []).append(measure)
    if not of_axes:
        return None
    counts = [len(measures) for measures in of_axes.values()]
    figure = Figure(
        figsize=(8.0, 0.75 * len(counts) + 0.27 * sum(counts)),
        dpi=160,
        facecolor=palette.paper,
        layout=ConstrainedLayoutEngine(h_pad=0.07, w_pad=0.07),
    )
    grid = figure.subplots(len(counts), 1, squeeze=False, height_ratios=[count + 1 for count in counts])
    for axes, (name, measures) in zip(grid[:, 0], of_axes.items(), strict=True):
        _draw_axis(axes, name, measures, result.facts.get("chance", {}), palette)
    return png(figure, palette)


def _draw_axis(axes: Axes, name: str, measures: Sequence[Measure], chance: object, palette: Palette) -> None:
    plain(axes, palette)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(AutoLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    for place, measure in enumerate(measures):
        assert measure.value is not None
        low, high = (measure.value if end is None else end for end in (measure.low, measure.high))
        axes.plot([low, high], [place, place], color=palette.train, alpha=0.45, linewidth=4, solid_capstyle="butt")
        axes.plot([measure.value], [place], color=palette.train, marker="o", markersize=5)
        guess = chance.get(measure.name.split()[0]) if isinstance(chance, dict) and "accuracy" in measure.name else None
        if guess:
            axes.plot([guess, guess], [place - 0.35, place + 0.35], color=palette.valid, linewidth=2)
    axes.set_yticks(range(len(measures)), [measure.name for measure in measures])
    axes.set_ylim(len(measures) - 0.5, -0.5)
    if name == SHARE:
        axes.set_xlim(-0.02, 1.02)
    else:
        axes.set_xlim(left=0)
    label(axes, name, "", palette)
