"""The plot of an evaluation by length: a heat map of accuracies, with a row for each task, a column for each length."""

from __future__ import annotations

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from cdrmix.eval.evaluation import Scores, length_text
from cdrmix.report.plots import LIGHT, Palette, png


def draw_scores(scores: Scores, *, title: str, palette: Palette = LIGHT) -> bytes:
    """The heat map as PNG. A cell shows its accuracy, or a dash without questions. A line marks the training length."""
    names, lengths = scores.names, scores.lengths
    figure = Figure(
        figsize=(3.4 + 0.85 * len(lengths), 1.7 + 0.34 * len(names)),
        dpi=160,
        facecolor=palette.paper,
        layout=ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.09),
    )
    axes = figure.add_subplot()
    axes.set_facecolor(palette.paper)
    accuracies = [[scores.at(name, tokens).accuracy for tokens in lengths] for name in names]
    colours = LinearSegmentedColormap.from_list("accuracy", [palette.paper, palette.train])
    cells = [[float("nan") if accuracy is None else accuracy for accuracy in row] for row in accuracies]
    axes.imshow(cells, cmap=colours, vmin=0, vmax=1, aspect="auto")
    for row_number, row in enumerate(accuracies):
        for column, accuracy in enumerate(row):
            text = "-" if accuracy is None else f"{accuracy:.2f}"
            colour = palette.paper if accuracy is not None and accuracy > 0.6 else palette.ink
            axes.text(column, row_number, text, ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(lengths)), [length_text(tokens) for tokens in lengths])
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
    return png(figure, palette)
