"""The projections' product: a linear map whose weight may have a 16-bit copy and a gradient sum attached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cdrmix.kernels.common.products import add_product, is_wide, mm, multiplies_on_one_thread, product_of_rows
from cdrmix.ops.backend import compute_dtype
from cdrmix.ops.weights import compute_weight, gradient_sum, is_attached, outside_graphs


def linear(x: Tensor, weight: Tensor, *, inputs_first: bool = False) -> Tensor:
    """x weight^T, or with inputs_first x weight, over the last dimension of x.

    x: [..., I]; weight: [O, I], or with inputs_first [I, O]; of one dtype, or cast to autocast's dtype.
    Returns [..., O] in the compute dtype. Differentiable in both; the same bits every time.
    If `ops.weights.attach` was called for the weight and this dtype, the product reads the attached copy, and the
    backward pass adds the weight's gradient to its `.grad` in float32 (and is then differentiable once). Then nothing
    else of the weight's size is cast, rounded or added. Otherwise it is PyTorch's own product, or, on a CPU whose
    products run on one thread (`kernels/common/products.py`), one that may use several.
    Raises RuntimeError, PyTorch's, for shapes and dtypes that do not fit together.
    """
    if torch.compiler.is_compiling() and compute_dtype(x) != weight.dtype:
        return outside_graphs(_linear, x, weight, inputs_first)
    return _linear(x, weight, inputs_first)


def _linear(x: Tensor, weight: Tensor, inputs_first: bool) -> Tensor:
    dtype = compute_dtype(x)
    y: Tensor
    if is_attached(weight, dtype):
        y = _Linear.apply(x.to(dtype), weight, inputs_first)
    elif _uses_threads(x, weight):
        y = (_ThreadedLinear.apply if torch.is_grad_enabled() else _threaded_linear)(x, weight, inputs_first)
    else:
        y = _with_few_rows(x, weight, inputs_first)
    return y


def _with_few_rows(x: Tensor, weight: Tensor, inputs_first: bool) -> Tensor:
    """PyTorch's own product; outside of training the bits of a row do not depend on the number of rows."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.dtype != weight.dtype or not x.numel():
        return x @ weight if inputs_first else functional.linear(x, weight)
    flat = x.reshape(-1, x.shape[-1])
    y = product_of_rows(flat, weight if inputs_first else weight.mT)
    return y.view(*x.shape[:-1], y.shape[-1])


def _uses_threads(x: Tensor, weight: Tensor) -> bool:
    """Whether the product may use several threads where every other product uses one."""
    if torch.compiler.is_compiling() or not multiplies_on_one_thread() or x.device.type != "cpu" or x.dim() < 2:
        return False
    same = x.dtype == weight.dtype == compute_dtype(x) == torch.float32
    return same and is_wide(x.numel() // max(1, x.shape[-1]), min(weight.shape))


def _threaded_linear(x: Tensor, weight: Tensor, inputs_first: bool) -> Tensor:
    y = mm(x.reshape(-1, x.shape[-1]), weight if inputs_first else weight.mT)
    return y.view(*x.shape[:-1], y.shape[-1])


class _ThreadedLinear(torch.autograd.Function):
    """`linear` in float32 on a CPU, by products with the same bits for any number of threads."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, inputs_first: bool) -> Tensor:
        return _threaded_linear(x, weight, inputs_first)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        x, weight, ctx.inputs_first = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        dx = _linear(dy, weight, not ctx.inputs_first) if wants_x else None
        dweight = None
        if wants_weight:
            sides = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
            left, right = sides[::-1] if ctx.inputs_first else sides
            dweight = _linear(left.mT, right, True)
        return dx, dweight, None


class _Linear(torch.autograd.Function):
    """`linear` with the weight's attached copy.

    An autograd Function and not a custom operator, which takes 60 us more of the host's time for forward and backward
    (measured); a model has hundreds of projections a micro-batch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, inputs_first: bool) -> Tensor:
        copy = compute_weight(weight, x.dtype)
        ctx.save_for_backward(x)
        # Not saved tensors: activation checkpointing would return other objects, with nothing attached.
        ctx.weight, ctx.copy, ctx.inputs_first = weight, copy, inputs_first
        return x @ copy if inputs_first else functional.linear(x, copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, copy = ctx.weight, ctx.copy
        wants_x, wants_weight, _ = ctx.needs_input_grad
        dx = dweight = None
        with torch.autocast(dy.device.type, enabled=False):
            if wants_x:
                dx = dy @ (copy.mT if ctx.inputs_first else copy)
            if wants_weight:
                sides = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
                left, right = sides[::-1] if ctx.inputs_first else sides
                total = gradient_sum(weight)
                if total is None:
                    dweight = torch.mm(left.mT, right).to(weight.dtype)
                else:
                    add_product(total, left, right)
        return dx, dweight, None
