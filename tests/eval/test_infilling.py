"""The suite `infilling`: chance of models that ignore the text, the tokens of its rows, its items."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from torch import Tensor

from cdrmix.data.shards import Split
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.eval.infilling import GROUP, Item, Marks, points, read_items
from cdrmix.model.loss import Losses, LossModule

MARKS = Marks(first=0, prefix=1, middle=2, suffix=3, end=0)
ITEMS = [Item([10 + n, 5], [20 + n] * (1 + n % 3), [30 + n, 6]) for n in range(GROUP)]
TOKENIZER = TextTokenizer.train(["def f(x):\n    return x\n"], vocab_size=290, end_of_text="<|endoftext|>")


class Scorer(LossModule):
    """Gives the targets of a row the nats that `nats` says of (inputs [T], target, position)."""

    def __init__(self, nats: Any) -> None:
        super().__init__()
        self.language_model = torch.nn.Linear(1, 1)
        self.nats = nats
        self.rows: list[tuple[list[int], list[int]]] = []

    def forward(self, ids_BT: Tensor, targets_BT: Tensor, weights_BT: Tensor, *_: Any) -> Losses:  # type: ignore[override]
        found = torch.zeros(targets_BT.shape)
        for row, targets in enumerate(targets_BT.tolist()):
            scored = [at for at in range(len(targets)) if weights_BT[row, row, at]]
            self.rows.append((ids_BT[row].tolist(), [targets[at] for at in scored]))
            for at in scored:
                found[row, at] = self.nats(ids_BT[row].tolist(), targets[at], at)
        zero = torch.zeros(())
        return Losses(zero, (weights_BT * found).sum((1, 2)), zero, zero, None)

    def _hidden(self, *_: Any) -> Any:
        raise NotImplementedError

    _next_token_sum = _router_loss = _hidden


@pytest.mark.parametrize("order", ["psm", "spm", "prefix"])
def test_a_model_that_ignores_the_text_is_right_at_chance(order: str) -> None:
    """One point a group, whatever it thinks of the lines: by ties where its gains are all 0."""
    unigram = Scorer(lambda ids, target, at: 0.1 * target)
    assert sum(points(unigram, ITEMS, MARKS, order)) == 1.0
    # Its gains differ by line but not by context.
    draw = np.random.default_rng(1).random(100).tolist()
    odd = Scorer(lambda ids, target, at: draw[target] * (1.5 if {5, 6} & {*ids[:at]} else 1.0))
    assert sum(points(odd, ITEMS, MARKS, order)) == 1.0


def test_a_model_that_reads_suffix_or_prefix_is_right() -> None:
    def suffix_alone(ids: list[int], target: int, at: int) -> float:
        return 0.1 if target + 10 in ids[:at] else 3.0

    assert points(Scorer(suffix_alone), ITEMS, MARKS, "psm") == [1.0] * GROUP
    assert points(Scorer(suffix_alone), ITEMS, MARKS, "spm") == [1.0] * GROUP
    assert sum(points(Scorer(suffix_alone), ITEMS, MARKS, "prefix")) == 1.0, "it does not see the suffix"
    assert (
        points(Scorer(lambda ids, target, at: 0.1 if target - 10 in ids[:at] else 3.0), ITEMS, MARKS, "prefix")
        == [1.0] * GROUP
    )


def test_the_rows_are_those_of_training() -> None:
    scorer = Scorer(lambda ids, target, at: 1.0)
    points(scorer, ITEMS[:2], MARKS, "psm")
    points(scorer, ITEMS[:2], MARKS, "spm")
    points(scorer, ITEMS[:2], MARKS, "prefix")
    psm, spm, prefix = scorer.rows[1], scorer.rows[7], scorer.rows[13]
    # first item, second line; the last token of a row is a target alone
    assert psm == ([0, 1, 10, 5, 3, 30, 6, 2, 21, 21], [21, 21, 0])
    assert spm == ([0, 1, 3, 30, 6, 2, 10, 5, 21, 21], [21, 21, 0])
    assert prefix == ([0, 10, 5, 21], [21, 21])
    assert scorer.rows[4][0][:4] == [0, 1, 3, 2], "no prefix and no suffix"


def split_of(texts: list[str]) -> Split:
    split = create_autospec(Split, instance=True)
    split.text.side_effect = lambda: iter(text.encode() for text in texts)
    split.domain_of.side_effect = lambda number: "odd" if number % 2 else "even"
    return split


def test_items_are_lines_of_documents_with_what_is_around_them() -> None:
    texts = [f"first line {n}\n    the middle of {n} is here\nlast line {n}\n" for n in range(30)]
    items = read_items(split_of(texts), TOKENIZER, 256, 10, 1)
    assert len(items) == 12, "whole groups"
    found = {TOKENIZER.decode([*item.prefix, *item.middle, *item.suffix]) for item in items}
    assert len(found) == 12
    assert found <= set(texts)
    assert all(TOKENIZER.decode(item.middle).startswith("    the middle") for item in items)
    odd = read_items(split_of(texts), TOKENIZER, 256, 200, 1, ["odd"])
    assert len(odd) == 12, "15 documents, three whole groups"
    short = read_items(split_of([text + "x\n" * 500 for text in texts]), TOKENIZER, 64, 4, 1)
    assert all(len(item.prefix) + len(item.middle) + len(item.suffix) + 5 <= 64 for item in short)
    with pytest.raises(ConfigError, match=r"fewer than 4 documents .*data\.valid_fraction"):
        read_items(split_of(["one line\n"] * 10), TOKENIZER, 256, 10, 1)
