"""The one door to the kernels: each op by its public name, sent to the implementation that serves its device.

Today every device is served by `kernels/reference.py`, plain PyTorch. Reductions that need it run in
float32 under autocast: the recurrence, the router and the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cdrmix.kernels import reference, reference_moe
from cdrmix.kernels.reference import document_starts, token_shift
from cdrmix.kernels.reference_moe import Routing

__all__ = [
    "OPS",
    "Routing",
    "document_starts",
    "linear_cross_entropy",
    "moe_experts",
    "route_topk",
    "token_shift",
    "wkv7",
]

WKV7_CHUNK = 16  # tokens; on a CPU 16 and 32 take the same time at head width 32, and 16 is the more exact


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products run in: autocast's where it is on, else x's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def wkv7(
    r: Tensor,
    log_w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7's generalised delta rule over a batch of rows; see `reference.wkv7` for the formula.

    r, log_w, k, a, b: [B, T, H, K] with log_w <= 0; v: [B, T, H, V]; state: float32 [B, H, V, K] or None;
    cu_seqlens: int [D + 1], document starts over the flattened B * T tokens, every row's start among them.
    Returns y [B, T, H, V] in v's dtype, and the last state [B, H, V, K] (None unless `return_state`).
    """
    if r.shape[:3] != v.shape[:3] or r.shape != k.shape:
        raise ValueError(
            f"wkv7: r {tuple(r.shape)} and k {tuple(k.shape)} must agree, and v {tuple(v.shape)} in B, T, H"
        )
    with torch.autocast(r.device.type, enabled=False):
        r32, w32, k32, v32, a32, b32 = (_at_least_float32(x) for x in (r, log_w, k, v, a, b))
        y, last = reference.wkv7(r32, w32, k32, v32, a32, b32, state=state, cu_seqlens=cu_seqlens, chunk=WKV7_CHUNK)
    return y.to(v.dtype), last if return_state else None


def route_topk(logits_TE: Tensor, k: int, *, bias: Tensor | None = None) -> Routing:
    """Top-k routing with its loss terms and the stable sort by expert; see `reference_moe.Routing`."""
    with torch.autocast(logits_TE.device.type, enabled=False):
        return reference_moe.route_topk(logits_TE, k, bias=bias)


def moe_experts(x_TD: Tensor, w_up: Tensor, w_down: Tensor, routing: Routing, *, activation: str = "relu2") -> Tensor:
    """The routed experts' weighted sum a token, [T, D] in the compute dtype; see `reference_moe.moe_experts`."""
    dtype = _compute_dtype(x_TD)
    with torch.autocast(x_TD.device.type, enabled=False):
        return reference_moe.moe_experts(
            x_TD.to(dtype), w_up.to(dtype), w_down.to(dtype), routing, activation=activation
        )


def linear_cross_entropy(hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, weights_R: Tensor) -> Tensor:
    """Weighted sum of the cross-entropies of `hidden @ weight.T`, in nats; see `reference.linear_cross_entropy`."""
    dtype = _compute_dtype(hidden_RD)
    with torch.autocast(hidden_RD.device.type, enabled=False):
        return reference.linear_cross_entropy(hidden_RD.to(dtype), weight_VD.to(dtype), targets_R, weights_R)


# Every op by name: tests and benchmarks run over this table, so that none is left out.
OPS: dict[str, Callable[..., object]] = {
    "wkv7": wkv7,
    "route_topk": route_topk,
    "moe_experts": moe_experts,
    "linear_cross_entropy": linear_cross_entropy,
    "token_shift": token_shift,
}
