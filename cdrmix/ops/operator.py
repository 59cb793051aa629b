"""Custom operators of PyTorch that skip PyTorch's dispatcher in eager calls.

A call through `torch.library` takes 130 to 220 us of host time in addition to the operator's own, forward and backward
each (core-tiny's norms on a CPU, PyTorch 2.13: as long as the norm itself). On an H200 that made the host, not the GPU,
the limit of core-1b (benchmarks/LOG.md). Only tracing, profiling and function transforms need it, so an eager call runs
the same formulas in a `torch.autograd.Function`, or calls the function where no gradient is needed. The first call
through the dispatcher also imports torch.compile, which takes 1 s.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cdrmix.ops.backend import platform_is_assumed

_PLAIN = (Tensor, torch.nn.Parameter)
_EAGER_DEVICES = ("cpu", "cuda")


class Operator:
    """A custom operator; call it as the original function, with every argument.

    mutates: names of the arguments that it changes. An eager call does not raise their version counters, so none of
    them may be saved for a backward pass.
    """

    def __init__(self, name: str, function: Callable[..., Any], mutates: Sequence[str] = ()) -> None:
        self._custom = torch.library.custom_op(name, function, mutates_args=mutates)
        self._function = function
        self._leading = _tensors_before_a_list(function)
        self._differentiable: type[torch.autograd.Function] | None = None
        self.register_fake = self._custom.register_fake

    def register_autograd(self, differentiate: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """As `torch.library`'s: setup_context(ctx, inputs, output), differentiate(ctx, *gradients)."""
        self._custom.register_autograd(differentiate, setup_context=setup_context)
        function, leading = self._function, self._leading

        # Not forward and setup_context apart: PyTorch then inspects the signature, 30 us a call.
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function(*inputs)
            setup_context(ctx, inputs, output)
            if leading is None:
                return output
            return tuple(output) if leading == 0 else (*output[:leading], *output[leading])

        def backward(ctx: Any, *gradients: Any) -> Any:
            if leading is not None:  # a Function differentiates tensors, and no lists of them
                gradients = *gradients[:leading], list(gradients[leading:])
            return differentiate(ctx, *gradients)

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._differentiable = type(function.__name__, (torch.autograd.Function,), members)

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_eager(inputs):
            return self._custom(*inputs)
        if not torch.is_grad_enabled():
            return self._function(*inputs)
        if self._differentiable is None:
            return self._custom(*inputs)
        output = self._differentiable.apply(*inputs)
        return output if self._leading is None else self._nested(output)

    def _nested(self, flat: tuple[Any, ...]) -> Any:
        """What the function returns with a list, from its tensors."""
        if not self._leading:
            return list(flat)
        return *flat[: self._leading], list(flat[self._leading :])


def operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """Makes a function a custom operator of this name, which changes the arguments of these names."""
    return lambda function: Operator(name, function, mutates)


def _tensors_before_a_list(function: Callable[..., Any]) -> int | None:
    """How many tensors the function returns before a list of tensors; None if it returns no list."""
    returned = typing.get_type_hints(function)["return"]
    if returned == list[Tensor]:
        return 0
    parts = typing.get_args(returned)
    if list[Tensor] not in parts:
        return None
    assert parts.index(list[Tensor]) == len(parts) - 1, "one list, at the end"
    return len(parts) - 1


def _is_eager(inputs: tuple[Any, ...]) -> bool:
    """Whether only autograd observes the call: plain tensors on a device, no profiler, transform or dispatch mode."""
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
    return not isinstance(value, Tensor) or (type(value) in _PLAIN and value.device.type in _EAGER_DEVICES)
