"""Routing, dispatch, experts, products and combine never read a value on the host, so that nothing waits for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cdrmix.kernels.common import triton_helpers
from cdrmix.kernels.moe import reference as reference_moe
from cdrmix.kernels.moe import triton as moe_experts
from cdrmix.kernels.moe import triton_route as moe_route
from cdrmix.kernels.moe import triton_rows as moe_rows

interpreted = pytest.mark.skipif(not triton_helpers.INTERPRETED, reason="TRITON_INTERPRET=0: the kernels need a GPU")


class NoReads(TorchDispatchMode):
    """Refuses operators that hand a value, or a size that depends on values, to the host."""

    READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique", "aten::_unique2")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().split(".")[0]
        assert name not in self.READS, name
        assert not (name == "aten::index" and any(x is not None and x.dtype == torch.bool for x in args[1])), name
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def no_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's tensor gives its list without an operator; a GPU's would be copied for it."""

    def refuse(x: Tensor) -> None:
        raise AssertionError("Tensor.tolist")

    monkeypatch.setattr(Tensor, "tolist", refuse)


@interpreted
@pytest.mark.parametrize("capacity", [None, 9])
def test_a_layer_on_triton_reads_nothing(capacity: int | None) -> None:
    """All that the operators call on a GPU, forward and backward, in Triton's interpreter."""
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(21, generator=generator) < 0.7
    logits, x, dy = (torch.randn(21, size, generator=generator) for size in (3, 16, 16))
    w_up, w_down = torch.randn(3, 16, 32, generator=generator), torch.randn(3, 16, 16, generator=generator)
    sums = [torch.zeros_like(w_up), torch.zeros_like(w_down)]
    with NoReads():
        weights, chosen, counts, tokens_per_expert, order, balance, z_loss = moe_route.route_forward(
            logits, 2, None, capacity, keep
        )
        moe_route.route_backward(weights, balance, z_loss, logits, chosen, tokens_per_expert, 2, keep)
        tensors = x, w_up, w_down, weights, order, counts
        for recompute in (False, True):
            _, z = moe_experts.experts_forward(*tensors, activation="swiglu", recompute=recompute)
            for given in ([], sums):
                moe_experts.experts_backward(dy, *tensors, z, *given, activation="swiglu", recompute=recompute)
        rows = moe_rows.dispatch(x, order, counts, 2)
        moe_rows.combine(rows, order, counts, 2)
        y = moe_experts.product_forward(rows, w_down, counts)
        moe_experts.product_backward(y, rows, w_down, counts, sums[1])


def test_a_read_is_found() -> None:
    """The check can fail: the way of CPUs reads counts."""
    generator = torch.Generator().manual_seed(0)
    rows, w = torch.randn(6, 4, generator=generator), torch.randn(2, 4, 4, generator=generator)
    with NoReads(), pytest.raises(AssertionError, match=r"Tensor\.tolist"):
        reference_moe.product_forward(rows, w, torch.tensor([3, 3]))
    with NoReads(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        reference_moe.dispatch(rows, torch.arange(6), torch.tensor([3, 2]), 1)
