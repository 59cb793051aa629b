"""The mixture of experts in plain PyTorch, routing and experts: specification, oracle, and the path without kernels.

Shapes: T tokens, D model, E experts, F expert hidden, K choices a token, R = T * K routes, Z = F ("relu2") or 2F
("swiglu"). Functions come in pairs, forward and backward, without autograd; `cdrmix.ops` registers them.

The routes of one expert are consecutive rows, so each of its matrices takes one dense product. Where PyTorch has a
grouped product (CUDA, bfloat16, rows of a multiple of 16 bytes), `_grouped_mm` computes all experts in one launch
without waiting for the device. Elsewhere a loop over the experts reads their counts on the host.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from cdrmix.kernels.common.products import mm

ACTIVATIONS = ("relu2", "swiglu")


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each token goes to, and the order of the rows in all later steps.

    weights_TK: float32, the chosen experts' probabilities, normalised over the k chosen; differentiable.
    experts_TK: int64, the chosen experts, most probable first (by logit + bias).
    counts_E: int64, rows that each expert computes, after capacity.
    tokens_per_expert_E: int64, routes to each expert before capacity; equal to counts_E without a capacity.
    order_R: int64, the routes sorted stably by (dropped or not, expert, route). Sorted row i is route order_R[i], which
        is choice order_R[i] % k of token order_R[i] // k. Rows from counts_E.sum() on are dropped: no expert computes
        them, they add nothing to the output, and their weights get a gradient of zero. The routes of skipped tokens
        are the last ones.
    load_balance: scalar, E sum_e f_e P_e, with f_e the share of routes to expert e before capacity and P_e its mean
        probability (arXiv 2101.03961, equation 4, over all k choices); 1 when balanced; differentiable through P.
    z_loss: scalar, mean of logsumexp(logits)^2 (arXiv 2202.08906, equation 5); differentiable.
    """

    weights_TK: Tensor
    experts_TK: Tensor
    counts_E: Tensor
    tokens_per_expert_E: Tensor
    order_R: Tensor
    load_balance: Tensor
    z_loss: Tensor


