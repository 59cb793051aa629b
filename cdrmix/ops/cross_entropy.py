"""A linear map and its cross-entropy as one PyTorch operator: checks, registration, gradients."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cdrmix.ops.backend import backend, compute_dtype, debugging, kernels_of
from cdrmix.ops.operator import operator
from cdrmix.ops.weights import compute_weight, gradient_sum

OP = "linear_cross_entropy"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SERIAL_SUM = 1 << 15  # most elements that PyTorch sums on one thread: ATen's GRAIN_SIZE


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Weighted sum of the cross-entropies of `hidden @ weight.T`, in nats, without storing all [R, V] logits.

        sum_r weights_r (lse_r - (1 - eps) l_r[target_r] - eps / V sum_v l_rv + z_loss lse_r^2),  eps = label_smoothing

    l = hidden @ weight.T and lse = logsumexp of its rows; smoothing as arXiv 1512.00567, section 7; z_loss as arXiv
    2204.02311, section 5.
    hidden: [R, D], or [S, R, D] where every set of targets has its own hidden states; weight: [V, D]. The products
        run in hidden's dtype, or autocast's, and are summed over rows in float32 at least.
    targets: int64 [R] or [S, R], each in [0, V) or ignore_index. With hidden [R, D], all sets share the logits.
    weights: the shape of the targets, floating point, not differentiated; None: ones. A target that is ignore_index or
        has weight 0 does not count. A row without a target that counts gets gradients of zero, even if its hidden state
        is infinite or NaN.
    Returns a scalar, for [S, R] targets [S]; float32, or float64 where hidden is.
    Differentiable once, in hidden and weight. The gradients are computed in the forward pass, under the assumption that
    the losses of all sets get the same gradient, and used once. A second backward pass over a kept graph, and sets
    whose losses are not just summed, compute them again: put factors of sets into `weights`. The gradients are kept for
    weights scaled to at most about 1, so float16 loses no small weights, for any later scale of the loss.
    Raises ValueError naming the argument, before anything runs. Values of the targets are checked on a CPU always, and
    on a GPU with CDRMIX_DEBUG=1 only, because reading them waits for the GPU; without, a wrong target gives NaN there.
    """
    _check(hidden, weight, targets, weights, z_loss, label_smoothing, ignore_index)
    options = float(z_loss), float(label_smoothing), ignore_index, compute_dtype(hidden)
    with_gradients = torch.is_grad_enabled()
    loss, *_ = _loss(
        hidden,
        weight,
        targets,
        None if weights is None else weights.detach(),
        *options,
        with_gradients and hidden.requires_grad,
        with_gradients and weight.requires_grad,
    )
    return loss


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    z_loss: float,
    label_smoothing: float,
    ignore_index: int,
) -> None:
    """Raises ValueError for wrong shapes, dtypes and devices; reads no value."""
    named = {"hidden": hidden, "weight": weight, "targets": targets}
    for name, x in (named | ({} if weights is None else {"weights": weights})).items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{OP}: {name} must be a torch.Tensor; found {type(x).__name__}")
        if x.device != hidden.device:
            raise ValueError(
                f"{OP}: {name} is on {x.device}, but hidden is on {hidden.device}: move them to one device"
            )
    for name, x in (("hidden", hidden), ("weight", weight)):
        if x.dtype not in DTYPES:
            raise ValueError(f"{OP}: {name} is {x.dtype}; allowed are bfloat16, float16, float32 and float64")
    if hidden.ndim not in (2, 3) or hidden.shape[-1] == 0:
        raise ValueError(f"{OP}: hidden must be [R, D] or [S, R, D] with D at least 1; found {list(hidden.shape)}")
    if weight.ndim != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{OP}: weight must be [V, D], D = {hidden.shape[-1]} as of hidden and V at least 1; "
            f"found {list(weight.shape)}"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"{OP}: targets are {targets.dtype}; they must be int64")
    shared = hidden.ndim == 2 and targets.ndim == 2 and targets.shape[1] == hidden.shape[0]
    if not (targets.shape == hidden.shape[:-1] or shared) or (targets.ndim == 2 and len(targets) == 0):
        raise ValueError(
            f"{OP}: targets must be [R] or [S, R] for hidden [R, D], and [S, R] for hidden [S, R, D], S at least 1; "
            f"found {list(targets.shape)} for {list(hidden.shape)}"
        )
    if weights is not None and (weights.shape != targets.shape or not weights.is_floating_point()):
        raise ValueError(
            f"{OP}: weights must be floating point and {list(targets.shape)} as the targets; "
            f"found {weights.dtype} {list(weights.shape)}"
        )
    for name, option in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        if not isinstance(option, int | float):
            raise ValueError(f"{OP}: {name} must be a number; found {type(option).__name__}")
    if not isinstance(ignore_index, int):
        raise ValueError(f"{OP}: ignore_index must be an integer; found {ignore_index!r}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"{OP}: label_smoothing={label_smoothing}; choose at least 0 and less than 1")
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"{OP}: z_loss={z_loss}; choose a finite factor of at least 0")


