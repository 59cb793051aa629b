"""The plots of stage B: each mechanism on and off over the number of chunks, and the measures of the phases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from cdrmix.records import PhaseRecord
from cdrmix.report.plots import LIGHT, Palette, label, plain, png, smooth

Mechanisms = Mapping[str, Mapping[str, Mapping[str, float]]]

TITLES = {
    "plasticity": "fast weights",
    "acceptance": "accept head",
    "agent": "token memory",
    "operations": "operations on an index",
}
LINES = {  # measures that are plotted for each mechanism, with their labels
    "plasticity": {"on": "written", "off": "zeroed", "swapped": "of another row"},
    "acceptance": {"on": "by the head", "off": "all committed", "never": "none committed"},
    "agent": {"on": "with memory", "off": "last chunk alone", "capture": "captured", "retention": "retained"},
    "operations": {"on": "with the index", "off": "without"},
}
# The panels of each phase; the measures of one panel are lines in it.
PANELS: dict[str, list[tuple[str, ...]]] = {
    "plasticity": [("accuracy",), ("loss",)],
    "acceptance": [("accept_good", "accept_bad"), ("reward", "entropy"), ("clip_fraction", "dropped_groups")],
    "imitation": [("loss",), ("accuracy",)],
    "policy": [("reward", "task", "stability", "latency"), ("entropy",), ("clip_fraction", "dropped_groups")],
    "operations_imitation": [("loss",), ("accuracy", "agreed", "found")],
    "operations": [("reward", "task", "stability", "latency"), ("entropy",), ("clip_fraction", "dropped_groups")],
    "joint": [("text_loss",), ("policy/reward", "plasticity/accuracy")],
}


def draw_mechanisms(mechanisms: Mechanisms, *, title: str, palette: Palette = LIGHT) -> bytes | None:
    """Draws one panel for each mechanism: accuracy over the number of chunks. None if nothing was measured."""
    names = [name for name in TITLES if name in mechanisms]
    if not names:
        return None
    figure = Figure(
        figsize=(8.0, 3.3 * -(-len(names) // 2) + 0.4),
        dpi=160,
        facecolor=palette.paper,
        layout=ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.07),
    )
    grid = figure.subplots(-(-len(names) // 2), min(2, len(names)), squeeze=False)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    colours = (palette.train, palette.valid, palette.ink, palette.ink)
    for name, axes in zip(names, grid.flat, strict=False):
        plain(axes, palette)
        chunks = [int(number) for number in mechanisms[name]]
        for index, (measure, text) in enumerate(LINES[name].items()):
            values = [figures.get(measure, math.nan) for figures in mechanisms[name].values()]
            if all(map(math.isnan, values)):
                continue
            axes.plot(
                chunks,
                values,
                color=colours[index],
                linewidth=2.0 if index < 2 else 1.0,
                linestyle=("-", "-", (0, (4, 3)), (0, (1, 2)))[index],
                marker="o" if index < 2 else None,
                markersize=5,
                markeredgecolor=palette.paper,
                alpha=1.0 if index < 2 else 0.7,
                label=text,
                zorder=4 - index,
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(chunks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(-0.04, 1.04)
        axes.set_title(TITLES[name], loc="left", color=palette.ink, fontsize=10.5, fontweight="bold")
        label(axes, "chunks read", "accuracy", palette)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best", frameon=False, fontsize=8.5, labelcolor=palette.ink)
    return _titled(figure, title, palette)


def draw_phases(rows: Sequence[PhaseRecord], *, title: str, palette: Palette = LIGHT) -> bytes | None:
    """Draws one line of panels for each phase: its measures over the steps. None if no phase has begun."""
    phases = [name for name in PANELS if any(row.phase == name for row in rows)]
    if not phases:
        return None
    columns = max(len(PANELS[name]) for name in phases)
    figure = Figure(
        figsize=(8.0, 2.0 * len(phases) + 0.4),
        dpi=160,
        facecolor=palette.paper,
        layout=ConstrainedLayoutEngine(h_pad=0.07, w_pad=0.06),
    )
    grid = figure.subplots(len(phases), columns, squeeze=False)
    colours = (palette.train, palette.valid, palette.ink, palette.faint)
    for name, line in zip(phases, grid, strict=True):
        own = [row for row in rows if row.phase == name]
        steps = [row.phase_step for row in own]
        for index, axes in enumerate(line):
            if index >= len(PANELS[name]):
                axes.set_visible(False)
                continue
            plain(axes, palette)
            for colour, measure in zip(colours, PANELS[name][index], strict=False):
                values = [row.measures.get(measure, math.nan) for row in own]
                if all(map(math.isnan, values)):
                    continue
                axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.3)
                axes.plot(steps, smooth(values), color=colour, linewidth=1.5, label=measure.replace("_", " "))
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="best", frameon=False, fontsize=7.5, labelcolor=palette.ink)
            label(axes, "step", "", palette)
            if index == 0:
                axes.set_title(name.replace("_", " "), loc="left", color=palette.ink, fontsize=9.5, fontweight="bold")
    return _titled(figure, title, palette)


def _titled(figure: Figure, title: str, palette: Palette) -> bytes:
    figure.suptitle(title, x=0.02, ha="left", color=palette.ink, fontsize=12, fontweight="bold")
    return png(figure, palette)
