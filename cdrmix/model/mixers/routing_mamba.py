"""Routing-Mamba (arXiv 2506.18145): Mamba-2 whose gate, convolution input and output are mixtures of linear experts.

Shapes as in mamba2.py; N = B T tokens, E experts, k choices a token, R = N k routed rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from cdrmix import ops
from cdrmix.config.schema_model import Model
from cdrmix.model.context import Context
from cdrmix.model.feed_forward.router import Router
from cdrmix.model.initial_values import by_inputs, drawn, zeros
from cdrmix.model.layers import consecutive, linear
from cdrmix.model.mixers.base import MIXERS
from cdrmix.model.mixers.mamba2 import Mamba2, Projected
from cdrmix.model.tensor_parallel import Cut
from cdrmix.ops.backend import compute_dtype


@MIXERS("routing_mamba")
class RoutingMamba(Mamba2):
    """Mamba-2's mixer with one router for three projections; its other parts have no experts.

        gate_t, x_t = sum_j w_tj x_t W_up[e_tj];  output_t = sum_j w_tj y_t W_down[e_tj]

    for the k experts e_tj that the router chooses for the token, with weights that sum to 1. The paper omits the
    weights where it mixes the convolution's input; with them a token's scale does not grow with k, and the router
    learns from all three. Number and choice of the experts are those of model.feed_forward. Each process has all of
    them, also with train.expert_parallel.
    """

    def add_projections(self, config: Model) -> None:
        experts, width = config.feed_forward.experts, config.d_model
        self.router = Router(width, config.feed_forward)
        self.select = linear(width, self.channels - self.inner + self.heads, config.init_std_scale)
        selecting = self.groups * self.d_state
        self.w_up = drawn(by_inputs(width, config.init_std_scale), experts, width, 2 * self.inner)
        self.fused = {
            "select.weight": consecutive(-2, selecting, selecting, self.heads),
            "w_up": consecutive(-1, self.inner, self.inner),
        }
        self.w_down = drawn(zeros, experts, self.inner, width)

    def cuts_of_projections(self, selecting: int) -> Mapping[str, Cut]:
        return {
            "select.weight": Cut(0, (selecting, selecting, self.heads)),
            "w_up": Cut(2, (self.inner, self.inner)),
            "w_down": Cut(1),
        }

    def project(self, x: Tensor, context: Context | None = None) -> Projected:
        routing = self.router.route(x.flatten(0, 1), context)
        x = self.copied(x)
        routing = dataclasses.replace(routing, weights_TK=self.copied(routing.weights_TK))
        gate, x_inner = mixed_product(x, self.w_up, routing).chunk(2, -1)
        B_C, step = self.select(x).split([self.channels - self.inner, self.heads], -1)
        return Projected(gate, torch.cat([x_inner, B_C], -1), step, routing)

    def emit(self, y: Tensor, routing: ops.Routing | None) -> Tensor:
        assert routing is not None
        return self.summed(mixed_product(y, self.w_down, routing))


def mixed_product(x: Tensor, w_EDF: Tensor, routing: ops.Routing) -> Tensor:
    """sum_j w_tj x_t W[e_tj], the weighted sum of each token's experts: [B, T, D] -> [B, T, F] in the compute dtype."""
    x_RD = ops.moe_dispatch(x.flatten(0, 1).to(compute_dtype(x)), routing)
    weights_R = routing.weights_TK.flatten().index_select(0, routing.order_R)
    y_RF = ops.moe_product(x_RD * weights_R.unsqueeze(1).to(x_RD.dtype), w_EDF, routing)
    return ops.moe_combine(y_RF, routing).unflatten(0, x.shape[:2])
