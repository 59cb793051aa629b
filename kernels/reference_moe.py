"""The mixture of experts in plain PyTorch: the specification, the oracle, and the CPU path; routing and experts.

Shapes: T tokens, D model, E experts, F expert hidden, K choices a token, R = T * K routed rows.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Routing(NamedTuple):
    """Which experts each token goes to, and the order that everything after works in.

    weights_TK: float32, the chosen experts' probabilities, normalised over the k chosen; differentiable.
    experts_TK: int64, the chosen experts, most probable first.
    counts_E: int64, routed rows of each expert.
    order_R: int64, the stable sort of the T * k routes by expert: sorted row i is route order_R[i], which is
        choice order_R[i] % k of token order_R[i] // k.
    load_balance: scalar, E sum_e f_e P_e with f_e the share of routes and P_e the mean probability of expert
        e (arXiv 2101.03961, equation 4, over all k choices); 1 when balanced; differentiable through P.
    z_loss: scalar, mean of logsumexp(logits)^2 (arXiv 2202.08906, equation 5); differentiable.
    """

    weights_TK: Tensor
    experts_TK: Tensor
    counts_E: Tensor
    order_R: Tensor
    load_balance: Tensor
    z_loss: Tensor


def route_topk(logits_TE: Tensor, k: int, *, bias: Tensor | None = None) -> Routing:
    """Send each token to its k most probable experts; ties go to the lowest index.

    logits_TE: [T, E], computed on in float32 at least; bias: [E], added for the selection alone.
    """
    logits_TE = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    experts = logits_TE.shape[-1]
    log_normaliser = logits_TE.logsumexp(-1, keepdim=True)
    probabilities_TE = (logits_TE - log_normaliser).exp()
    score_TE = logits_TE.detach() if bias is None else logits_TE.detach() + bias
    experts_TK = torch.sort(score_TE, dim=-1, descending=True, stable=True).indices[:, :k]
    chosen_TK = probabilities_TE.gather(1, experts_TK)
    routes_R = experts_TK.reshape(-1)
    counts_E = torch.bincount(routes_R, minlength=experts)
    share_E = counts_E.to(logits_TE.dtype) / max(routes_R.numel(), 1)
    return Routing(
        weights_TK=chosen_TK / chosen_TK.sum(-1, keepdim=True),
        experts_TK=experts_TK,
        counts_E=counts_E,
        order_R=routes_R.argsort(stable=True),
        load_balance=experts * (share_E * probabilities_TE.mean(0)).sum(),
        z_loss=log_normaliser.square().mean(),
    )


def _activate(z: Tensor, activation: str) -> Tensor:
    """relu2: relu(z)^2. swiglu: silu(gate) * up with z = [gate, up]."""
    if activation == "relu2":
        return z.relu().square_()
    gate, up = z.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _activate_backward(z: Tensor, dh: Tensor, activation: str) -> Tensor:
    """The gradient of `_activate` with respect to z."""
    if activation == "relu2":
        return z.relu().mul_(dh).mul_(2)
    gate, up = z.chunk(2, -1)
    sigmoid = gate.sigmoid()
    return torch.cat([dh * up * sigmoid * (1 + gate * (1 - sigmoid)), dh * gate * sigmoid], -1)


class _MoeExperts(torch.autograd.Function):
    """Gather rows by expert, two products and an activation an expert, weighted sum a token; and its adjoint.

    Saved for backward: x, the pre-activation, the sorted outputs and the indices. Both the combine of the
    forward and the gather's adjoint are gathers over the inverse order, so no sum depends on scheduling.
    """

    @staticmethod
    def forward(ctx, x_TD, w_up, w_down, weights_TK, order_R, counts_E, activation):  # type: ignore[no-untyped-def]
        tokens, k = weights_TK.shape
        token_R = order_R // k
        inverse_R = torch.empty_like(order_R)
        inverse_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
        bounds = [0, *counts_E.cumsum(0).tolist()]
        rows = [slice(low, high) for low, high in itertools.pairwise(bounds)]
        x_RD = x_TD.index_select(0, token_R)
        z = x_TD.new_empty(token_R.numel(), w_up.shape[-1])
        y_RD = x_TD.new_empty(token_R.numel(), w_down.shape[-1])
        for expert, span in enumerate(rows):
            torch.mm(x_RD[span], w_up[expert], out=z[span])
            torch.mm(_activate(z[span], activation), w_down[expert], out=y_RD[span])
        weighted_RD = y_RD * weights_TK.reshape(-1)[order_R].to(y_RD.dtype).unsqueeze(-1)
        ctx.rows, ctx.activation = rows, activation
        ctx.save_for_backward(x_TD, z, y_RD, w_up, w_down, weights_TK, token_R, order_R, inverse_R)
        return weighted_RD.index_select(0, inverse_R).view(tokens, k, -1).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TD):  # type: ignore[no-untyped-def]
        x_TD, z, y_RD, w_up, w_down, weights_TK, token_R, order_R, inverse_R = ctx.saved_tensors
        tokens, k = weights_TK.shape
        dy_RD = dy_TD.index_select(0, token_R)
        dweights = (dy_RD * y_RD).sum(-1, dtype=weights_TK.dtype)[inverse_R].view(tokens, k)
        dy_RD *= weights_TK.reshape(-1)[order_R].to(dy_RD.dtype).unsqueeze(-1)
        x_RD = x_TD.index_select(0, token_R)
        dx_RD = torch.empty_like(x_RD)
        # An expert without rows gets a gradient of zero: the product over no rows writes it.
        dw_up, dw_down = torch.empty_like(w_up), torch.empty_like(w_down)
        for expert, span in enumerate(ctx.rows):
            hidden = _activate(z[span], ctx.activation)
            torch.mm(hidden.mT, dy_RD[span], out=dw_down[expert])
            dz = _activate_backward(z[span], dy_RD[span] @ w_down[expert].mT, ctx.activation)
            torch.mm(x_RD[span].mT, dz, out=dw_up[expert])
            torch.mm(dz, w_up[expert].mT, out=dx_RD[span])
        dx_TD = dx_RD.index_select(0, inverse_R).view(tokens, k, -1).sum(1)
        return dx_TD, dw_up, dw_down, dweights, None, None, None


def moe_experts(x_TD: Tensor, w_up: Tensor, w_down: Tensor, routing: Routing, *, activation: str = "relu2") -> Tensor:
    """y_t = sum_j weights_tj expert_(experts_tj)(x_t), expert_e(x) = act(x w_up_e) w_down_e: dropless.

    x_TD: [T, D]; w_up: [E, D, F], or [E, D, 2F] for "swiglu", the gate's F columns first; w_down: [E, F, D].
    Returns [T, D] in x's dtype; differentiable in x, both weights and routing.weights_TK.
    """
    return _MoeExperts.apply(x_TD, w_up, w_down, routing.weights_TK, routing.order_R, routing.counts_E, activation)
