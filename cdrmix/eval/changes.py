"""Bits per byte of held-out text by domain, before and after a training: what a trained model learns and forgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

WHOLE = "all text"


class Change(NamedTuple):
    """The bits per byte of a domain. before: of the weights that the training started from; None: not measured."""

    domain: str
    text_bytes: int
    before: float | None
    after: float

    @property
    def difference(self) -> float | None:
        """Positive: the model has become worse."""
        return None if self.before is None else self.after - self.before


def changes(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> list[Change]:
    """The change of each domain, if there are several, and of the whole text, which is the last one.

    before, after: `held_out_before` and `held_out` of metrics.json, which are HeldOut.as_json().
    """
    scores_before = (before or {}).get("domains", {})
    triples = [(name, scores_before.get(name), score) for name, score in after.get("domains", {}).items()]
    return [
        Change(name, score["text_bytes"], earlier["bits_per_byte"] if earlier else None, score["bits_per_byte"])
        for name, earlier, score in [*triples, (WHOLE, before, after)]
    ]


def table(rows: Sequence[Change]) -> list[tuple[str, ...]]:
    """The cells of a table: a head, and a row for each change. Without `before` it has no columns of the change."""
    measured = any(row.before is not None for row in rows)
    head = ("domain", "bytes", *(("before", "after", "change") if measured else ("bits per byte",)))
    cells = [head]
    for row in rows:
        before = "-" if row.before is None else f"{row.before:.4f}"
        difference = "-" if row.difference is None else f"{row.difference:+.4f}"
        figures = (before, f"{row.after:.4f}", difference) if measured else (f"{row.after:.4f}",)
        cells.append((row.domain, f"{row.text_bytes:,}", *figures))
    return cells


def text_table(rows: Sequence[Change]) -> list[str]:
    """`table` as aligned lines."""
    cells = table(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([domain.ljust(widths[0]), *map(str.rjust, figures, widths[1:])]) for domain, *figures in cells]
