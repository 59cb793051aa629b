"""The mixture-of-experts ops: routing, and the routed experts' weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor

from cdrmix.kernels import reference_moe
from cdrmix.kernels.reference_moe import Routing
from cdrmix.ops.backend import compute_dtype


def route_topk(logits_TE: Tensor, k: int, *, bias: Tensor | None = None) -> Routing:
    """Top-k routing with its loss terms and the stable sort by expert; see `reference_moe.Routing`."""
    with torch.autocast(logits_TE.device.type, enabled=False):
        return reference_moe.route_topk(logits_TE, k, bias=bias)


def moe_experts(x_TD: Tensor, w_up: Tensor, w_down: Tensor, routing: Routing, *, activation: str = "relu2") -> Tensor:
    """The routed experts' weighted sum a token, [T, D] in the compute dtype; see `reference_moe.moe_experts`."""
    dtype = compute_dtype(x_TD)
    with torch.autocast(x_TD.device.type, enabled=False):
        return reference_moe.moe_experts(
            x_TD.to(dtype), w_up.to(dtype), w_down.to(dtype), routing, activation=activation
        )
