"""The token shift in plain PyTorch, in float64, forward and every gradient."""

from __future__ import annotations

import torch

from cdrmix import ops


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
