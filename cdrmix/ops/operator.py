"""Custom operators of PyTorch that skip PyTorch's dispatcher in eager calls on a CPU.

A call through `torch.library` takes 130 to 220 us of host time in addition to the operator's own, forward and backward
each (core-tiny's norms, PyTorch 2.13: as long as the norm itself). Only tracing, profiling and function transforms need
it, so an eager call runs the same formulas in a `torch.autograd.Function`, or calls the function where no gradient is
needed. The first call through the dispatcher also imports torch.compile, which takes 1 s. Such a Function cannot
differentiate lists of tensors: an operator that returns some has `eager_gradients=False`, and its calls with gradients
go through the dispatcher. Operators that write to an argument are `torch.library.custom_op` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cdrmix.ops.backend import platform_is_assumed

_PLAIN = (Tensor, torch.nn.Parameter)


class Operator:
    """A custom operator that changes no argument; call it as the original function, with every argument."""

    def __init__(self, name: str, function: Callable[..., Any], *, eager_gradients: bool = True) -> None:
        self._custom = torch.library.custom_op(name, function, mutates_args=())
        self._function, self._eager_gradients = function, eager_gradients
        self._differentiable: type[torch.autograd.Function] | None = None
        self.register_fake = self._custom.register_fake

    def register_autograd(self, differentiate: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """As `torch.library`'s: setup_context(ctx, inputs, output), differentiate(ctx, *gradients)."""
        self._custom.register_autograd(differentiate, setup_context=setup_context)
        if not self._eager_gradients:
            return
        members = {
            "forward": staticmethod(self._function),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(differentiate),
        }
        self._differentiable = type(self._function.__name__, (torch.autograd.Function,), members)

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_eager(inputs):
            return self._custom(*inputs)
        if not torch.is_grad_enabled():
            return self._function(*inputs)
        if self._differentiable is not None:
            return self._differentiable.apply(*inputs)
        return self._custom(*inputs)  # it has no eager gradients, or no gradients


def operator(name: str, *, eager_gradients: bool = True) -> Callable[[Callable[..., Any]], Operator]:
    """Makes a function a custom operator of this name. eager_gradients: False where it returns lists of tensors."""
    return lambda function: Operator(name, function, eager_gradients=eager_gradients)


def _is_eager(inputs: tuple[Any, ...]) -> bool:
    """Whether only autograd observes the call: plain tensors on a CPU, no profiler, transform or dispatch mode."""
    observed = (
        platform_is_assumed()
        or torch.autograd._profiler_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
    )
    return not observed and all(_is_plain(value) for value in inputs)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return not isinstance(value, Tensor) or (type(value) in _PLAIN and value.device.type == "cpu")
