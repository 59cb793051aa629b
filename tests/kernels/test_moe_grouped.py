"""The experts' products by torch._grouped_mm and by our kernels: equal numbers, also in the rows that it leaves out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cdrmix.kernels.common import triton_helpers
from cdrmix.kernels.moe import grouped as moe_grouped
from cdrmix.kernels.moe import reference as reference_moe
from cdrmix.kernels.moe import triton as moe_experts

interpreted = pytest.mark.skipif(not triton_helpers.INTERPRETED, reason="TRITON_INTERPRET=0: the kernels need a GPU")
# RMS ratios to float64, as in test_moe_triton.py: float32 sums of at most 300 products, through four products in a row.
FLOAT32, BFLOAT16 = 2e-6, 6e-3
NAMES = ("y", "dx", "dw_up", "dw_down", "dweights")


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """torch._grouped_mm wherever it can be, with NaN in the rows that it leaves out; and how often it was called."""
    product, calls = torch._grouped_mm, []

    def spoiled(left: Tensor, w: Tensor, *, offs: Tensor) -> Tensor:
        calls.append("grouped_mm")
        y: Tensor = product(left.contiguous(), w, offs=offs)
        y[int(offs[-1]) :] = torch.nan
        return y

    monkeypatch.setattr(torch, "_grouped_mm", spoiled)
    moe_grouped.force(moe_grouped.GROUPED)
    yield calls
    moe_grouped.force(None)


def make(activation: str, capacity: int | None, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Any]:
    """x, w_up, w_down, weights, order, counts, dy of 3 experts, the last of which gets few rows."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    logits = normal(45, 3) - torch.tensor([0.0, 0.0, 2.0])
    weights, _, counts, _, order, _, _ = reference_moe.route_forward(logits, 2, None, capacity)
    wide = 48 if activation == "swiglu" else 24
    floats = normal(45, 16), normal(3, 16, wide) / 4, normal(3, 24, 16) / 5
    x, w_up, w_down = (tensor.to(device, dtype) for tensor in floats)
    indices = weights.to(device), order.to(device), counts.to(device)
    return [x, w_up, w_down, *indices, normal(45, 16).to(device, dtype)]


def run(kernels: Any, inputs: list[Any], activation: str, recompute: bool, sums: list[Tensor]) -> list[Tensor]:
    *tensors, dy = inputs
    y, z = kernels.experts_forward(*tensors, activation=activation, recompute=recompute)
    return [y, *kernels.experts_backward(dy, *tensors, z, *sums, activation=activation, recompute=recompute)]


def check(inputs: list[Any], activation: str, recompute: bool, bar: float) -> None:
    exact = [x.double().cpu() if x.is_floating_point() else x.cpu() for x in inputs]
    wanted = run(reference_moe, exact, activation, recompute, [])
    found = run(moe_experts, inputs, activation, recompute, [])
    for name, x, y in zip(NAMES, found, wanted, strict=True):
        assert ((x.double().cpu() - y).norm() / y.norm()) < bar, name
    sums = [torch.zeros_like(w, dtype=torch.float32) for w in inputs[1:3]]
    added = run(moe_experts, inputs, activation, recompute, sums)
    assert torch.equal(added[0], found[0])
    for x, y in zip(sums, wanted[2:4], strict=True):
        assert ((x.double().cpu() - y).norm() / y.norm()) < bar


@interpreted
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("capacity", [None, 20])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_experts_by_grouped_mm(grouped: list[str], activation: str, capacity: int | None, recompute: bool) -> None:
    """Each of the four products over rows, or five where Z is made again, goes there; and again with sums."""
    check(make(activation, capacity), activation, recompute, FLOAT32)
    assert len(grouped) == 2 * (4 if not recompute else 5)


@interpreted
def test_what_it_cannot_take_stays_ours(grouped: list[str]) -> None:
    """Rows of no multiple of 16 bytes, and no rows at all."""
    x, w_up, w_down, *others, dy = make("relu2", None)
    narrow = [x[:, :13].contiguous(), w_up[:, :13].contiguous(), w_down[..., :13].contiguous(), *others]
    check([*narrow, dy[:, :13].contiguous()], "relu2", False, FLOAT32)
    nothing = torch.zeros(0, 16)
    empty = [nothing, w_up, w_down, torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), torch.zeros_like(others[2])]
    y, *_ = run(moe_experts, [*empty, nothing], "relu2", False, [])
    assert y.shape == (0, 16)
    assert grouped == []


@pytest.mark.parametrize(("arch", "hidden"), [("sm_80", 4608), ("gfx942", 4608), ("sm_90", 4608), ("sm_90", 1024)])
def test_the_table_chooses(arch: str, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By architecture and width; what is not in the table is ours, and so is what torch._grouped_mm cannot take."""
    monkeypatch.setattr(moe_grouped, "takes", lambda left, w, **how: len(left) > 0)
    x, w = torch.zeros(4, 8), torch.zeros(2, 8, 8)
    known = moe_grouped.CHOICES.get((arch, "wide" if hidden >= moe_grouped.WIDE else "narrow"))
    for product in moe_grouped.PRODUCTS:
        assert moe_grouped.choice(product, arch, hidden, x, w) == (getattr(known, product) if known else "triton")
    if known:
        other = dataclasses.replace(known, rows=moe_grouped.GROUPED)
        for key in list(moe_grouped.CHOICES):
            monkeypatch.setitem(moe_grouped.CHOICES, key, other)
        assert moe_grouped.choice("rows", arch, hidden, x, w) == "grouped_mm"
        assert moe_grouped.choice("rows", arch, hidden, x[:0], w) == "triton"
        assert moe_grouped.choice("up", arch, hidden, x, w) == known.up


def test_choices_name_implementations_and_their_source() -> None:
    for (arch, width), found in moe_grouped.CHOICES.items():
        assert arch in triton_helpers.ARCHITECTURES
        assert width in ("wide", "narrow")
        assert {found.up, found.gradient, found.rows} <= {moe_grouped.OURS, moe_grouped.GROUPED}
        assert found.source


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("capacity", [None, 20])
def test_on_a_gpu(grouped: list[str], activation: str, capacity: int | None) -> None:
    """Where the card has it; two runs have the same bits."""
    inputs = make(activation, capacity, "cuda", torch.bfloat16)
    if not moe_grouped.takes(inputs[0], inputs[1]):
        pytest.skip("torch._grouped_mm wants sm_90 or later")
    check(inputs, activation, False, BFLOAT16)
    one, other = (run(moe_experts, inputs, activation, False, []) for _ in range(2))
    assert all(map(torch.equal, one, other))
    assert grouped