def route_forward(
    logits_TE: Tensor, k: int, bias: Tensor | None, capacity: int | None, keep_T: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Each token's k most probable experts, ties to the lowest index; returns the fields of `Routing` in order.

    logits_TE: float32 or float64; bias: [E], added for the selection only. capacity: most rows of an expert; it keeps
    its first ones in route order, so no token can displace an earlier one; None: no limit. T = 0 gives zeros.
    keep_T: bool; the routes of the other tokens are last in the order and in no count, and the two losses are means
    over the tokens kept; None: all tokens.
    """
    tokens, experts = logits_TE.shape
    score_TE = logits_TE if bias is None else logits_TE + bias
    experts_TK = torch.sort(score_TE, dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    wanted_TK = experts_TK if keep_T is None else experts_TK.masked_fill(~keep_T.unsqueeze(1), experts)
    sorted_R, order_R = wanted_TK.view(-1).sort(stable=True)
    ends_E = torch.searchsorted(sorted_R, torch.arange(experts, device=sorted_R.device), right=True)
    tokens_per_expert_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    counts_E = tokens_per_expert_E.clone()
    if capacity is not None:
        counts_E = tokens_per_expert_E.clamp(max=capacity)
        begin_E = ends_E - tokens_per_expert_E
        if keep_T is not None:  # the routes of skipped tokens are sorted as those of one more expert
            begin_E = torch.cat([begin_E, begin_E.new_full((1,), -len(order_R))])  # all of them over its capacity
        position_R = torch.arange(len(order_R), device=order_R.device) - begin_E[sorted_R]
        order_R = order_R[(position_R >= capacity).byte().argsort(stable=True)]
    log_normaliser_T, probabilities_TE = logits_TE.logsumexp(-1), logits_TE.softmax(-1)
    kept: int | Tensor = max(tokens, 1)
    if keep_T is not None:
        kept = keep_T.sum().clamp(min=1).to(logits_TE.dtype)
        log_normaliser_T = log_normaliser_T.where(keep_T, 0)
        probabilities_TE = probabilities_TE.where(keep_T.unsqueeze(1), 0)
    mean_E = probabilities_TE.sum(0) / kept
    share_E = tokens_per_expert_E.to(logits_TE.dtype) / (kept * k)
    return (
        logits_TE.gather(1, experts_TK).softmax(-1),
        experts_TK,
        counts_E,
        tokens_per_expert_E,
        order_R,
        experts * (share_E * mean_E).sum(),
        log_normaliser_T.square().sum() / kept,
    )


def route_backward(
    dweights_TK: Tensor | None,
    dload_balance: Tensor | None,
    dz_loss: Tensor | None,
    logits_TE: Tensor,
    experts_TK: Tensor,
    tokens_per_expert_E: Tensor,
    k: int,
    keep_T: Tensor | None = None,
) -> Tensor:
    """dlogits_TE; a gradient of None is zero. Both softmaxes are computed again from the logits.

    Where tokens are skipped, the gradients of their weights must be zero, as `experts_backward` gives them.
    """
    tokens, experts = logits_TE.shape
    kept = max(tokens, 1) if keep_T is None else keep_T.sum().clamp(min=1).to(logits_TE.dtype)
    dlogits_TE = torch.zeros_like(logits_TE)
    if dweights_TK is not None:
        weights_TK = logits_TE.gather(1, experts_TK).softmax(-1)
        inner_T1 = (weights_TK * dweights_TK).sum(-1, keepdim=True)
        dlogits_TE.scatter_(1, experts_TK, weights_TK * (dweights_TK - inner_T1))
    if dload_balance is None and dz_loss is None:
        return dlogits_TE
    probabilities_TE = logits_TE.softmax(-1)
    factor_TE = torch.zeros_like(logits_TE)
    if dload_balance is not None:
        slope_E = dload_balance * tokens_per_expert_E.to(logits_TE.dtype) * (experts / (kept * kept * k))
        factor_TE += slope_E - (probabilities_TE * slope_E).sum(-1, keepdim=True)
    if dz_loss is not None:
        factor_TE += dz_loss * logits_TE.logsumexp(-1, keepdim=True) * (2 / kept)
    if keep_T is not None:
        factor_TE = factor_TE.where(keep_T.unsqueeze(1), 0)
    return dlogits_TE.addcmul_(probabilities_TE, factor_TE)


def experts_forward(
    x_TD: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    weights_TK: Tensor,
    order_R: Tensor,
    counts_E: Tensor,
    *,
    activation: str,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """y_t = sum_j weights_tj expert_(experts_tj)(x_t), with expert_e(x) = act(x w_up_e) w_down_e.

    x_TD: [T, D]; w_up: [E, D, Z], for "swiglu" with gates in columns 2f and ups in columns 2f + 1; w_down: [E, F, D].
    Returns y and Z [R, Z]; with `recompute` Z is empty, and `experts_backward` computes it again.
    """
    k = weights_TK.shape[1]
    token_R = order_R.div(k, rounding_mode="floor")
    weights_R = weights_TK.view(-1).index_select(0, order_R)
    if _has_grouped_product(x_TD, w_up, w_down):
        offsets = counts_E.cumsum(0).to(torch.int32)
        z = _zero_tail(torch._grouped_mm(x_TD.index_select(0, token_R), w_up, offs=offsets), counts_E)
        y_RD = torch._grouped_mm(_activate(z, activation), w_down, offs=offsets)  # its last rows are uninitialised
        y_RD *= weights_R.unsqueeze(1)
        return combine(y_RD, order_R, counts_E, k), z if not recompute else z.new_empty(0)
    z = x_TD.new_zeros(len(order_R), w_up.shape[2])
    y_RD = x_TD.new_empty(len(order_R), w_down.shape[2])
    for expert, span in enumerate(row_spans(counts_E)[0]):
        z[span] = x_TD.index_select(0, token_R[span]) @ w_up[expert]
        y_RD[span] = _activate(z[span], activation) @ w_down[expert] * weights_R[span].unsqueeze(1)
    return combine(y_RD, order_R, counts_E, k), z if not recompute else z.new_empty(0)


def experts_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    weights_TK: Tensor,
    order_R: Tensor,
    counts_E: Tensor,
    z: Tensor,
    up_sum: Tensor | None = None,
    down_sum: Tensor | None = None,
    *,
    activation: str,
    recompute: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx_TD, dw_up, dw_down in their dtypes, dweights_TK in the weights' dtype; z as `experts_forward` returned it.

    Where a sum is given (float32, or float64 for float64), the weight's gradient is added to it and returned empty.

    With A = act(Z) computed again and dA' = dY w_down^T, for the rows r of expert e:
        dweights_r = <dA'_r, A_r>;  dZ_r = weights_r dA'_r act'(Z_r);  dw_down = (weights A)^T dY;  dw_up = X^T dZ;
        dX = dZ w_up^T, summed over a token's rows. The experts' outputs are not needed. (arXiv 2512.14080)
    """
    k = weights_TK.shape[1]
    token_R = order_R.div(k, rounding_mode="floor")
    weights_R = weights_TK.view(-1).index_select(0, order_R)
    dweights_R = torch.zeros_like(weights_R)
    if _has_grouped_product(x_TD, w_up, w_down):
        offsets = counts_E.cumsum(0).to(torch.int32)
        x, dy = x_TD.index_select(0, token_R), dy_TD.index_select(0, token_R)
        if recompute:
            z = torch._grouped_mm(x, w_up, offs=offsets)
        hidden = _activate(z, activation)
        dhidden = torch._grouped_mm(dy, w_down.mT, offs=offsets)
        dweights_R = _zero_tail((hidden * dhidden).sum(-1, dtype=weights_R.dtype, keepdim=True), counts_E).squeeze(1)
        scale = weights_R.unsqueeze(1).to(x.dtype)
        dz = _activate_backward(z, dhidden, activation).mul_(scale)
        dw_down = _zero_empty(torch._grouped_mm(hidden.mul_(scale).mT, dy, offs=offsets), counts_E)
        dw_up = _zero_empty(torch._grouped_mm(x.mT, dz, offs=offsets), counts_E)
        dw_down, dw_up = add_gradient(dw_down, down_sum), add_gradient(dw_up, up_sum)
        dx_RD = torch._grouped_mm(dz, w_up.mT, offs=offsets)
    else:
        dx_RD = x_TD.new_empty(len(order_R), x_TD.shape[1])
        dw_up, dw_down = gradient_like(w_up, up_sum), gradient_like(w_down, down_sum)
        for expert, span in enumerate(row_spans(counts_E)[0]):
            rows = token_R[span]
            x, dy = x_TD.index_select(0, rows), dy_TD.index_select(0, rows)
            z_here = z[span] if not recompute else x @ w_up[expert]
            hidden = _activate(z_here, activation)
            dhidden = dy @ w_down[expert].mT
            dweights_R[span] = (hidden * dhidden).sum(-1, dtype=weights_R.dtype)
            scale = weights_R[span].unsqueeze(1).to(x.dtype)
            dz = _activate_backward(z_here, dhidden, activation).mul_(scale)
            weight_product(hidden.mul_(scale), dy, expert, dw_down, down_sum)
            weight_product(x, dz, expert, dw_up, up_sum)
            mm(dz, w_up[expert].mT, out=dx_RD[span])
    dweights = torch.empty_like(weights_R)
    dweights[order_R] = dweights_R
    return combine(dx_RD, order_R, counts_E, k), dw_up, dw_down, dweights.view_as(weights_TK)


def product_forward(x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Tensor:
    """y_r = x_r w_e for the sorted rows r of each expert e; zeros for the rows after the last expert."""
    if _has_grouped_product(x_RD, w_EDF):
        offsets = counts_E.cumsum(0).to(torch.int32)
        return _zero_tail(torch._grouped_mm(x_RD, w_EDF, offs=offsets), counts_E)
    y_RF = x_RD.new_zeros(len(x_RD), w_EDF.shape[2])
    for expert, span in enumerate(row_spans(counts_E)[0]):
        mm(x_RD[span], w_EDF[expert], out=y_RF[span])
    return y_RF


def product_backward(
    dy_RF: Tensor, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor, w_sum: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dx_r = dy_r w_e^T, with zeros as above, and dw_e = sum_r x_r^T dy_r, zero for an expert without rows.

    Where a sum is given, dw is added to it as in `experts_backward`, and returned empty.
    """
    if _has_grouped_product(x_RD, w_EDF):
        offsets = counts_E.cumsum(0).to(torch.int32)
        dx_RD = _zero_tail(torch._grouped_mm(dy_RF, w_EDF.mT, offs=offsets), counts_E)
        dw_EDF = _zero_empty(torch._grouped_mm(x_RD.mT, dy_RF, offs=offsets), counts_E)
        return dx_RD, add_gradient(dw_EDF, w_sum)
    dx_RD, dw_EDF = torch.zeros_like(x_RD), gradient_like(w_EDF, w_sum)
    for expert, span in enumerate(row_spans(counts_E)[0]):
        mm(dy_RF[span], w_EDF[expert].mT, out=dx_RD[span])
        weight_product(x_RD[span], dy_RF[span], expert, dw_EDF, w_sum)
    return dx_RD, dw_EDF


def gradient_like(weight: Tensor, total: Tensor | None) -> Tensor:
    """Memory for a weight's gradient; empty where a sum is given."""
    return torch.empty_like(weight) if total is None else weight.new_empty(0)


def weight_product(left: Tensor, right: Tensor, expert: int, dw: Tensor, total: Tensor | None) -> None:
    """left^T right of an expert's rows: written to its part of dw, or added to its part of the sum in the sum's dtype.

    For an expert without rows the product writes zeros, and adds nothing.
    """
    if total is None:
        mm(left.mT, right, out=dw[expert])
    elif len(left):
        total[expert].addmm_(left.mT.to(total.dtype), right.to(total.dtype))


def add_gradient(dw: Tensor, total: Tensor | None) -> Tensor:
    """Returns dw; where a sum is given, adds dw to it and returns an empty tensor."""
    if total is None:
        return dw
    total += dw
    return dw.new_empty(0)


def dispatch(x_TD: Tensor, order_R: Tensor, counts_E: Tensor, k: int) -> Tensor:
    """x_RD: each route's row of x, in sorted order; zeros for dropped routes."""
    return _zero_tail(x_TD.index_select(0, order_R.div(k, rounding_mode="floor")), counts_E)


def combine(y_RD: Tensor, order_R: Tensor, counts_E: Tensor, k: int) -> Tensor:
    """y_TD: the sum of each token's kept rows, in order of choice, in float32 at least. The adjoint of `dispatch`."""
    kept = counts_E.sum()
    all_kept = order_R.device.type == "cpu" and int(kept) == len(order_R)
    y_TD = y_RD.new_zeros(len(order_R) // k, y_RD.shape[1], dtype=torch.promote_types(y_RD.dtype, torch.float32))
    for position_T in inverse_order(order_R).view(-1, k).unbind(1):
        rows = y_RD.index_select(0, position_T)
        y_TD += rows if all_kept else rows.masked_fill_((position_T >= kept).unsqueeze(1), 0)
    return y_TD.to(y_RD.dtype)


def inverse_order(order_R: Tensor) -> Tensor:
    """The inverse of the order: the sorted row of each route."""
    position_R = torch.empty_like(order_R)
    position_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    return position_R


def row_spans(counts_E: Tensor) -> tuple[list[slice], int]:
    """The sorted rows of each expert, and the largest number of them."""
    bounds = [0, *counts_E.cumsum(0).tolist()]
    spans = [slice(low, high) for low, high in itertools.pairwise(bounds)]
    return spans, max(span.stop - span.start for span in spans)


def _zero_tail(rows: Tensor, counts_E: Tensor) -> Tensor:
    """Sets the rows after the last computed one to zero, in place, without waiting for the device."""
    if rows.device.type == "cpu":
        rows[int(counts_E.sum()) :] = 0
        return rows
    dropped = torch.arange(len(rows), device=rows.device) >= counts_E.sum()
    return rows.masked_fill_(dropped.unsqueeze(1), 0)


def _zero_empty(dw: Tensor, counts_E: Tensor) -> Tensor:
    """Sets the gradients of experts without rows to zero, in place; a grouped product leaves them undefined."""
    return dw.masked_fill_((counts_E == 0).view(-1, 1, 1), 0)


def _has_grouped_product(x_TD: Tensor, *weights: Tensor) -> bool:
    """Whether `torch._grouped_mm` takes these: bfloat16, with strides and starts at multiples of 16 bytes."""
    aligned = all(size % 8 == 0 for w in weights for size in w.shape[1:])
    return x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and aligned and len(x_TD) > 0


def _activate(z: Tensor, activation: str) -> Tensor:
    """relu2: relu(z)^2. swiglu: silu(gate) * up, gates in even columns and ups in odd ones."""
    if activation == "relu2":
        return z.clamp(min=0).square_()
    gate, up = z[:, 0::2], z[:, 1::2]
    return torch.nn.functional.silu(gate) * up


def _activate_backward(z: Tensor, dhidden: Tensor, activation: str) -> Tensor:
    """The gradient of `_activate` with respect to z."""
    if activation == "relu2":
        return z.clamp(min=0).mul_(dhidden).mul_(2)
    gate, up = z[:, 0::2], z[:, 1::2]
    sigmoid = gate.sigmoid()
    dgate = dhidden * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.stack([dgate, dhidden * gate * sigmoid], -1).view_as(z)
