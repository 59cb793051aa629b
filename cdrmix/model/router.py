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

    def forward(self, x_TD: Tensor) -> Tensor:
        """x [T, D] -> logits [T, E], float32 at least.

        A module's result must be tensors: in anything else than a tuple DeepSpeed's ZeRO-3 would not find them, and
        not gather the weight for the backward pass. So `route` is apart.
        """
        with torch.autocast(x_TD.device.type, enabled=False):
            return (x_TD if x_TD.dtype == torch.float64 else x_TD.float()) @ self.weight.mT

    def route(self, x_TD: Tensor) -> ops.Routing:
        """Which experts each token of x [T, D] goes to."""
        return ops.route_topk(self(x_TD), self.top_k)
