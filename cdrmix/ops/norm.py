"""The residual sum and the norm that follows it as one PyTorch operator: checks, registration, gradients.

Triton and numba compute float32 and narrower dtypes, with one pass over the tensors forward and one backward. float64,
and machines without either, use `kernels/norm/reference.py` with autograd's gradients.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cdrmix.kernels.norm import reference as reference_norm
from cdrmix.kernels.norm.reference import KINDS
from cdrmix.ops.backend import backend, compute_dtype, kernels_of
from cdrmix.ops.checks import DTYPES
from cdrmix.ops.operator import operator

OP = "add_norm"
WIDEST = 16384  # most channels of the GPU's kernels, which hold a row in registers; the others have no limit


def add_norm(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    kind: str,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual stream after a branch, x + y, and its norm, which is the next branch's input; both [..., D].

    kind: "layernorm" (arXiv 1607.06450), (t - mean) / sqrt(variance + eps) weight + bias, or "rmsnorm" (arXiv
        1910.07467), t / sqrt(mean of squares + eps) weight, over t = x + y's last dimension.
    x: [..., D], bfloat16, float16, float32 or float64; there may be 0 rows. y: of x's shape, any of these dtypes, or
        None: the sum is x itself. weight, bias: [D]; an rmsnorm has no bias.
    dtype: of the norm; None: x's, or autocast's under autocast, because the norm is an operand of matrix products.
    Sum and statistics are computed in float32 at least. Returns the sum in x's dtype, and the norm of that (rounded)
    sum in `dtype`.
    Differentiable once, in x, y, weight and bias. The gradients of weight and bias are summed in an order that depends
    on shapes alone, not on the number of threads. Kept for the backward pass: the sum, and 8 bytes a row.
    Raises ValueError naming the argument whose shape, dtype or device does not fit, before anything runs.
    """
    _check(x, y, weight, bias, eps, kind, dtype)
    dtype = dtype or compute_dtype(x)
    if _plain(x):
        with torch.autocast(x.device.type, enabled=False):
            return reference_norm.add_norm(x, y, weight, bias, eps=eps, kind=kind, dtype=dtype)
    dense = [None if z is None else z.contiguous() for z in (x, y, weight, bias)]
    total, normed, _ = _add_norm(*dense, float(eps), kind == "layernorm", dtype)
    return x if y is None else total, normed


