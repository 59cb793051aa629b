"""What an engine attaches to float32 weights for 16-bit products: a copy, and permission to add up the gradient.

Autocast casts a weight for every product, casts its rounded gradient back, and adds it to `.grad`: 24 bytes of memory
traffic a weight and micro-batch. A copy in the products' dtype, made again once an update, and a product that adds its
float32 accumulators to `.grad` itself, need only the 8 bytes of that sum.

The float32 weight stays the one that is trained, saved and averaged. The attachment is a Python attribute of the
parameter, so it is in no state_dict, and a deepcopy of the parameter does not have it. A graph of torch.compile does
not see it either, so products that may use it run between graphs (`outside_graphs`). An operator uses `compute_weight`
and `gradient_sum` where it has the formula of the weight's gradient, because the result of `compute_weight` has no
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_ATTRIBUTE = "_cdrmix_compute_weight"
_REASON = "a weight's copy and the sum of its gradients are not in a graph"
_between_graphs: list[Callable[..., Tensor]] = []  # `_call`, excluded from torch.compile; empty before `attach`


class _Attached:
    """copy: the weight in `dtype`, taken at `version`; None until a product needs it."""

    __slots__ = ("adds", "copy", "dtype", "version")

    def __init__(self, dtype: torch.dtype, adds: bool) -> None:
        self.dtype, self.adds = dtype, adds
        self.copy: Tensor | None = None
        self.version = -1


def attach(weights: Iterable[Tensor], dtype: torch.dtype, *, add_gradients: bool) -> None:
    """Lets products of these float32 weights in `dtype` keep a copy of them and, with add_gradients, add up `.grad`.

    A weight's copy is made at its first product, so weights without products cost nothing. Call `refresh` whenever the
    weights have changed; changes through `.data` do not change their versions. add_gradients: must be False where hooks
    wait for a weight's gradient, as those of DeepSpeed's ZeRO do. With it only `.backward()` gives gradients, not
    `torch.autograd.grad`.
    """
    if not _between_graphs:  # only here, because it loads torch.compile, which takes 1.5 s
        _between_graphs.append(torch.compiler.disable(_call, reason=_REASON))
    for weight in weights:
        assert weight.dtype == torch.float32
        setattr(weight, _ATTRIBUTE, _Attached(dtype, add_gradients))


@torch.no_grad()
def refresh(weights: Iterable[Tensor]) -> None:
    """Copies the weights, rounded, to their attached copies; does nothing for weights without one."""
    for weight in weights:
        attached = _attached(weight)
        if attached is not None and attached.copy is not None:
            attached.copy.copy_(weight)
            attached.version = weight._version


def is_attached(weight: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether `attach` was called for a weight, and for products in this dtype if one is given."""
    attached = _attached(weight)
    return attached is not None and dtype in (None, attached.dtype)


def copies(weights: Iterable[Tensor]) -> list[Tensor]:
    """All attached copies."""
    attached = (_attached(weight) for weight in weights)
    return [found.copy for found in attached if found is not None and found.copy is not None]


@torch.no_grad()
def compute_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, without a gradient: the attached copy if there is one, else the weight cast.

    Do not change the result in place: if dtype is the weight's own, it is the weight itself.
    """
    attached = _attached(weight)
    if attached is None or attached.dtype != dtype:
        return weight.detach().to(dtype)
    if attached.copy is None:
        attached.copy, attached.version = weight.detach().to(dtype), weight._version
    assert attached.version == weight._version, "a weight was changed and its copy not refreshed"
    return attached.copy


def gradient_sum(weight: Tensor) -> Tensor | None:
    """The tensor to which a backward pass must ADD the weight's gradient: float32, of its shape; then it returns None.

    None if the gradient is to be returned as usual.
    weight: the parameter itself, kept on autograd's ctx and not in its saved tensors, because activation checkpointing
        returns other objects, with nothing attached.
    The result is `.grad`, set to zeros where it was None. Call it where the gradient is added, so that a weight which a
    step does not use has no gradient. The zeros cost two more passes over the weights in an update of many
    micro-batches, and give all operators the same rule.
    """
    attached = _attached(weight)
    if attached is None or not attached.adds or not weight.requires_grad or torch.is_grad_enabled():
        return None  # grad mode: a second derivative is wanted
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def outside_graphs(operator: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Calls the operator; after `attach` torch.compile does not trace it.

    One graph ends here and another begins. With fullgraph=True, torch.compile raises its Unsupported with the reason.
    """
    return (_between_graphs[0] if _between_graphs else _call)(operator, *arguments)


def _call(operator: Callable[..., Tensor], *arguments: object) -> Tensor:
    return operator(*arguments)


def _attached(weight: Tensor) -> _Attached | None:
    if torch.compiler.is_compiling():
        return None
    attached: _Attached | None = getattr(weight, _ATTRIBUTE, None)
    return attached
