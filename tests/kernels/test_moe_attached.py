"""Experts with bfloat16 copies of their weights and sums for their gradients: numbers, and what is not moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cdrmix import ops
from cdrmix.ops import weights as attached_weights

# RMS ratio of gradients: as in test_moe.py, rounding to bfloat16 is 1.1e-3 by itself, and six rounded tensors lie on
# the way. A sum of two micro-batches' float32 products is nearer to float64 than one of rounded ones.
BFLOAT16 = 2e-2


class Experts(nn.Module):
    """A router's logits, and experts: float32 parameters, products under autocast."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        widening = 2 if activation == "swiglu" else 1
        self.activation = activation
        self.w_up = nn.Parameter(torch.randn(4, 16, 24 * widening, generator=generator) / 4)
        self.w_down = nn.Parameter(torch.randn(4, 24, 16, generator=generator) / 5)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        routing = ops.route_topk(logits, 2)
        return ops.moe_experts(x, self.w_up, self.w_down, routing, activation=self.activation)


class Linear(nn.Module):
    """One matrix an expert, as Routing-Mamba's projections are."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 16, 24, generator=torch.Generator().manual_seed(0)) / 4)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        routing = ops.route_topk(logits, 2)
        return ops.moe_product(ops.moe_dispatch(x, routing), self.w, routing)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "relu2": lambda: Experts("relu2"),
    "swiglu": lambda: Experts("swiglu"),
    "product": Linear,
}


def micro_batches(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Two of them; no token of the second goes to the last expert."""
    generator = torch.Generator().manual_seed(1)
    batches = [[torch.randn(*size, generator=generator) for size in ((21, 16), (21, 4))] for _ in range(2)]
    batches[1][1][:, -1] -= 100
    return [(x.to(dtype).requires_grad_(), logits.to(dtype)) for x, logits in batches]


def train(module: nn.Module, batches: list[tuple[Tensor, Tensor]], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Gradients of the parameters and of each micro-batch's x."""
    for x, logits in batches:
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            y = module(x, logits)
        y.double().square().sum().backward()
    return [parameter.grad for parameter in module.parameters()] + [x.grad for x, _ in batches]


def ratio(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CDRMIX_BACKEND", request.param)
    return str(request.param)


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_two_micro_batches_add_up(backend: str, name: str) -> None:
    exact = train(MODULES[name]().double(), micro_batches(torch.float64), torch.float64)
    module = MODULES[name]()
    attached_weights.attach(module.parameters(), torch.bfloat16, add_gradients=True)
    found = train(module, micro_batches())
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float32
        assert ratio(one, other) < BFLOAT16
    if backend != "triton":  # its interpreter is numpy in one thread
        again = MODULES[name]()
        attached_weights.attach(again.parameters(), torch.bfloat16, add_gradients=True)
        assert all(map(torch.equal, found, train(again, micro_batches())))


@pytest.mark.parametrize("name", MODULES)
def test_float32_copies_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attached in the weights' own dtype: the same bits where nothing is added up, else another order of sums."""
    monkeypatch.setenv("CDRMIX_BACKEND", "cpu")
    plain = train(MODULES[name](), micro_batches(), torch.float32)
    for adds in (False, True):
        module = MODULES[name]()
        attached_weights.attach(module.parameters(), torch.float32, add_gradients=adds)
        found = train(module, micro_batches(), torch.float32)
        for one, other in zip(found, plain, strict=True):
            assert ratio(one, other.double()) < 1e-6 if adds else torch.equal(one, other)


def test_frozen_weights_and_copies_that_are_out_of_date() -> None:
    module = MODULES["swiglu"]().requires_grad_(False)
    attached_weights.attach(module.parameters(), torch.bfloat16, add_gradients=True)
    [(x, logits), _] = micro_batches()
    train(module, [(x, logits)])
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in module.parameters())
    with torch.no_grad():
        next(module.parameters()).mul_(2)
    with pytest.raises(AssertionError, match="not refreshed"):
        train(module, [(x, logits)])


class Moved(TorchDispatchMode):
    """Notes the operators that make or change a tensor of as many elements as one of the weights."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self.sizes, self.seen = sizes, []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        results = found if isinstance(found, tuple | list) else [found]
        views = function._schema.returns and function._schema.returns[0].alias_info and not function._schema.is_mutable
        if not views and any(isinstance(x, Tensor) and x.numel() in self.sizes for x in results):
            self.seen.append(function.name())
        return found


@pytest.mark.parametrize("name", MODULES)
def test_no_pass_over_the_weights_beside_the_products(name: str) -> None:
    """Nothing of a weight's size is cast, added or made in a micro-batch after an update's first, which makes sums."""
    for attach in (True, False):
        module = MODULES[name]()
        batches = micro_batches()
        if attach:
            attached_weights.attach(module.parameters(), torch.bfloat16, add_gradients=True)
        train(module, batches[:1])
        with Moved({parameter.numel() for parameter in module.parameters()}) as moved:
            train(module, batches[1:])
        if attach:
            assert moved.seen == []
        else:  # what the layer does otherwise: a cast there, the gradient and its cast back, the sum
            assert {"aten::_to_copy", "aten::add_.Tensor"} <= set(moved.seen), moved.seen


@pytest.mark.usefixtures("backend")
def test_the_backward_operators_say_what_they_change() -> None:
    """A sum that is added to is in the operators' schemas, so that compilers keep its order; and one may be missing."""
    generator = torch.Generator().manual_seed(0)
    routing = ops.route_topk(torch.randn(9, 3, generator=generator), 2)
    dy, x = torch.randn(9, 16, generator=generator), torch.randn(9, 16, generator=generator)
    w_up, w_down = torch.randn(3, 16, 8, generator=generator), torch.randn(3, 8, 16, generator=generator)
    order = routing.weights_TK, routing.order_R, routing.counts_E, torch.zeros(0)
    tests = ("test_schema", "test_faketensor")
    for up_sum, down_sum in ((torch.ones_like(w_up), torch.ones_like(w_down)), (None, torch.ones_like(w_down))):
        arguments = (dy, x, w_up, w_down, *order, "relu2", True, up_sum, down_sum)
        torch.library.opcheck(torch.ops.cdrmix.moe_experts_backward.default, arguments, test_utils=tests)
    rows = torch.randn(18, 16, generator=generator), torch.randn(18, 8, generator=generator)
    arguments = (rows[1], rows[0], w_up, routing.counts_E, torch.ones_like(w_up))
    torch.library.opcheck(torch.ops.cdrmix.moe_product_backward.default, arguments, test_utils=tests)
