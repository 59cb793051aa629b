"""Exports of models of transformers: logits that differ are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdrmix.errors import ExportMismatchError
from cdrmix.hf.export_foreign import check_same_logits

VOCAB = 50


class Model(nn.Module):
    """Gives the same random logits for all ids, with a change."""

    def __init__(self, change: float | Tensor = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) + change)

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not use_cache
        return SimpleNamespace(logits=self.weight.expand(*input_ids.shape, VOCAB))


def check(change: float | Tensor, tolerance: float) -> None:
    model = Model()
    ours = SimpleNamespace(
        model=SimpleNamespace(parameters=model.parameters, transformers_model=model, vocab_size=VOCAB),
        tokenizer=SimpleNamespace(encode=lambda _: [1, 2]),
        config=SimpleNamespace(data=SimpleNamespace(row_length=16)),
    )
    check_same_logits(ours, Model(change), [3, 4], tolerance=tolerance, what="the exported model")  # type: ignore[arg-type]


@pytest.mark.parametrize(("change", "tolerance"), [(0.0, 0.0), (1e-3, 0.05)])
def test_equal_and_rounded_logits_pass(change: float, tolerance: float) -> None:
    check(change, tolerance)


ONE_BIT = torch.zeros(VOCAB).index_fill(0, torch.tensor(3), 1e-6)


@pytest.mark.parametrize(
    ("change", "tolerance"),
    [(ONE_BIT, 0.0), (1.0, 0.05), (float("nan"), 0.05), (float("nan"), 0.0), (float("inf"), 0.05)],
)
def test_other_logits_are_found_also_a_constant_and_nan(change: float | Tensor, tolerance: float) -> None:
    with pytest.raises(ExportMismatchError, match="the exported model gives other logits on the prompt"):
        check(change, tolerance)
