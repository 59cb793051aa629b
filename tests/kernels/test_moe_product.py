"""The grouped product by itself: PyTorch and Triton against float64, gradients, dropped rows, refusals."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cdrmix import ops
from cdrmix.kernels.common import triton_helpers
from cdrmix.kernels.moe import reference as reference_moe
from cdrmix.kernels.moe import triton as moe_experts

# RMS ratio to float64 of sums of at most 300 products of float32: 2^-24 sqrt(300) = 1e-6, twice that for luck.
FLOAT32 = 2e-6


def by_hand(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    bounds = [0, *counts.cumsum(0).tolist()]
    pieces = [x[low:high] @ w[expert] for expert, (low, high) in enumerate(itertools.pairwise(bounds))]
    return torch.cat([*pieces, x.new_zeros(len(x) - bounds[-1], w.shape[2])])


def rows(counts: list[int], dropped: int, D: int, F: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    R = sum(counts) + dropped
    x, w, dy = (torch.randn(size, generator=generator) for size in ((R, D), (len(counts), D, F), (R, F)))
    return x, w, dy, torch.tensor(counts)


def ratio(found: Tensor, exact: Tensor) -> float:
    scale = exact.norm()
    return float((found.double() - exact).norm() / scale) if scale else float(found.double().norm())


def check(kernels: Any, counts: list[int], dropped: int, D: int, F: int) -> None:
    x, w, dy, counts_E = rows(counts, dropped, D, F)
    dy[sum(counts) :] = torch.nan  # of dropped rows: nobody reads it
    wide_x, wide_w = x.double().requires_grad_(), w.double().requires_grad_()
    exact = by_hand(wide_x, wide_w, counts_E)
    gradients = torch.autograd.grad(exact, (wide_x, wide_w), dy.double().nan_to_num(0), allow_unused=True)
    found = [kernels.product_forward(x, w, counts_E), *kernels.product_backward(dy, x, w, counts_E)]
    for name, one, other in zip(("y", "dx", "dw"), found, (exact.detach(), *gradients), strict=True):
        assert ratio(one, torch.zeros_like(one).double() if other is None else other) < FLOAT32, name
        assert one.shape == (other.shape if other is not None else one.shape)
    again = [kernels.product_forward(x, w, counts_E), *kernels.product_backward(dy, x, w, counts_E)]
    assert all(map(torch.equal, found, again))
    check_sum(kernels, x, w, dy, counts_E, found[2])


def check_sum(kernels: Any, x: Tensor, w: Tensor, dy: Tensor, counts_E: Tensor, dw: Tensor) -> None:
    """The gradient is added to a sum, with the same bits every time; an expert without rows leaves its part alone."""
    start = torch.randn_like(w)
    sums = [start.clone() for _ in range(2)]
    for total in sums:
        dx, empty = kernels.product_backward(dy, x, w, counts_E, total)
        assert empty.numel() == 0
        assert torch.equal(dx, kernels.product_backward(dy, x, w, counts_E)[0])
    assert torch.equal(*sums)
    assert ratio(sums[0], start.double() + dw) < FLOAT32
    assert torch.equal(sums[0][counts_E == 0], start[counts_E == 0])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 4), st.integers(1, 20), st.integers(1, 20))
def test_the_reference_equals_the_loop(counts: list[int], dropped: int, D: int, F: int) -> None:
    check(reference_moe, counts, dropped, D, F)


@pytest.mark.skipif(not triton_helpers.INTERPRETED, reason="TRITON_INTERPRET=0: the kernels need a GPU")
@pytest.mark.parametrize(
    ("counts", "dropped", "D", "F"),
    [([3, 0, 150, 1], 5, 40, 24), ([0, 0], 3, 8, 8), ([130], 0, 136, 130), ([1, 1, 1], 0, 1, 3)],
)
def test_triton_equals_float64(counts: list[int], dropped: int, D: int, F: int) -> None:
    check(moe_experts, counts, dropped, D, F)


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    routing = ops.route_topk(torch.randn(6, 3, generator=generator), 2, capacity=3)
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    assert int(routing.counts_E.sum()) < 12, "a case with dropped rows"
    assert torch.autograd.gradcheck(lambda x, w: ops.moe_product(x, w, routing), (x, w))


def test_autocast_and_compile() -> None:
    x, w, dy, counts = rows([7, 9, 8], 0, 16, 24)
    routing = ops.route_topk(torch.randn(12, 3), 2)
    del dy, counts
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.moe_product(x, w, routing).dtype == torch.bfloat16
    compiled = torch.compile(lambda x, w: ops.moe_product(x, w, routing), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, w), ops.moe_product(x, w, routing))


def test_refusals() -> None:
    routing = ops.route_topk(torch.randn(6, 3), 2)
    x, w = torch.randn(12, 4), torch.randn(3, 4, 5)
    for arguments, message in (
        ((x[:11], w, routing), r"12 rows"),
        ((x, w[:2], routing), r"\[E, D, F\] = \[3, 4, F\]; found \[2, 4, 5\]"),
        ((x, w.double(), routing), r"one device and one dtype"),
        ((x, w, None), r"what route_topk gives"),
        ((x, None, routing), r"w_EDF must be bfloat16, .*; found NoneType"),
        ((x, w.int(), routing), r"w_EDF must be bfloat16, .*; found torch.int32"),
        ((x, w, dataclasses.replace(routing, counts_E=100 * routing.counts_E)), r"sum to at most 12 routes"),
        ((x, w, dataclasses.replace(routing, counts_E=routing.counts_E.float())), r"counts_E is torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.moe_product(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    x, w, dy, counts = rows([300, 0, 513, 211], 40, 136, 264)
    arguments = [tensor.to("cuda", dtype) for tensor in (x, w, dy)]
    wide = [tensor.double().cpu() for tensor in arguments]
    x, w, dy = arguments
    found = [moe_experts.product_forward(x, w, counts.cuda()), *moe_experts.product_backward(dy, x, w, counts.cuda())]
    exact = [
        reference_moe.product_forward(wide[0], wide[1], counts),
        *reference_moe.product_backward(wide[2], wide[0], wide[1], counts),
    ]
    # Bfloat16: the rounding of the result, 2^-9 / sqrt(3) = 1.1e-3, on sums that are exact to float32.
    for one, other in zip(found, exact, strict=True):
        assert ratio(one.cpu(), other) < (FLOAT32 if dtype == torch.float32 else 2e-3)
