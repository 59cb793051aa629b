"""The router of a mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdrmix import ops
from cdrmix.config.schema import FeedForward


class Router(nn.Module):
    """A linear gate in float32, then top-k (`ops.route_topk`)."""

    def __init__(self, d_model: int, config: FeedForward) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.empty(config.experts, d_model))
        nn.init.normal_(self.weight, std=d_model**-0.5 * 0.1)

    def forward(self, x_TD: Tensor) -> ops.Routing:
        with torch.autocast(x_TD.device.type, enabled=False):
            x_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
            return ops.route_topk(x_TD @ self.weight.mT, self.top_k)
