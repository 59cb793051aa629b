"""Custom operators: eager calls on a CPU do not use the dispatcher, all others do, and both give the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from cdrmix import ops

pytest.importorskip("numba", reason="needs numba, which is not installed")


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


def test_an_eager_call_has_the_bits_of_one_that_is_followed() -> None:
    with Seen() as seen:
        followed = passes()
    assert seen.names == ["add_norm", "add_norm_backward"]
    assert all(map(torch.equal, passes(), followed))


def test_a_profile_names_operators_and_nothing_else_pays_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with profile() as found:
        passes()
    assert {"cdrmix::add_norm", "cdrmix::add_norm_backward"} <= {event.name for event in found.function_events}

    def refuse(*_: object) -> None:
        raise AssertionError("the dispatcher was asked")

    for operator in (ops.norm._add_norm, ops.norm._add_norm_backward):
        monkeypatch.setattr(operator, "_custom", refuse)
    passes()


def test_gradients_of_gradients_are_refused_as_by_the_dispatcher() -> None:
    x, y, weight, bias = inputs()
    total, normed = ops.add_norm(x, y, weight, bias, kind="layernorm")
    (dx,) = torch.autograd.grad((total * normed).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(dx.sum(), x)
