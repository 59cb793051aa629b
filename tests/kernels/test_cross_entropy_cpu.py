"""The CPU's kernel for a chunk's logits: what is not finite, and several threads. All else is in test_cross_entropy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cdrmix import ops
from cdrmix.kernels.cross_entropy import reference as reference_loss

pytest.importorskip("numba", reason="needs numba, which is not installed")
from cdrmix.kernels.common import elementwise
from cdrmix.kernels.cross_entropy import cpu as cross_entropy_cpu


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_logits_that_are_not_finite_reach_their_rows_alone(label_smoothing: float) -> None:
    """As the plain formulas in float64 have them: minus infinity, infinity, NaN, and nothing but minus infinity."""
    logits = torch.randn(5, 600, generator=torch.Generator().manual_seed(0))
    logits[1, 3] = -torch.inf
    logits[2, 3] = torch.inf
    logits[3, 3] = torch.nan
    logits[4] = -torch.inf
    targets, scales = torch.tensor([[1, 1]]).expand(5, 2), torch.ones(5, 2)
    wide = logits.double()
    options: dict[str, Any] = {"z_loss": 0.01, "label_smoothing": label_smoothing, "wants_gradient": True}
    wanted = reference_loss.softmax_rows(wide, targets, scales.double(), **options)
    found = cross_entropy_cpu.softmax_rows(logits, targets, scales, **options)
    for narrow, exact in ((found, wanted), (logits, wide)):
        bar = 16 * torch.finfo(torch.float32).eps * 600**0.5
        assert torch.allclose(narrow.double(), exact, rtol=bar, atol=bar, equal_nan=True)
    assert logits[:2].isfinite().all()
    assert found[1].isfinite().all() == (label_smoothing == 0)


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight's gradient is a product: tests/kernels/test_linear.py."""
    monkeypatch.setattr(elementwise, "SERIAL_WORK", 0)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, generator=generator) for rows in (70, 600))
    targets = torch.randint(0, 600, (2, 70), generator=generator)
    scales = torch.rand(2, 70, generator=generator) - 0.25

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        x = hidden.to(dtype).requires_grad_()
        options = {"weights": scales.to(dtype), "z_loss": 0.01, "label_smoothing": 0.1}
        losses = ops.linear_cross_entropy(x, weight.to(dtype) / 8**0.5, targets, **options)
        return [losses.detach(), *torch.autograd.grad(losses.sum(), x)]

    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found.append(run(torch.float32))
    finally:
        torch.set_num_threads(before)
    for x, y in zip(found[0], run(torch.float64), strict=True):  # 16 eps for a sum of rounded terms, added in pairs
        assert (x - y).abs().max() <= 16 * torch.finfo(torch.float32).eps * 800**0.5 * max(1, y.abs().max())
    assert all(torch.equal(x, y) for each in found[1:] for x, y in zip(each, found[0], strict=True))
