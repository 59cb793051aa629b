"""The plain PyTorch ops around loss and token shift, in float64, forward and every gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from cdrmix import ops


@pytest.mark.parametrize("rows", [1, 511, 512, 1100])
def test_linear_cross_entropy_equals_pytorch(rows: int) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    targets, weights = torch.randint(0, 11, (rows,)), torch.rand(rows, dtype=torch.float64)
    expected = (functional.cross_entropy(hidden @ weight.mT, targets, reduction="none") * weights).sum()
    found = ops.linear_cross_entropy(hidden, weight, targets, weights)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected * 0.5, [hidden, weight])
    for left, right in zip(torch.autograd.grad(found * 0.5, [hidden, weight]), wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)


def test_linear_cross_entropy_without_gradients_and_with_large_logits() -> None:
    hidden, weight = torch.full((2, 1), 1000.0), torch.tensor([[1.0], [-1.0], [0.5]])
    with torch.no_grad():
        loss = ops.linear_cross_entropy(hidden, weight, torch.tensor([0, 2]), torch.ones(2))
    assert math.isclose(loss.item(), 500.0, rel_tol=1e-6)


def test_token_shift_takes_the_predecessor_and_zero_at_a_document_start() -> None:
    x = torch.arange(1.0, 7.0).view(1, 6, 1)
    starts = torch.tensor([False, False, True, False, False, False]).view(1, 6, 1)
    assert ops.token_shift(x, None, starts).flatten().tolist() == [0, 1, 0, 3, 4, 5]
    assert ops.token_shift(x, torch.tensor([[9.0]])).flatten().tolist() == [9, 1, 2, 3, 4, 5]


def test_gradcheck_of_token_shift() -> None:
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    last = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    starts = torch.tensor([[True, False, True, False, False], [False, False, False, False, True]]).unsqueeze(-1)
    assert torch.autograd.gradcheck(ops.token_shift, (x, last))
    assert torch.autograd.gradcheck(ops.token_shift, (x, last, starts))
    assert torch.autograd.gradcheck(ops.token_shift, (x,))