def _check(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: str,
    dtype: torch.dtype | None,
) -> None:
    """Raises ValueError for wrong shapes, dtypes and devices; reads no value."""
    if kind not in KINDS:
        raise ValueError(f"{OP}: kind={kind!r}; choose 'layernorm' or 'rmsnorm'")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"{OP}: dtype={dtype}; choose bfloat16, float16, float32 or float64, or None")
    if not eps >= 0:
        raise ValueError(f"{OP}: eps must be at least 0; found {eps}")
    if kind == "rmsnorm" and bias is not None:
        raise ValueError(f"{OP}: an rmsnorm has no bias; pass None")
    if not isinstance(x, Tensor) or x.ndim < 1 or x.shape[-1] == 0:
        found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{OP}: x must be [..., D] with D at least 1; found {found}")
    for name, z, shape in (
        ("x", x, x.shape),
        ("y", y, x.shape),
        ("weight", weight, x.shape[-1:]),
        ("bias", bias, x.shape[-1:]),
    ):
        if z is None:
            continue
        if not isinstance(z, Tensor) or z.shape != shape:
            found = list(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(f"{OP}: {name} must be {list(shape)}; found {found}")
        if z.dtype not in DTYPES or (z.dtype == torch.float64) != (x.dtype == torch.float64):
            raise ValueError(f"{OP}: {name} is {z.dtype}; allowed are bfloat16, float16, float32, or float64 for all")
        if z.device != x.device:
            raise ValueError(f"{OP}: {name} is on {z.device}, not on {x.device}: move them to one device")
    if backend(x) == "triton" and x.shape[-1] > WIDEST:
        raise ValueError(f"{OP}: x is {x.shape[-1]} wide; the GPU's kernels reach {WIDEST}")


def _plain(x: Tensor) -> bool:
    """Whether plain PyTorch is used: for one token on a CPU its few calls take less time than numba's arguments."""
    chosen = backend(x)
    few = x.numel() == x.shape[-1] or (x.ndim > 2 and x.shape[-2] == 1)
    return chosen == "reference" or (chosen == "cpu" and few and not torch.is_grad_enabled())


def _kernels(x: Tensor) -> ModuleType:
    return kernels_of("norm", backend(x))


@operator("cdrmix::add_norm")
def _add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum (empty without y), its norm, and float32 [1 or 2, rows] for the backward pass."""
    forward = _kernels(x).add_norm_forward
    if backend(x) == "triton":
        total, normed, statistics = forward(x, y, weight, bias, eps=eps, centred=centred, dtype=dtype)
        return total, normed, statistics
    total = x.new_empty(0)
    if y is not None and not x.dtype == y.dtype == torch.float32:
        total = (x.float() + y.float()).to(x.dtype)
        x, y = total, None
    shift = None if bias is None else bias.float()
    found, normed, statistics = forward(
        x.float(), y, weight.float(), shift, eps=eps, centred=centred, dtype=torch.float32
    )
    return found if y is not None else total, normed.to(dtype), statistics


@_add_norm.register_fake
def _(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0) if y is None else torch.empty_like(x)
    statistics = x.new_empty(2 if centred else 1, x.numel() // x.shape[-1], dtype=torch.float32)
    return total, torch.empty_like(x, dtype=dtype), statistics


@operator("cdrmix::add_norm_backward")
def _add_norm_backward(
    dnormed: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    statistics: Tensor,
    has_bias: bool,
    y_dtype: torch.dtype | None,
    wants_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx in total's dtype, the same in y_dtype (empty for None), and dweight and dbias, float32 [1 or 2, D]."""
    backward = _kernels(total).add_norm_backward
    options = {"has_bias": has_bias, "wants_sums": wants_sums}
    if backend(total) == "triton":
        dx, dy, sums = backward(dnormed, dtotal, total, weight, statistics, y_dtype=y_dtype, **options)
        return dx, dy, sums
    wide = None if dtotal is None else dtotal.float()
    dx, dy, sums = backward(dnormed.float(), wide, total.float(), weight.float(), statistics, y_dtype=None, **options)
    return dx.to(total.dtype), dy if y_dtype is None else dx.to(y_dtype), sums


@_add_norm_backward.register_fake
def _(
    dnormed: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    statistics: Tensor,
    has_bias: bool,
    y_dtype: torch.dtype | None,
    wants_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dy = total.new_empty(0) if y_dtype is None else torch.empty_like(total, dtype=y_dtype)
    return torch.empty_like(total), dy, total.new_empty(1 + has_bias, total.shape[-1], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, y, weight, bias, *_ = inputs
    total, normed, statistics = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(statistics)
    ctx.y_dtype = None if y is None else y.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.dtype = normed.dtype
    ctx.save_for_backward(x if y is None else total, weight, statistics)


def _differentiate(ctx: Any, dtotal: Tensor | None, dnormed: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    total, weight, statistics = ctx.saved_tensors
    dnormed = torch.zeros_like(total, dtype=ctx.dtype) if dnormed is None else dnormed.contiguous()
    dtotal = None if dtotal is None or ctx.y_dtype is None else dtotal.contiguous()
    needs_x, needs_y, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    dy_dtype = ctx.y_dtype if needs_y and ctx.y_dtype != total.dtype else None
    has_bias = ctx.bias_dtype is not None
    dx, dy, sums = _add_norm_backward(
        dnormed, dtotal, total, weight, statistics, has_bias, dy_dtype, needs_weight or needs_bias
    )
    return (
        dx if needs_x else None,
        (dx if dy_dtype is None else dy) if needs_y else None,
        sums[0].to(weight.dtype) if needs_weight else None,
        sums[1].to(ctx.bias_dtype) if needs_bias else None,
        *(None,) * 3,
    )


_add_norm.register_autograd(_differentiate, setup_context=_keep)
