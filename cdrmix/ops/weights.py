"""What an engine attaches to float32 weights for 16-bit products: a copy, and leave to add up the gradient.

Autocast casts a weight for every product, and casts its rounded gradient back and adds it to `.grad`: 24 bytes of
memory traffic a weight and micro-batch. A copy in the products' dtype, made anew once an update, and a product that
adds its float32 accumulators to `.grad` by itself, leave the 8 bytes of that sum.

The float32 weight stays the truth: it alone is trained, saved and averaged. What is attached lies in a Python attribute
of the parameter, so it is in no state_dict, and a deepcopy of the parameter has none of it. A graph of torch.compile
does not see it either, so products that may use it run between graphs (`outside_graphs`). An operator uses
`compute_weight` and `gradient_sum` where the weight's own gradient formula is at hand, since what the former gives has
no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_ATTRIBUTE = "_cdrmix_compute_weight"
_REASON = "a weight's copy and the sum of its gradients are not in a graph"
_between_graphs: list[Callable[..., Tensor]] = []  # `_call` as torch.compile leaves it alone; none before `attach`


class _Attached:
    """copy: in `dtype`, of the weight as it was at `version`; None until the first product asks for it."""

    __slots__ = ("adds", "copy", "dtype", "version")

    def __init__(self, dtype: torch.dtype, adds: bool) -> None:
        self.dtype, self.adds = dtype, adds
        self.copy: Tensor | None = None
        self.version = -1


def attach(weights: Iterable[Tensor], dtype: torch.dtype, *, add_gradients: bool) -> None:
    """Lets products of these float32 weights in `dtype` keep a copy of them, and with add_gradients add up `.grad`.

    Copies come into being at a weight's first product, so weights without any cost nothing. Call `refresh` whenever
    the weights have changed, also through `.data`, which their versions do not tell. add_gradients: not where hooks
    wait for a weight's gradient, as those of DeepSpeed's ZeRO; and `.backward()` alone gives gradients then, not
    `torch.autograd.grad`.
    """
    if not _between_graphs:  # not before: it loads torch.compile, which takes 1.5 s
        _between_graphs.append(torch.compiler.disable(_call, reason=_REASON))
    for weight in weights:
        assert weight.dtype == torch.float32
        setattr(weight, _ATTRIBUTE, _Attached(dtype, add_gradients))


@torch.no_grad()
def refresh(weights: Iterable[Tensor]) -> None:
    """Makes the attached copies equal to their weights again, rounded; for weights without one it does nothing."""
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
    """The attached copies that there are."""
    attached = (_attached(weight) for weight in weights)
    return [found.copy for found in attached if found is not None and found.copy is not None]


@torch.no_grad()
def compute_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, without a gradient: the attached copy where there is one, else the weight cast.

    Not to be changed in place: where dtype is the weight's own it is the weight itself.
    """
    attached = _attached(weight)
    if attached is None or attached.dtype != dtype:
        return weight.detach().to(dtype)
    if attached.copy is None:
        attached.copy, attached.version = weight.detach().to(dtype), weight._version
    assert attached.version == weight._version, "a weight was changed and its copy not refreshed"
    return attached.copy


def gradient_sum(weight: Tensor) -> Tensor | None:
    """Where a backward pass shall ADD the weight's gradient by itself, and return None for it: float32, of its shape.

    None where the gradient is to be returned as usual.
    weight: the parameter itself, kept on autograd's ctx and not in its saved tensors, of which activation checkpointing
        gives back others with nothing attached.
    The sum is `.grad`, and zeros where that was None: ask at the place that adds, so that a weight which a step does
    not use has no gradient. Zeros cost two more passes over the weights in an update of many micro-batches, and keep
    one meaning for every operator.
    """
    attached = _attached(weight)
    if attached is None or not attached.adds or not weight.requires_grad or torch.is_grad_enabled():
        return None  # the last: a second derivative is wanted
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def outside_graphs(operator: Callable[..., Tensor], *arguments: object) -> Tensor:
    """The operator's result, which torch.compile does not look into once `attach` was called.

    It ends a graph here and begins another. With fullgraph=True, torch.compile raises its Unsupported with the reason.
    """
    return (_between_graphs[0] if _between_graphs else _call)(operator, *arguments)


def _call(operator: Callable[..., Tensor], *arguments: object) -> Tensor:
    return operator(*arguments)


def _attached(weight: Tensor) -> _Attached | None:
    if torch.compiler.is_compiling():
        return None
    attached: _Attached | None = getattr(weight, _ATTRIBUTE, None)
    return attached
