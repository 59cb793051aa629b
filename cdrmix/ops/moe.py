"""The routed experts as PyTorch operators, with dispatch and combination: checks, registration, choice of kernels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cdrmix.kernels.moe.reference import ACTIVATIONS, Routing
from cdrmix.ops.backend import backend, compute_dtype, debugging, kernels_of
from cdrmix.ops.operator import operator
from cdrmix.ops.routing import DTYPES
from cdrmix.ops.weights import compute_weight, gradient_sum, is_attached, outside_graphs


def moe_experts(
    x_TD: Tensor, w_up: Tensor, w_down: Tensor, routing: Routing, *, activation: str = "relu2", recompute: bool = False
) -> Tensor:
    """y_t = sum_j weights_tj expert_(experts_tj)(x_t), with expert_e(x) = act(x w_up_e) w_down_e.

    x_TD: [T, D]; T may be 0, as on a rank of expert parallelism that got no tokens: then y is empty, and the weights
        get gradients of zero.
    w_up: [E, D, F]; for "swiglu" [E, D, 2F], interleaved: column 2f is the gate of hidden f, column 2f + 1 its up.
    w_down: [E, F, D]. All of bfloat16, float16, float32 or float64; under autocast they are cast to its dtype.
    routing: the result of `route_topk` for these T tokens and E experts. Dropped routes add nothing.
    activation: "relu2", relu(z)^2, or "swiglu", silu(gate) * up.
    recompute: False keeps Z = x w_up for the backward pass, R rows of F or 2F; True computes it again there, with the
        same bits. In bfloat16 a token keeps 2D bytes (x), and with False 2kF (relu2) or 4kF (swiglu) bytes of Z.
    Returns [T, D] in the compute dtype. Differentiable once, in x, both weights and routing.weights_TK; an expert
    without rows has gradients of zero. The same bits every time.
    Raises ValueError naming the argument, before anything runs. Indices of the Routing that are out of range are found
    on a CPU always, on a GPU with CDRMIX_DEBUG=1 only.
    """
    if torch.compiler.is_compiling() and compute_dtype(x_TD) != w_up.dtype:
        return outside_graphs(_experts, x_TD, w_up, w_down, routing, activation, recompute)
    return _experts(x_TD, w_up, w_down, routing, activation, recompute)


def _experts(x_TD: Tensor, w_up: Tensor, w_down: Tensor, routing: Routing, activation: str, recompute: bool) -> Tensor:
    _check_experts(x_TD, w_up, w_down, routing, activation, recompute)
    tensors = (x_TD, w_up, w_down, routing.weights_TK)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        recompute = True  # there is no backward pass: nothing is kept
    dtype = compute_dtype(x_TD)
    weights_TK = routing.weights_TK if dtype == torch.float64 else routing.weights_TK.float()
    indices = (routing.experts_TK, routing.order_R.contiguous(), routing.counts_E.contiguous())
    others = (weights_TK.contiguous(), *indices, activation, recompute)
    if is_attached(w_up) or is_attached(w_down):
        attached: Tensor = _AttachedExperts.apply(w_up, w_down, x_TD.to(dtype).contiguous(), *others)
        return attached
    y_TD, _ = _moe_experts(*(x.to(dtype).contiguous() for x in tensors[:3]), *others)
    return y_TD


def moe_dispatch(x_TD: Tensor, routing: Routing) -> Tensor:
    """x_RD: each route's row of x [T, D], sorted by expert; zeros for dropped routes. Differentiable: `moe_combine`.

    The rows of expert e, routing.counts_E[e] of them, follow those of the experts before it.
    """
    _check_routing("moe_dispatch", routing)
    _check_rows("moe_dispatch", x_TD, routing, routing.experts_TK.shape[0], "T")
    return _moe_dispatch(x_TD.contiguous(), routing.order_R, routing.counts_E, routing.experts_TK.shape[1])


def moe_combine(y_RD: Tensor, routing: Routing) -> Tensor:
    """y_TD: the sum of each token's kept rows of y [R, D], in order of choice, in float32, without weights.

    The adjoint of `moe_dispatch`, and differentiable by it: combine(dispatch(x)) = k x where no route is dropped.
    """
    _check_routing("moe_combine", routing)
    _check_rows("moe_combine", y_RD, routing, len(routing.order_R), "R = T * k")
    return _moe_combine(y_RD.contiguous(), routing.order_R, routing.counts_E, routing.experts_TK.shape[1])


def moe_product(x_RD: Tensor, w_EDF: Tensor, routing: Routing) -> Tensor:
    """y_RF: each sorted row of x times the matrix of its expert; zeros for dropped routes.

    x_RD: rows in the order of `moe_dispatch`, [R, D]; w_EDF: [E, D, F]. Both bfloat16, float16, float32 or float64;
    under autocast they are cast to its dtype. With dispatch and combination it is a linear layer of experts. Because it
    is linear, the routes' weights may be applied to its input rows.
    Returns [R, F] in the compute dtype. Differentiable once, in x and w; an expert without rows has a gradient of zero.
    The same bits every time. Raises ValueError naming the argument, before anything runs.
    """
    if torch.compiler.is_compiling() and compute_dtype(x_RD) != w_EDF.dtype:
        return outside_graphs(_product, x_RD, w_EDF, routing)
    return _product(x_RD, w_EDF, routing)


def _product(x_RD: Tensor, w_EDF: Tensor, routing: Routing) -> Tensor:
    _check_routing("moe_product", routing)
    _check_rows("moe_product", x_RD, routing, len(routing.order_R), "R = T * k")
    experts, width = len(routing.counts_E), x_RD.shape[1]
    if not isinstance(w_EDF, Tensor) or w_EDF.dtype not in DTYPES:
        found = str(w_EDF.dtype) if isinstance(w_EDF, Tensor) else type(w_EDF).__name__
        raise ValueError(f"moe_product: w_EDF must be bfloat16, float16, float32 or float64; found {found}")
    if w_EDF.ndim != 3 or w_EDF.shape[:2] != (experts, width) or 0 in w_EDF.shape:
        raise ValueError(f"moe_product: w_EDF must be [E, D, F] = [{experts}, {width}, F]; found {list(w_EDF.shape)}")
    dtype = compute_dtype(x_RD)
    if compute_dtype(w_EDF) != dtype or w_EDF.device != x_RD.device:
        found = f"w_EDF is {w_EDF.dtype} on {w_EDF.device}, x {x_RD.dtype} on {x_RD.device}"
        raise ValueError(f"moe_product: {found}: one device and one dtype, or autocast")
    rows, counts_E = x_RD.to(dtype).contiguous(), routing.counts_E.contiguous()
    if is_attached(w_EDF):
        attached: Tensor = _AttachedProduct.apply(w_EDF, rows, counts_E)
        return attached
    return _moe_product(rows, w_EDF.to(dtype).contiguous(), counts_E)


def _check_routing(op: str, routing: Routing) -> None:
    if not isinstance(routing, Routing):
        raise ValueError(f"{op}: routing must be what route_topk gives; found {type(routing).__name__}")


def _check_rows(op: str, rows: Tensor, routing: Routing, count: int, meaning: str) -> None:
    if not isinstance(rows, Tensor):
        raise ValueError(f"{op}: the rows must be a torch.Tensor; found {type(rows).__name__}")
    if rows.ndim != 2 or len(rows) != count:
        raise ValueError(f"{op}: this routing has {meaning} = {count} rows, D wide; found {list(rows.shape)}")
    if rows.dtype not in DTYPES:
        raise ValueError(f"{op}: rows are {rows.dtype}; allowed are bfloat16, float16, float32 and float64")
    if rows.device != routing.order_R.device:
        raise ValueError(f"{op}: the rows are on {rows.device}, but the routing is on {routing.order_R.device}")


def _check_experts(
    x_TD: Tensor, w_up: Tensor, w_down: Tensor, routing: Routing, activation: str, recompute: bool
) -> None:
    """Raises ValueError for wrong shapes, dtypes and devices; reads no value."""
    _check_routing("moe_experts", routing)
    if activation not in ACTIVATIONS:
        raise ValueError(f"moe_experts: activation={activation!r}; choose 'relu2' or 'swiglu'")
    if not isinstance(recompute, bool):
        raise ValueError(f"moe_experts: recompute must be True or False; found {recompute!r}")
    for name, x, sizes in (("x", x_TD, "T, D"), ("w_up", w_up, "E, D, F or 2F"), ("w_down", w_down, "E, F, D")):
        if not isinstance(x, Tensor):
            raise ValueError(f"moe_experts: {name} must be a torch.Tensor; found {type(x).__name__}")
        if x.ndim != sizes.count(",") + 1 or 0 in x.shape[name == "x" :]:
            raise ValueError(f"moe_experts: {name} must be [{sizes}]; found {list(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"moe_experts: {name} is {x.dtype}; allowed are bfloat16, float16, float32 and float64")
        if x.dtype != x_TD.dtype and compute_dtype(x) != compute_dtype(x_TD):
            raise ValueError(f"moe_experts: {name} is {x.dtype}, but x is {x_TD.dtype}: one dtype, or autocast")
        if x.device != x_TD.device:
            raise ValueError(
                f"moe_experts: {name} is on {x.device}, but x is on {x_TD.device}: move them to one device"
            )
    tokens, width = x_TD.shape
    experts, hidden, _ = w_down.shape
    wanted = (experts, width, hidden * (2 if activation == "swiglu" else 1))
    if w_up.shape != wanted or w_down.shape[2] != width:
        raise ValueError(
            f"moe_experts: w_up is {list(w_up.shape)} and w_down {list(w_down.shape)}, but with x {list(x_TD.shape)} "
            f"and {activation} w_up must be [E, {width}, {'2F' if activation == 'swiglu' else 'F'}] and w_down "
            f"[E, F, {width}]"
        )
    chosen = routing.weights_TK.shape
    if routing.experts_TK.shape != chosen or chosen[0] != tokens or len(routing.order_R) != chosen.numel():
        raise ValueError(
            f"moe_experts: x has {tokens} tokens, but the routing's weights are {list(chosen)}, its experts "
            f"{list(routing.experts_TK.shape)}, its order {list(routing.order_R.shape)}: route these tokens"
        )
    if routing.counts_E.shape != (experts,):
        raise ValueError(f"moe_experts: there are {experts} experts, but the routing is for {routing.counts_E.numel()}")
    for name in ("weights_TK", "experts_TK", "counts_E", "order_R"):
        x = getattr(routing, name)
        if x.device != x_TD.device:
            raise ValueError(f"moe_experts: routing.{name} is on {x.device}, but x is on {x_TD.device}")
        if (x.dtype != torch.int64) if name != "weights_TK" else (not x.is_floating_point()):
            raise ValueError(f"moe_experts: routing.{name} is {x.dtype}; route_topk gives int64 (weights float32)")


def _check_indices(experts_TK: Tensor, order_R: Tensor, counts_E: Tensor) -> None:
    """Raises ValueError for indices out of range, on a CPU always and on a GPU with CDRMIX_DEBUG."""
    if (order_R.device.type != "cpu" and not debugging()) or not len(order_R):
        return
    for name, x, bound in (("experts_TK", experts_TK, len(counts_E)), ("order_R", order_R, len(order_R))):
        low, high = (int(value) for value in x.aminmax())
        if low < 0 or high >= bound:
            raise ValueError(f"moe_experts: routing.{name} must be within 0 to {bound - 1}; found {low} to {high}")
    _check_counts("moe_experts", counts_E, len(order_R))


def _check_counts(op: str, counts_E: Tensor, routes: int) -> None:
    """Raises ValueError for impossible counts, on a CPU always and on a GPU with CDRMIX_DEBUG."""
    if counts_E.dtype != torch.int64:
        raise ValueError(f"{op}: routing.counts_E is {counts_E.dtype}; route_topk gives int64")
    if counts_E.device.type != "cpu" and not debugging():
        return
    if int(counts_E.min()) < 0 or int(counts_E.sum()) > routes:
        raise ValueError(
            f"{op}: routing.counts_E must be 0 or more and sum to at most {routes} routes; found {counts_E.tolist()}"
        )


def _kernels(x: Tensor) -> ModuleType:
    """The module whose `experts_forward`, `experts_backward`, `dispatch` and `combine` are used for these tensors."""
    return kernels_of("moe", backend(x))


@operator("cdrmix::moe_experts")
def _moe_experts(
    x_TD: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    order_R: Tensor,
    counts_E: Tensor,
    activation: str,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """y, and Z, empty if `recompute`. Only the checks read experts_TK."""
    _check_indices(experts_TK, order_R, counts_E)
    with torch.autocast(x_TD.device.type, enabled=False):  # an operator inherits autocast from its caller
        result: tuple[Tensor, Tensor] = _kernels(x_TD).experts_forward(
            x_TD, w_up, w_down, weights_TK, order_R, counts_E, activation=activation, recompute=recompute
        )
    return result


@_moe_experts.register_fake
def _(
    x_TD: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    order_R: Tensor,
    counts_E: Tensor,
    activation: str,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    saved = x_TD.new_empty((len(order_R), w_up.shape[2]) if not recompute else 0)
    return torch.empty_like(x_TD), saved


@operator("cdrmix::moe_experts_backward", mutates=("up_sum", "down_sum"))
def _moe_experts_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    weights_TK: Tensor,
    order_R: Tensor,
    counts_E: Tensor,
    z: Tensor,
    activation: str,
    recompute: bool,
    up_sum: Tensor | None,
    down_sum: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, w_up, w_down and weights_TK; that of a weight with a sum is added there, and empty."""
    with torch.autocast(x_TD.device.type, enabled=False):
        gradients: tuple[Tensor, Tensor, Tensor, Tensor] = _kernels(x_TD).experts_backward(
            *(dy_TD, x_TD, w_up, w_down, weights_TK, order_R, counts_E, z, up_sum, down_sum),
            activation=activation,
            recompute=recompute,
        )
    return gradients


