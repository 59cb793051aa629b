"""The section of a report on the parts of the loss: next token, fill in the middle, chains of thought."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from cdrmix.page import escaped, picture
from cdrmix.records import StepRecord
from cdrmix.report.plots import DARK, LIGHT, Palette, label, plain, png, smooth

NOTE = (
    "Each part counts its own tokens, without the weights of data.objectives.weights. Held-out fill in the middle is "
    "on the held-out documents in its order; bits per byte are of these documents as they are."
)


def parts_section(rows: Sequence[StepRecord], title: str) -> str:
    """HTML; empty if the run has no parts. rows: rows of stage A in metrics.jsonl."""
    curves = [draw_parts(rows, title=title, palette=palette) for palette in (LIGHT, DARK)]
    drawn = [curve for curve in curves if curve is not None]
    if not drawn:
        return ""
    return (
        "<h2>Parts of the loss, nats per token</h2>"
        + _table(rows)
        + picture(drawn, "Loss of each part over the steps: training and held-out")
        + f'<p class="soft">{NOTE}</p>'
    )


def _table(rows: Sequence[StepRecord]) -> str:
    """The last losses of each part."""
    lines = ["<tr><th>part</th><th>training</th><th>held-out</th></tr>"]
    for name in _names(rows):
        kinds = ([row.parts for row in rows], [row.valid_parts for row in rows])
        last = [[parts[name] for parts in kind if name in parts] for kind in kinds]
        cells = "".join(f"<td>{f'{values[-1]:.3f}' if values else '-'}</td>" for values in last)
        lines.append(f"<tr><td>{escaped(name)}</td>{cells}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _names(rows: Sequence[StepRecord]) -> list[str]:
    """The parts of a run in the order of their first records."""
    return list(dict.fromkeys(name for row in rows for name in (*row.parts, *row.valid_parts)))


def draw_parts(rows: Sequence[StepRecord], *, title: str, palette: Palette = LIGHT) -> bytes | None:
    """Draws the losses of the parts over the steps; returns the PNG, or None without parts."""
    names = _names(rows)
    if not names:
        return None
    figure = Figure(
        figsize=(8.0, 3.6),
        dpi=160,
        facecolor=palette.paper,
        layout=ConstrainedLayoutEngine(h_pad=0.07, w_pad=0.07),
    )
    axes = figure.add_subplot()
    plain(axes, palette)
    colours = matplotlib.colormaps[palette.layers]
    for number, name in enumerate(names):
        colour = colours(0.15 + 0.75 * number / max(1, len(names) - 1))
        trained = [(row.step, row.parts[name]) for row in rows if name in row.parts]
        if trained:
            steps, nats = zip(*trained, strict=True)
            axes.plot(steps, smooth(nats), color=colour, linewidth=1.4, label=f"{name}, training")
        held_out = [(row.step, row.valid_parts[name]) for row in rows if name in row.valid_parts]
        if held_out:
            steps, nats = zip(*held_out, strict=True)
            axes.plot(
                steps,
                nats,
                color=colour,
                marker="o",
                markersize=3.5,
                linewidth=0.9,
                linestyle=(0, (4, 3)),
                label=f"{name}, held-out",
            )
    label(axes, "step", "nats per token", palette)
    axes.set_title(title, loc="left", color=palette.ink, fontsize=11, fontweight="bold")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9, labelcolor=palette.ink)
    return png(figure, palette)
