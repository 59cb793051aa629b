"""Custom operators: eager calls do not use the dispatcher, all others do, and both give the same bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from cdrmix import ops
from cdrmix.ops import moe, routing, rwkv7, time_mix, weights
from cdrmix.ops.operator import Operator

needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs numba, which is not installed"
)
DEVICES = [pytest.param("cpu", marks=needs_numba), pytest.param("cuda", marks=pytest.mark.gpu)]


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 5, 32, generator=generator)
    weight, bias = torch.randn(2, 32, generator=generator)
    return tuple(each.clone().requires_grad_() for each in (x, y, weight, bias))


def passes() -> list[Tensor]:
    x, y, weight, bias = inputs()
    total, normed = ops.add_norm(x, y, weight, bias, kind="layernorm")
    return [total, normed, *torch.autograd.grad((total * normed).sum(), [x, y, weight, bias])]


class Seen(TorchDispatchMode):
    """The names of our operators that the dispatcher came to."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        if operator.namespace == "cdrmix":
            self.names.append(operator._opname)
        return operator(*arguments, **(keywords or {}))


@needs_numba
def test_an_eager_call_has_the_bits_of_one_that_is_followed() -> None:
    with Seen() as seen:
        followed = passes()
    assert seen.names == ["add_norm", "add_norm_backward"]
    assert all(map(torch.equal, passes(), followed))


@needs_numba
def test_a_profile_names_operators_and_nothing_else_pays_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with profile() as found:
        passes()
    assert {"cdrmix::add_norm", "cdrmix::add_norm_backward"} <= {event.name for event in found.function_events}

    def refuse(*_: object) -> None:
        raise AssertionError("the dispatcher was asked")

    for operator in (ops.norm._add_norm, ops.norm._add_norm_backward):
        monkeypatch.setattr(operator, "_custom", refuse)
    passes()


def recurrence(device: str) -> list[Tensor]:
    """Both passes of an operator that returns two tensors and a list."""
    generator = torch.Generator().manual_seed(0)
    r, k, v, b = (torch.randn(1, 40, 2, 32, generator=generator).to(device).requires_grad_() for _ in range(4))
    y, last = ops.wkv7(r, -r.sigmoid(), k, v, -b, b * 0.5, return_state=True)
    assert last is not None
    return [y, last, *torch.autograd.grad([y.sum() + last.sum()], [r, k, v, b])]


def streams(device: str) -> list[Tensor]:
    """Both passes of an operator that returns a list, of which one tensor has no gradient."""
    generator = torch.Generator().manual_seed(0)
    x, mixes = torch.randn(2, 5, 32, generator=generator), torch.randn(6, 32, generator=generator)
    x, mixes = (each.to(device).requires_grad_() for each in (x, mixes))
    found = ops.time_mix_streams(x, mixes, None, None)
    return [*found, *torch.autograd.grad(sum(each.square().sum() for each in found[:5]), [x, mixes])]


def experts(device: str) -> list[Tensor]:
    """Both passes of an operator whose backward pass adds to sums that it is given."""
    generator = torch.Generator().manual_seed(0)
    x, logits = (torch.randn(9, n, generator=generator).to(device).requires_grad_() for n in (16, 4))
    w_up, w_down = (torch.randn(4, *n, generator=generator).to(device).requires_grad_() for n in ((16, 8), (8, 16)))
    with torch.autocast(device, torch.bfloat16):
        weights.attach((w_up, w_down), torch.bfloat16, add_gradients=True)
        y = ops.moe_experts(x, w_up, w_down, ops.route_topk(logits, 2), activation="relu2")
    for _ in range(2):
        y.square().sum().backward(retain_graph=True)
    return [y, x.grad, logits.grad, w_up.grad, w_down.grad]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("passes", [recurrence, streams, experts])
def test_lists_and_changed_arguments_need_no_dispatcher(
    passes: Callable[[str], list[Tensor]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Seen() as seen:
        followed = passes(device)
    assert any(name.endswith("_backward") for name in seen.names)

    def refuse(*_: object) -> None:
        raise AssertionError("the dispatcher was asked")

    for module in (rwkv7, time_mix, moe, routing):
        for each in vars(module).values():
            if isinstance(each, Operator):
                monkeypatch.setattr(each, "_custom", refuse)
    assert all(map(torch.equal, passes(device), followed))
