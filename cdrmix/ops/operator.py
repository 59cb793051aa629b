"""Our operators: PyTorch's custom ones, which eager calls on a CPU reach without the dispatcher.

A call through `torch.library` takes 130 to 220 us of the host's time beside the operator's own, forward and backward
each (core-tiny's norms, PyTorch 2.13: as long as the norm itself). Nothing but tracing, profiling and transformations
needs that way, so an eager call takes a plain autograd function instead, with the same formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cdrmix.ops.backend import platform_is_assumed

_PLAIN = (Tensor, torch.nn.Parameter)


class Operator:
    """A custom operator: call it as the function it was made of."""

    def __init__(self, name: str, function: Callable[..., Any], mutates_args: tuple[str, ...]) -> None:
        self._custom = torch.library.custom_op(name, function, mutates_args=mutates_args)
        self._function, self._mutates = function, bool(mutates_args)
        self._differentiable: type[torch.autograd.Function] | None = None
        self.register_fake = self._custom.register_fake

    def register_autograd(self, differentiate: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """As `torch.library`'s: setup_context(ctx, inputs, output), differentiate(ctx, *gradients)."""
        self._custom.register_autograd(differentiate, setup_context=setup_context)
        members = {
            "forward": staticmethod(self._function),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(differentiate),
        }
        self._differentiable = type(self._function.__name__, (torch.autograd.Function,), members)

    def __call__(self, *inputs: Any) -> Any:
        if self._mutates or torch.compiler.is_compiling() or not _is_eager(inputs):
            return self._custom(*inputs)
        if not torch.is_grad_enabled():
            return self._function(*inputs)
        if self._differentiable is not None:
            return self._differentiable.apply(*inputs)
        return self._custom(*inputs)  # refuses to be differentiated


def operator(name: str, *, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """Makes a function a custom operator of this name."""
    return lambda function: Operator(name, function, mutates_args)


def _is_eager(inputs: tuple[Any, ...]) -> bool:
    """Whether nobody but autograd follows the call: tensors are plain ones on a CPU, and no mode sees operators."""
    if platform_is_assumed() or torch.autograd._profiler_enabled() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(_is_plain(value) for value in inputs)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return not isinstance(value, Tensor) or (type(value) in _PLAIN and value.device.type == "cpu")
