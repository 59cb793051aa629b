"""The plot of a forecast: loss against the operations of the training, with the law, its band and the rungs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullLocator

from cdrmix.report.plots import LIGHT, Palette, label, plain, png


class MeasuredRung(NamedTuple):
    """A rung in the plot: its operations, the loss of each seed, and whether the law was fitted to it."""

    name: str
    compute: float
    losses: Sequence[float]
    used: bool


class ForecastRung(NamedTuple):
    """The rung that is forecast. measured: None if it is not trained yet. verdict: a text for the title."""

    name: str
    compute: float
    loss: float
    low: float
    high: float
    measured: float | None
    verdict: str


def draw_forecast(
    rungs: Sequence[MeasuredRung],
    curve: Sequence[tuple[float, float, float, float]],
    target: ForecastRung,
    *,
    title: str,
    palette: Palette = LIGHT,
) -> bytes:
    """Draws the forecast of one rung; returns the PNG.

    curve: (operations, loss, lower and upper bound) along the law, in order of operations.
    """
    figure = Figure(
        figsize=(8.0, 4.8), dpi=160, facecolor=palette.paper, layout=ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.07)
    )
    axes = figure.add_subplot()
    plain(axes, palette)
    computes, losses, low, high = ([point[index] for point in curve] for index in range(4))
    axes.fill_between(computes, low, high, color=palette.train, alpha=0.15, linewidth=0, label="band")
    axes.plot(computes, losses, color=palette.train, linewidth=1.4, label="law")
    for used, style in ((True, "o"), (False, "o")):
        points = [(rung.compute, loss) for rung in rungs if rung.used == used for loss in rung.losses]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                style,
                color=palette.ink,
                markersize=5,
                markerfacecolor=palette.ink if used else palette.paper,
                label="measured, fitted" if used else "measured, not fitted",
            )
    for rung in rungs:
        place = (rung.compute, max(rung.losses))
        axes.annotate(
            rung.name, place, (0, 7), textcoords="offset points", ha="center", fontsize=8.5, color=palette.ink
        )
    errors = [[target.loss - target.low], [target.high - target.loss]]
    axes.errorbar(
        [target.compute], [target.loss], errors, fmt="D", color=palette.train, markersize=5, capsize=4, label="forecast"
    )
    place = (target.compute, max(target.high, target.measured or 0.0))
    axes.annotate(target.name, place, (0, 7), textcoords="offset points", ha="center", fontsize=8.5, color=palette.ink)
    if target.measured is not None:
        axes.plot([target.compute], [target.measured], "X", color=palette.valid, markersize=8, label="measured target")
    axes.set_xscale("log")
    axes.margins(x=0.08, y=0.12)
    axes.xaxis.set_major_locator(LogLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(LogFormatterSciNotation())
    label(axes, "operations of the training (FLOP)", "held-out loss, nats per token", palette)
    axes.set_title(title, loc="left", color=palette.ink, fontsize=12, fontweight="bold", pad=10)
    axes.set_title(target.verdict, loc="right", color=palette.ink, fontsize=9.5, pad=10)
    legend = axes.legend(frameon=False, fontsize=8.5, loc="upper right")
    for text in legend.get_texts():
        text.set_color(palette.ink)
    return png(figure, palette)
