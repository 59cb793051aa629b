"""The picture of an evaluation by length: a heat map of the share of right answers, tasks by lengths."""

from __future__ import annotations

import io

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from cdrmix.eval.evaluation import Scores, spelled
from cdrmix.report.plots import LIGHT, Palette


def draw_scores(scores: Scores, *, title: str, palette: Palette = LIGHT) -> bytes:
    """A PNG. Each cell has its accuracy, one without questions a dash; a line where lengths pass the training's."""
    names, lengths = scores.names, scores.lengths
    figure = Figure(
        figsize=(3.4 + 0.85 * len(lengths), 1.7 + 0.34 * len(names)),
        dpi=160,
        facecolor=palette.paper,
        layout=ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.09),
    )
    axes = figure.add_subplot()
    axes.set_facecolor(palette.paper)
    found = [[scores.at(name, tokens).accuracy for tokens in lengths] for name in names]
    colours = LinearSegmentedColormap.from_list("accuracy", [palette.paper, palette.train])
    cells = [[float("nan") if accuracy is None else accuracy for accuracy in row] for row in found]
    axes.imshow(cells, cmap=colours, vmin=0, vmax=1, aspect="auto")
    for line, row in enumerate(found):
        for column, accuracy in enumerate(row):
            text = "-" if accuracy is None else f"{accuracy:.2f}"
            colour = palette.paper if accuracy is not None and accuracy > 0.6 else palette.ink
            axes.text(column, line, text, ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(lengths)), [spelled(tokens) for tokens in lengths])
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(colors=palette.ink, labelsize=9, length=0)
    for side in axes.spines.values():
        side.set_color(palette.faint)
    within = sum(tokens <= scores.training_length for tokens in lengths)
    note = f"trained on rows of {scores.training_length:,} tokens"
    if 0 < within < len(lengths):
        axes.axvline(within - 0.5, color=palette.valid, linewidth=2)
        note += ": left of the line"
    count = max(score.count for score in scores.scores)
    axes.set_xlabel(f"tokens of a question; {note}", color=palette.ink, fontsize=9)
    axes.set_title(f"Right answers of {count} questions each", loc="left", color=palette.ink, fontsize=11)
    figure.suptitle(title, x=0.01, ha="left", color=palette.ink, fontsize=8)
    picture = io.BytesIO()
    # No software version or date in the file: the same scores draw the same bytes.
    figure.savefig(picture, format="png", facecolor=palette.paper, metadata={"Software": None})
    return picture.getvalue()