@_moe_experts_backward.register_fake
def _(
    dy_TD: Tensor,
    x_TD: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    weights_TK: Tensor,
    order_R: Tensor,
    counts_E: Tensor,
    z: Tensor,
    activation: str,
    recompute: bool,
    up_sum: Tensor | None,
    down_sum: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dw_up, dw_down = _gradient_like(w_up, up_sum), _gradient_like(w_down, down_sum)
    return torch.empty_like(x_TD), dw_up, dw_down, torch.empty_like(weights_TK)


def _gradient_like(weight: Tensor, total: Tensor | None) -> Tensor:
    return torch.empty_like(weight) if total is None else weight.new_empty(0)


def _keep_experts(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_TD, w_up, w_down, weights_TK, _, order_R, counts_E, ctx.activation, ctx.recompute = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_TD, w_up, w_down, weights_TK, order_R, counts_E, output[1])


def _differentiate_experts(ctx: Any, dy_TD: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    if dy_TD is None:
        return (None,) * 9
    gradients = _moe_experts_backward(dy_TD.contiguous(), *ctx.saved_tensors, ctx.activation, ctx.recompute, None, None)
    wanted = [dx if needed else None for dx, needed in zip(gradients, ctx.needs_input_grad, strict=False)]
    return *wanted, None, None, None, None, None


_moe_experts.register_autograd(_differentiate_experts, setup_context=_keep_experts)


class _AttachedExperts(torch.autograd.Function):
    """`_moe_experts` for weights with something attached (weights.py): it uses their copies and gradient sums."""

    @staticmethod
    def forward(ctx: Any, w_up: Tensor, w_down: Tensor, x_TD: Tensor, *others: Any) -> Tensor:
        """w_up, w_down: the weights themselves; x_TD in the compute dtype; others: the operator's other arguments."""
        copies = compute_weight(w_up, x_TD.dtype), compute_weight(w_down, x_TD.dtype)
        y_TD, z = _moe_experts(x_TD, *copies, *others)
        weights_TK, _, order_R, counts_E, ctx.activation, ctx.recompute = others
        ctx.weights = w_up, w_down
        ctx.save_for_backward(x_TD, *copies, weights_TK, order_R, counts_E, z)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        sums = [gradient_sum(weight) for weight in ctx.weights]
        dx_TD, dw_up, dw_down, dweights_TK = _moe_experts_backward(
            dy_TD.contiguous(), *ctx.saved_tensors, ctx.activation, ctx.recompute, *sums
        )
        gradients = (
            dw_up if sums[0] is None else None,
            dw_down if sums[1] is None else None,
            dx_TD,
            dweights_TK,
            *(None,) * 5,
        )
        return tuple(dx if needed else None for dx, needed in zip(gradients, ctx.needs_input_grad, strict=True))


@operator("cdrmix::moe_dispatch")
def _moe_dispatch(x_TD: Tensor, order_R: Tensor, counts_E: Tensor, k: int) -> Tensor:
    x_RD: Tensor = _kernels(x_TD).dispatch(x_TD, order_R, counts_E, k)
    return x_RD


@_moe_dispatch.register_fake
def _(x_TD: Tensor, order_R: Tensor, counts_E: Tensor, k: int) -> Tensor:
    return x_TD.new_empty(len(order_R), x_TD.shape[1])


@operator("cdrmix::moe_combine")
def _moe_combine(y_RD: Tensor, order_R: Tensor, counts_E: Tensor, k: int) -> Tensor:
    y_TD: Tensor = _kernels(y_RD).combine(y_RD, order_R, counts_E, k)
    return y_TD


@_moe_combine.register_fake
def _(y_RD: Tensor, order_R: Tensor, counts_E: Tensor, k: int) -> Tensor:
    return y_RD.new_empty(len(order_R) // k, y_RD.shape[1])


def _keep_order(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order_R, counts_E, ctx.k = inputs
    ctx.save_for_backward(order_R, counts_E)


def _differentiate_dispatch(ctx: Any, dx_RD: Tensor) -> tuple[Tensor | None, ...]:
    return _moe_combine(dx_RD.contiguous(), *ctx.saved_tensors, ctx.k), None, None, None


def _differentiate_combine(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    return _moe_dispatch(dy_TD.contiguous(), *ctx.saved_tensors, ctx.k), None, None, None


_moe_dispatch.register_autograd(_differentiate_dispatch, setup_context=_keep_order)
_moe_combine.register_autograd(_differentiate_combine, setup_context=_keep_order)


@operator("cdrmix::moe_product")
def _moe_product(x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Tensor:
    _check_counts("moe_product", counts_E, len(x_RD))
    with torch.autocast(x_RD.device.type, enabled=False):
        y_RF: Tensor = _kernels(x_RD).product_forward(x_RD, w_EDF, counts_E)
    return y_RF


@_moe_product.register_fake
def _(x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Tensor:
    return x_RD.new_empty(len(x_RD), w_EDF.shape[2])


@operator("cdrmix::moe_product_backward", mutates=("w_sum",))
def _moe_product_backward(
    dy_RF: Tensor, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor, w_sum: Tensor | None
) -> tuple[Tensor, Tensor]:
    with torch.autocast(x_RD.device.type, enabled=False):
        gradients: tuple[Tensor, Tensor] = _kernels(x_RD).product_backward(dy_RF, x_RD, w_EDF, counts_E, w_sum)
    return gradients


@_moe_product_backward.register_fake
def _(dy_RF: Tensor, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor, w_sum: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_RD), _gradient_like(w_EDF, w_sum)


def _keep_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_product(ctx: Any, dy_RF: Tensor) -> tuple[Tensor | None, ...]:
    dx_RD, dw_EDF = _moe_product_backward(dy_RF.contiguous(), *ctx.saved_tensors, None)
    return dx_RD if ctx.needs_input_grad[0] else None, dw_EDF if ctx.needs_input_grad[1] else None, None


_moe_product.register_autograd(_differentiate_product, setup_context=_keep_product)


class _AttachedProduct(torch.autograd.Function):
    """`_moe_product` for a weight with something attached, as in `_AttachedExperts`."""

    @staticmethod
    def forward(ctx: Any, w_EDF: Tensor, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        copy = compute_weight(w_EDF, x_RD.dtype)
        ctx.weight = w_EDF
        ctx.save_for_backward(x_RD, copy, counts_E)
        y_RF: Tensor = _moe_product(x_RD, copy, counts_E)
        return y_RF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RF: Tensor) -> tuple[Tensor | None, ...]:
        total = gradient_sum(ctx.weight)
        dx_RD, dw_EDF = _moe_product_backward(dy_RF.contiguous(), *ctx.saved_tensors, total)
        gradients = (dw_EDF if total is None else None, dx_RD, None)
        return tuple(dx if needed else None for dx, needed in zip(gradients, ctx.needs_input_grad, strict=True))
