"""The plots of a run: loss, balance of the experts, learning rate and gradient norm; and the load of each expert."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cdrmix.records import StepRecord
from cdrmix.units import amount

MOST_BLOCKS = 16  # in the plot of the load of the experts
LAST_ROWS = 10  # of metrics.jsonl in a mean over the end of a run


@dataclass(frozen=True)
class Palette:
    """The colours of a plot. layers: a colour map from the first block to the last."""

    paper: str
    ink: str
    faint: str
    train: str
    valid: str
    layers: str  # a matplotlib colour map


LIGHT = Palette(paper="#ffffff", ink="#1f2430", faint="#c9ced8", train="#2f6fdb", valid="#d9480f", layers="viridis")
DARK = Palette(paper="#14171d", ink="#dfe3ea", faint="#3a414d", train="#74a5ff", valid="#ff9457", layers="plasma")


def draw(
    rows: Sequence[StepRecord], held_out: Mapping[str, float] | None, *, title: str, palette: Palette = LIGHT
) -> bytes:
    """Draws loss.png; returns the PNG.

    rows: of stage A in metrics.jsonl, in order of step; may be empty.
    held_out: the final results on held-out text (HeldOut as a dictionary), or None before the evaluation.
    """
    layout = ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.07)
    figure = Figure(figsize=(8.0, 7.6), dpi=160, facecolor=palette.paper, layout=layout)
    grid = figure.add_gridspec(2, 2, height_ratios=(2.1, 1.0))
    loss, router, rate = figure.add_subplot(grid[0, :]), figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    for axes in (loss, router, rate):
        plain(axes, palette)
    _loss(loss, rows, held_out, palette)
    _router(router, rows, palette)
    _rate(rate, rows, palette)
    loss.set_title(title, loc="left", color=palette.ink, fontsize=13, fontweight="bold", pad=10)
    return png(figure, palette)


def png(figure: Figure, palette: Palette) -> bytes:
    """The picture as PNG. The file has no software version and no date: the same figure gives the same bytes."""
    engine = figure.get_layout_engine()
    if engine is not None:  # once: to save the figure would compute its layout twice, which takes as long as to draw it
        engine.execute(figure)
        figure.set_layout_engine("none")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", facecolor=palette.paper, metadata={"Software": None})
    return picture.getvalue()


def draw_load(rows: Sequence[StepRecord], *, title: str, palette: Palette = LIGHT) -> bytes | None:
    """Draws load.png: the load of each expert over the steps, one heat map for each routed block; None without routers.

    The load is relative to the even share 1 / E; the value 1 has the background colour. If there are more than
    MOST_BLOCKS blocks, evenly spaced ones are shown. The title of a block gives the largest mean load of an expert over
    the last rows.
    """
    routed = [row for row in rows if row.load]
    if not routed:
        return None
    blocks, names = len(routed[0].load), routed[0].router_names
    shown = sorted({round(index * (blocks - 1) / (MOST_BLOCKS - 1)) for index in range(MOST_BLOCKS)})
    shown = shown if blocks > MOST_BLOCKS else list(range(blocks))
    columns = min(len(shown), 2 if len(shown) <= 4 else 4)
    lines = -(-len(shown) // columns)
    layout = ConstrainedLayoutEngine(h_pad=0.07, w_pad=0.06)
    figure = Figure(figsize=(8.0, 1.0 + 1.75 * lines), dpi=160, facecolor=palette.paper, layout=layout)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    # The colour scale is logarithmic: 1/2 and 2 have the same distance from 1.
    colours = LinearSegmentedColormap.from_list("load", [palette.train, palette.paper, palette.valid])
    steps = [row.step for row in routed]
    ends = [steps[0] - 0.5, *((left + right) / 2 for left, right in itertools.pairwise(steps)), steps[-1] + 0.5]
    for index, axes in enumerate(grid.flat):
        plain(axes, palette)
        axes.grid(visible=False)
        if index >= len(shown):
            axes.set_visible(False)
            continue
        block = shown[index]
        ratios = [[share * len(row.load[block]) for share in row.load[block]] for row in routed]
        experts = len(ratios[0])
        mesh = axes.pcolormesh(
            ends,
            [expert - 0.5 for expert in range(experts + 1)],
            [[min(max(row[expert], 0.25), 4.0) for row in ratios] for expert in range(experts)],
            cmap=colours,
            norm=LogNorm(0.25, 4.0),
            rasterized=True,
        )
        axes.yaxis.set_major_locator(MaxNLocator(min(experts, 8), integer=True))
        last = ratios[-LAST_ROWS:]
        fullest = max(sum(row[expert] for row in last) / len(last) for expert in range(experts))
        axes.set_title(f"block {names[block]}", loc="left", color=palette.ink, fontsize=9.5, fontweight="bold", pad=4)
        axes.set_title(
            f"maximum, mean of last {len(last)} rows: {fullest:.2f}",
            loc="right",
            color=palette.ink,
            fontsize=8.5,
            pad=4,
        )
        label(axes, "step" if index >= len(shown) - columns else "", "" if index % columns else "expert", palette)
    bar = figure.colorbar(mesh, ax=grid, aspect=30, pad=0.02)
    bar.set_ticks([0.25, 0.5, 1, 2, 4], labels=["\u2264 1/4", "1/2", "1", "2", "\u2265 4"])
    bar.ax.minorticks_off()
    bar.ax.tick_params(colors=palette.ink, labelsize=9, length=3)
    bar.set_label("load / even share", color=palette.ink, fontsize=9.5)
    bar.outline.set_edgecolor(palette.faint)
    figure.suptitle(
        f"Load of the experts: {title}", x=0.02, ha="left", color=palette.ink, fontsize=12, fontweight="bold"
    )
    return png(figure, palette)


def plain(axes: Axes, palette: Palette) -> None:
    axes.set_facecolor(palette.paper)
    axes.tick_params(colors=palette.ink, labelsize=9, length=3)
    axes.grid(axis="y", color=palette.faint, linewidth=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(palette.faint)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value)))


def label(axes: Axes, x: str, y: str, palette: Palette) -> None:
    axes.set_xlabel(x, color=palette.ink, fontsize=9.5)
    axes.set_ylabel(y, color=palette.ink, fontsize=9.5)


def _loss(axes: Axes, rows: Sequence[StepRecord], held_out: Mapping[str, float] | None, palette: Palette) -> None:
    steps = [row.step for row in rows]
    train = [row.next_token_loss for row in rows]
    valid = [
        (row.step, row.valid_loss, row.valid_bits_per_byte)
        for row in rows
        if row.valid_loss is not None and row.valid_bits_per_byte is not None
    ]
    axes.plot(steps, train, color=palette.train, linewidth=0.8, alpha=0.3)
    axes.plot(steps, smooth(train), color=palette.train, linewidth=1.9, label="training, smoothed")
    axes.plot(
        [step for step, _, _ in valid],
        [nats for _, nats, _ in valid],
        color=palette.valid,
        marker="o",
        markersize=5,
        markeredgecolor=palette.paper,
        linewidth=1.2,
        label="held-out text",
        zorder=3,
    )
    label(axes, "step", "loss, nats per token", palette)
    last, last_nats, last_bits = valid[-1] if valid else (0, 0.0, 0.0)
    # On held-out text, bits per byte = nats per token * (tokens per byte / ln 2).
    factor: Any = last_bits / last_nats if last_nats > 0 else 0.0
    if 1e-6 < factor < 1e6:
        right = axes.secondary_yaxis("right", functions=(lambda nats: nats * factor, lambda bits: bits / factor))
        right.set_ylabel("bits per byte of held-out text", color=palette.ink, fontsize=9.5)
        right.tick_params(colors=palette.ink, labelsize=9, length=3)
        right.spines["right"].set_color(palette.faint)
        _baselines(axes, held_out, factor, palette)
        axes.annotate(
            f"{last_bits:.3f} bits/byte",
            (last, last_nats),
            xytext=(0, -15),
            textcoords="offset points",
            ha="right",
            color=palette.valid,
            fontsize=9.5,
            fontweight="bold",
        )
        # The lower limit includes the baselines, also if the model is worse: a label outside would shrink the axes.
        drawn = [*train, *(nats for _, nats, _ in valid), *_baseline_bits(held_out, 1 / factor)]
        axes.set_ylim(bottom=max(0.0, min(filter(math.isfinite, drawn)) * 0.84))
    legend = axes.legend(loc="upper right", frameon=False, fontsize=9.5, labelcolor=palette.ink)
    legend.set_zorder(4)


BASELINES = ("unigram", "gzip9", "zstd19")


def _baseline_bits(held_out: Mapping[str, float] | None, scale: float) -> list[float]:
    """The bits per byte of the baselines times `scale`, in the order of BASELINES; [] before the evaluation."""
    return [held_out[f"{name}_bits_per_byte"] * scale for name in BASELINES] if held_out else []


def _baselines(axes: Axes, held_out: Mapping[str, float] | None, factor: float, palette: Palette) -> None:
    # The label of zstd is below its line, because its value is close to that of gzip.
    labels = (("unigram", 2.5), ("gzip -9", 2.5), ("zstd -19", -10.0))
    for (name, above), bits in zip(labels, _baseline_bits(held_out, 1.0), strict=False):
        axes.axhline(bits / factor, color=palette.ink, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.55, zorder=1)
        axes.annotate(
            f"{name}  {bits:.2f}",
            (0.012, bits / factor),
            xycoords=("axes fraction", "data"),
            xytext=(0, above),
            textcoords="offset points",
            color=palette.ink,
            fontsize=8.5,
            alpha=0.85,
        )


def _router(axes: Axes, rows: Sequence[StepRecord], palette: Palette) -> None:
    with_router = [row for row in rows if row.router.get("entropy_normalised")]
    label(axes, "step", "entropy of expert load (1 = even)", palette)
    if not with_router:
        axes.text(0.5, 0.5, "no routed blocks", ha="center", va="center", transform=axes.transAxes, color=palette.ink)
        return
    names = with_router[0].router_names
    layers = len(names)
    colours = matplotlib.colormaps[palette.layers]
    for layer, name in enumerate(names):
        axes.plot(
            [row.step for row in with_router],
            smooth([row.router["entropy_normalised"][layer] for row in with_router]),
            color=colours(0.25 + 0.65 * layer / max(1, layers - 1)),
            linewidth=1.3,
            label=f"block {name}",
        )
    axes.set_ylim(top=1.004)
    if layers <= 8:
        axes.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=palette.ink, ncols=2)
    else:
        axes.set_title(f"blocks {names[0]} (dark) to {names[-1]} (light)", color=palette.ink, fontsize=8.5, loc="right")


def _rate(axes: Axes, rows: Sequence[StepRecord], palette: Palette) -> None:
    steps = [row.step for row in rows]
    axes.plot(steps, [row.learning_rate for row in rows], color=palette.train, linewidth=1.6)
    label(axes, "step", "", palette)
    axes.set_ylabel("learning rate", color=palette.train, fontsize=9.5)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    axes.yaxis.get_offset_text().set(color=palette.ink, fontsize=8)
    axes.set_ylim(bottom=0)
    right = axes.twinx()
    norms = [row.gradient_norm for row in rows]
    right.plot(steps, norms, color=palette.valid, linewidth=0.7, alpha=0.3)
    right.plot(steps, smooth(norms), color=palette.valid, linewidth=1.3)
    right.set_ylabel("gradient norm before clipping", color=palette.valid, fontsize=9.5)
    right.tick_params(colors=palette.ink, labelsize=9, length=3)
    right.set_ylim(bottom=0)
    if known := sorted(filter(math.isfinite, norms)):
        # The norms of the first steps can be ten times the later ones and would flatten the curve.
        right.set_ylim(top=1.25 * known[int(0.98 * (len(known) - 1))] or 1.0)
    for side in ("top", "left"):
        right.spines[side].set_visible(False)
    for side in ("right", "bottom"):
        right.spines[side].set_color(palette.faint)


def smooth(values: Sequence[float]) -> list[float]:
    """Centred mean with a triangular window of about 1/20 of the curve. It has no lag.

    The window shrinks at both ends, so that the first and the last value do not change. Values that are NaN are
    ignored. The result is NaN if all values of a window are.
    """
    reach = max(1, len(values) // 40)
    result: list[float] = []
    for middle in range(len(values)):
        width = min(reach, middle, len(values) - 1 - middle)
        total = weights = 0.0
        for offset in range(-width, width + 1):
            value = values[middle + offset]
            if not math.isnan(value):
                weight = 1.0 - abs(offset) / (width + 1)
                total, weights = total + weight * value, weights + weight
        result.append(total / weights if weights else float("nan"))
    return result