def check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raises ValueError for targets that are no token, on a CPU always and on a GPU with CDRMIX_DEBUG."""
    if targets.device.type != "cpu" and not debugging():
        return
    wrong = ((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{OP}: targets must lie in [0, {vocabulary}) or be ignore_index={ignore_index}; "
            f"found {targets[tuple(where)].item()} at {where}"
        )


def _kernels(hidden: Tensor) -> ModuleType:
    """The module whose `cross_entropy_forward` is used for these hidden states."""
    return kernels_of("cross_entropy", backend(hidden))


@operator("cdrmix::linear_cross_entropy")
def _loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    z_loss: float,
    label_smoothing: float,
    ignore_index: int,
    dtype: torch.dtype,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The losses; dhidden in the dtype of the products and dweight in float32 at least, both empty unless wanted; and
    the factor that both have to be multiplied by."""
    check_targets(targets, weight.shape[0], ignore_index)
    sets = len(targets) if hidden.ndim == targets.ndim else 1  # sets that share the logits of their rows
    rows = targets.numel() // sets
    with torch.autocast(hidden.device.type, enabled=False):  # an operator inherits autocast from its caller
        wide = torch.promote_types(dtype, torch.float32)
        unit = unit_of(weights, wide) if weights is not None else hidden.new_ones((), dtype=wide)
        losses, dhidden, dweight = _kernels(hidden).cross_entropy_forward(
            hidden.reshape(rows, hidden.shape[-1]).to(dtype).contiguous(),
            compute_weight(weight, dtype).contiguous(),
            targets.reshape(sets, rows).contiguous(),
            None if weights is None else (weights.to(wide) / unit).reshape(sets, rows).contiguous(),
            z_loss=z_loss,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            wants_hidden=wants_hidden,
            wants_weight=wants_weight,
            rounded=weight.dtype.itemsize == 2,
        )
        loss = _sum(losses.view(targets.shape)) * unit
        return loss, dhidden.view(hidden.shape if wants_hidden else 0), dweight, unit


def _sum(losses: Tensor) -> Tensor:
    """Sums over the last dimension; on a CPU by pieces that PyTorch sums on one thread, because threads change bits."""
    sums = max(1, losses[..., :1].numel())
    size = max(1, SERIAL_SUM // sums)  # elements of a piece for each sum
    if losses.device.type != "cpu" or losses.shape[-1] <= size:
        return losses.sum(-1)
    return torch.stack([piece.sum(-1) for piece in losses.split(size, -1)], -1).sum(-1)


def unit_of(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The least power of two above every weight, by which division is exact; 1 where no weight is above 0."""
    largest = weights.to(dtype).abs().amax() if weights.numel() else weights.new_zeros((), dtype=dtype)
    exponent = torch.frexp(largest).exponent
    return torch.ldexp(torch.ones_like(largest), torch.where(largest.isfinite() & (largest > 0), exponent, 0))


@_loss.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    z_loss: float,
    label_smoothing: float,
    ignore_index: int,
    dtype: torch.dtype,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    return (
        hidden.new_empty(targets.shape[:-1], dtype=wide),
        hidden.new_empty(hidden.shape if wants_hidden else 0, dtype=dtype),
        weight.new_empty(weight.shape if wants_weight else 0, dtype=wide),
        hidden.new_empty((), dtype=wide),
    )


@operator("cdrmix::linear_cross_entropy_gradients")
def _gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    z_loss: float,
    label_smoothing: float,
    ignore_index: int,
    dtype: torch.dtype,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The other results of `_loss`, by an operator without a gradient, which refuses a second derivative."""
    options = z_loss, label_smoothing, ignore_index, dtype, wants_hidden, wants_weight
    return _loss(hidden, weight, targets, weights, *options)[1:]


@_gradients.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    z_loss: float,
    label_smoothing: float,
    ignore_index: int,
    dtype: torch.dtype,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    options = z_loss, label_smoothing, ignore_index, dtype, wants_hidden, wants_weight
    return _loss(hidden, weight, targets, weights, *options)[1:]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, weights, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(hidden, weight, targets, weights)
    ctx.weight = weight  # not a saved tensor, which may be another object with nothing attached (`ops.weights`)
    ctx.made = output[1:]  # no reference cycle: outputs that are not differentiable do not refer to ctx


def _differentiate(ctx: Any, dloss: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 10
    hidden, weight, targets, weights = ctx.saved_tensors
    # The gradient of a sum is one number, expanded. Its stride shows that, without waiting for the GPU.
    factor = dloss if dloss.ndim == 0 else dloss[0] if len(dloss) == 1 or dloss.stride(0) == 0 else None
    if factor is None:
        assert dloss.ndim == 1
        ones = torch.ones_like(targets, dtype=dloss.dtype)
        weights = dloss.unsqueeze(-1) * (ones if weights is None else weights)
    made, ctx.made = ctx.made, None
    if made is None or factor is None or torch.is_grad_enabled():  # grad mode: a second derivative, which is refused
        made = _gradients(hidden, weight, targets, weights, *ctx.options)
    *gradients, unit = made
    factor = unit if factor is None else factor * unit
    total = gradient_sum(ctx.weight) if ctx.needs_input_grad[1] else None
    if total is not None:
        total.addcmul_(gradients[1], factor)
        gradients[1] = None
    dhidden, dweight = (
        _scaled(gradient, factor, x.dtype) if needed and gradient is not None else None
        for gradient, x, needed in zip(gradients, (hidden, weight), ctx.needs_input_grad, strict=False)
    )
    return dhidden, dweight, *(None,) * 8


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor, in place where the dtype allows: a second [V, D] may be larger than all else.

    The factor is in the loss's precision: rounded to bfloat16 it would scale the whole gradient by up to 0.4 %.
    """
    gradient = gradient.to(factor.dtype)
    plain = type(gradient) is Tensor and not torch.is_grad_enabled()  # a tensor that PyTorch is not tracing
    return (gradient.mul_(factor) if plain else gradient * factor).to(dtype)


_loss.register_autograd(_differentiate, setup_context=_keep)
