"""Top-k routing as a PyTorch operator: checks, registration, and the choice of implementation."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cdrmix.errors import NonFiniteLogitsError
from cdrmix.kernels.moe import reference as reference_moe
from cdrmix.kernels.moe.reference import Routing
from cdrmix.ops.backend import backend, debugging, kernels_of
from cdrmix.ops.operator import operator

MAX_EXPERTS = 256  # of the GPU's kernels; the reference has no limit
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
RoutingTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # the fields of Routing, in order


def route_topk(
    logits_TE: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    capacity: int | None = None,
    keep: Tensor | None = None,
    name: str = "",
) -> Routing:
    """Sends each token to its k most probable experts; ties go to the lowest index. It does not wait for the GPU.

    logits_TE: [T, E], computed on in float32, or in float64 if they are float64. T may be 0, as on a rank of expert
        parallelism that got no tokens; then the loss terms are zero.
    k: choices a token, 1 to E. On a GPU E is at most 256.
    bias: [E], added for the selection only (balancing without a loss, arXiv 2408.15664); it gets no gradient.
    capacity: most rows of an expert: it keeps its first ones in order of token and choice, so that no token displaces
        an earlier one, and drops the others. None: every route is kept.
    keep: bool [T]; the routes of the other tokens, the skipped ones, count for no expert and no loss, and are the last
        of the order, where dropped routes are. So all shapes stay the same. None: no token is skipped.
    name: of the layer, for errors.
    Returns a `Routing`, differentiable once in the logits through weights_TK, load_balance and z_loss.
    Raises ValueError naming the argument, before anything runs; NonFiniteLogitsError, also a ValueError, for NaN or
    infinity among the logits: on a CPU always, on a GPU with CDRMIX_DEBUG=1 only, because reading them waits for it.
    """
    _check(logits_TE, k, bias, capacity, keep)
    wide = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    selection = None if bias is None else bias.detach().to(wide.dtype).contiguous()
    if capacity is not None:
        capacity = min(capacity, logits_TE.shape[0] * k)  # no limit is larger; an operator's integers have 64 bits
    return Routing(*_moe_route(wide.contiguous(), k, selection, capacity, keep, name))


def _check(logits_TE: Tensor, k: int, bias: Tensor | None, capacity: int | None, keep: Tensor | None) -> None:
    """Raises ValueError for wrong shapes, dtypes and devices; reads no value."""
    if not isinstance(logits_TE, Tensor) or logits_TE.ndim != 2 or logits_TE.shape[1] == 0:
        found = list(logits_TE.shape) if isinstance(logits_TE, Tensor) else type(logits_TE).__name__
        raise ValueError(f"route_topk: logits must be a tensor [T, E] with E at least 1; found {found}")
    if logits_TE.dtype not in DTYPES:
        raise ValueError(f"route_topk: logits are {logits_TE.dtype}; allowed are bfloat16, float16, float32, float64")
    experts = logits_TE.shape[1]
    if type(k) is not int or not 1 <= k <= experts:
        raise ValueError(f"route_topk: k={k}, but there are {experts} experts: choose 1 to {experts}")
    if experts > MAX_EXPERTS and backend(logits_TE) == "triton":
        raise ValueError(f"route_topk: {experts} experts; the GPU's kernels take at most {MAX_EXPERTS}")
    if bias is not None and not isinstance(bias, Tensor):
        raise ValueError(f"route_topk: bias must be a torch.Tensor or None; found {type(bias).__name__}")
    if bias is not None and (bias.shape != (experts,) or not bias.is_floating_point()):
        raise ValueError(f"route_topk: bias must be [{experts}], one number an expert; found {_described(bias)}")
    if bias is not None and bias.device != logits_TE.device:
        raise ValueError(f"route_topk: bias is on {bias.device}, but the logits are on {logits_TE.device}")
    if capacity is not None and (type(capacity) is not int or capacity < 0):
        raise ValueError(f"route_topk: capacity={capacity}; it is the most rows of an expert: 0 or more, or None")
    if keep is not None and not isinstance(keep, Tensor):
        raise ValueError(f"route_topk: keep must be a torch.Tensor or None; found {type(keep).__name__}")
    if keep is not None and (keep.shape != logits_TE.shape[:1] or keep.dtype != torch.bool):
        raise ValueError(
            f"route_topk: keep must be bool [{len(logits_TE)}], one for each token; found {_described(keep)}"
        )
    if keep is not None and keep.device != logits_TE.device:
        raise ValueError(f"route_topk: keep is on {keep.device}, but the logits are on {logits_TE.device}")


def _described(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"


def _check_logits(logits_TE: Tensor, name: str) -> None:
    """Raises NonFiniteLogitsError for NaN and infinity, on a CPU always and on a GPU with CDRMIX_DEBUG."""
    if logits_TE.device.type != "cpu" and not debugging():
        return
    bad_T = ~logits_TE.isfinite().all(-1)
    if bool(bad_T.any()):
        tokens = bad_T.nonzero().flatten().tolist()
        raise NonFiniteLogitsError(
            f"route_topk: the router's logits{f' of {name}' if name else ''} hold NaN or infinity, for "
            f"{len(tokens)} of {len(bad_T)} tokens, first token {tokens[0]}: look for such values in the "
            "router's input and weights"
        )


def _kernels(logits_TE: Tensor) -> ModuleType:
    """The module whose `route_forward` and `route_backward` are used for these logits."""
    return kernels_of("moe", "triton_route") if backend(logits_TE) == "triton" else reference_moe


@operator("cdrmix::moe_route")
def _moe_route(
    logits_TE: Tensor, k: int, bias: Tensor | None, capacity: int | None, keep_T: Tensor | None, name: str
) -> RoutingTensors:
    _check_logits(logits_TE, name)
    with torch.autocast(logits_TE.device.type, enabled=False):  # an operator inherits autocast from its caller
        result: RoutingTensors = _kernels(logits_TE).route_forward(logits_TE, k, bias, capacity, keep_T)
    return result


@_moe_route.register_fake
def _(
    logits_TE: Tensor, k: int, bias: Tensor | None, capacity: int | None, keep_T: Tensor | None, name: str
) -> RoutingTensors:
    tokens, experts = logits_TE.shape

    def indices(*shape: int) -> Tensor:
        return logits_TE.new_empty(shape, dtype=torch.int64)

    return (
        logits_TE.new_empty(tokens, k),
        indices(tokens, k),
        indices(experts),
        indices(experts),
        indices(tokens * k),
        logits_TE.new_empty(()),
        logits_TE.new_empty(()),
    )


@operator("cdrmix::moe_route_backward")
def _moe_route_backward(
    dweights_TK: Tensor | None,
    dload_balance: Tensor | None,
    dz_loss: Tensor | None,
    logits_TE: Tensor,
    experts_TK: Tensor,
    tokens_per_expert_E: Tensor,
    keep_T: Tensor | None,
) -> Tensor:
    gradients = [None if dy is None else dy.contiguous() for dy in (dweights_TK, dload_balance, dz_loss)]
    with torch.autocast(logits_TE.device.type, enabled=False):
        dlogits_TE: Tensor = _kernels(logits_TE).route_backward(
            *gradients, logits_TE, experts_TK, tokens_per_expert_E, experts_TK.shape[1], keep_T
        )
    return dlogits_TE


@_moe_route_backward.register_fake
def _(
    dweights_TK: Tensor | None,
    dload_balance: Tensor | None,
    dz_loss: Tensor | None,
    logits_TE: Tensor,
    experts_TK: Tensor,
    tokens_per_expert_E: Tensor,
    keep_T: Tensor | None,
) -> Tensor:
    return torch.empty_like(logits_TE)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: RoutingTensors) -> None:
    _, experts_TK, counts_E, tokens_per_expert_E, order_R, _, _ = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(experts_TK, counts_E, tokens_per_expert_E, order_R)
    ctx.save_for_backward(inputs[0], experts_TK, tokens_per_expert_E, inputs[4])


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    dweights_TK, *_, dload_balance, dz_loss = gradients
    logits_TE, experts_TK, tokens_per_expert_E, keep_T = ctx.saved_tensors
    dlogits_TE = None
    if any(dy is not None for dy in (dweights_TK, dload_balance, dz_loss)):
        dlogits_TE = _moe_route_backward(
            dweights_TK, dload_balance, dz_loss, logits_TE, experts_TK, tokens_per_expert_E, keep_T
        )
    return dlogits_TE, None, None, None, None, None


_moe_route.register_autograd(_differentiate, setup_context=_keep)
