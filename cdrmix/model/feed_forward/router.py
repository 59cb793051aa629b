"""The router of a mixture of experts: its gate, its selection bias, its capacity."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdrmix import ops
from cdrmix.config.schema_layers import FeedForward
from cdrmix.model.context import Context
from cdrmix.model.depth import Gate
from cdrmix.model.initial_values import drawn, normal
from cdrmix.model.sequence import SequenceGroup


class Routed(NamedTuple):
    """The report of one router: rows that each expert computes, and routes to each expert before capacity (int64 [E];
    they differ where a capacity drops some), and its two loss terms (scalars)."""

    counts_E: Tensor
    tokens_per_expert_E: Tensor
    load_balance: Tensor
    z_loss: Tensor

    @classmethod
    def of(cls, routing: ops.Routing) -> Routed:
        """The report of one routing."""
        return cls(routing.counts_E, routing.tokens_per_expert_E, routing.load_balance, routing.z_loss)


class Router(nn.Module):
    """A linear gate in float32, then top-k (`ops.route_topk`).

    bias: [E], added to the logits for the selection only; None unless `bias_update_rate` is above 0. It is a buffer:
        the same in every process under every ZeRO stage, and part of the weights in checkpoints and exports. Only
        `balance` changes it, once an optimizer step.
    name: of the layer, for errors; LanguageModel sets it.
    Jitter (arXiv 2101.03961, section 2.2) and dropping apply in training mode only; jitter uses torch's generator.
    """

    bias: Tensor | None

    def __init__(self, d_model: int, config: FeedForward) -> None:
        super().__init__()
        self.name = ""
        self.experts, self.top_k = config.experts, config.top_k
        self.jitter = config.router_jitter
        self.capacity_factor = config.capacity_factor if config.drop else None
        self.weight = drawn(normal(d_model**-0.5 * 0.1), config.experts, d_model)
        self.register_buffer("bias", torch.zeros(config.experts) if config.bias_update_rate > 0 else None)

    def forward(self, x_TD: Tensor) -> Tensor:
        """x [T, D] -> logits [T, E], float32 at least.

        `route` is a separate method because a module's result must be tensors: DeepSpeed's ZeRO-3 finds them in no
        container but a tuple, and would not gather the weight for the backward pass.
        """
        if self.jitter and self.training:
            x_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - self.jitter, 1 + self.jitter)
        return ops.router_logits(x_TD, self.weight)

    def route(self, x_TD: Tensor, context: Context | None = None, gate: Gate | None = None) -> ops.Routing:
        """Which experts each position of x [T, D] goes to. T may be 0, in expert parallelism.

        context: its filling goes to no expert, and is in no count, capacity or loss. Of a slice of rows, the mean of
            the slices' load_balance and z_loss is that of whole rows. None: every position is a token of whole rows.
        gate: the tokens that it skips go to no expert either.
        """
        tokens, sequence = (None, None) if context is None else (context.tokens, context.group)
        keep_T = None if tokens is None else tokens.is_token_R
        if gate is not None:
            keep_T = gate.keep_T  # without the filling
        # torch.compile would compile separately for every name.
        name = "" if torch.compiler.is_compiling() else self.name
        capacity = self.capacity(len(x_TD if tokens is None else tokens.places_N))
        logits_TE = self(x_TD)
        routing = ops.route_topk(logits_TE, self.top_k, bias=self.bias, capacity=capacity, keep=keep_T, name=name)
        return routing if sequence is None else _of_whole_rows(routing, logits_TE, keep_T, sequence)

    def capacity(self, tokens: int) -> int | None:
        """The most rows of an expert for that many tokens; None outside training, and where nothing is dropped."""
        if self.capacity_factor is None or not self.training:
            return None
        return math.ceil(self.capacity_factor * self.top_k * tokens / self.experts)

    @torch.no_grad()
    def balance(self, tokens_per_expert_E: Tensor, rate: float) -> None:
        """One step of the selection bias towards even load (arXiv 2408.15664, algorithm 1), kept at mean 0.

        tokens_per_expert_E: the routes to each expert before capacity, summed over the global batch and all processes.
        """
        if self.bias is not None:
            tokens_per_expert_E = tokens_per_expert_E.to(self.bias)
            self.bias += rate * (tokens_per_expert_E.mean() - tokens_per_expert_E).sign()
            self.bias -= self.bias.mean()


def _of_whole_rows(
    routing: ops.Routing, logits_TE: Tensor, keep_T: Tensor | None, sequence: SequenceGroup
) -> ops.Routing:
    """The routing of a slice with its part of the losses of whole rows, times the number of slices.

    E sum_e f_e P_e is not a mean over slices: f_e has to be that of all of them. Each slice has its own sum of
    probabilities, and P_e is the sum of these.
    """
    kept_T1 = torch.ones_like(logits_TE[:, :1]) if keep_T is None else keep_T.unsqueeze(1).to(logits_TE)
    everywhere = sequence.total(torch.cat([routing.tokens_per_expert_E.to(logits_TE), kept_T1.sum().reshape(1)]))
    tokens_per_expert_E, kept = everywhere[:-1], everywhere[-1].clamp(min=1)
    share_E = tokens_per_expert_E / (kept * routing.experts_TK.shape[1])
    probability_E = (logits_TE.softmax(-1) * kept_T1).sum(0) * (sequence.size / kept)
    z_loss = routing.z_loss * (kept_T1.sum() * (sequence.size / kept))
    load_balance = len(share_E) * (share_E * probability_E).sum()
    return dataclasses.replace(routing, load_balance=load_balance, z_loss=z_loss)


def balance_routers(model: nn.Module, tokens_per_expert_LE: Tensor, rate: float) -> None:
    """`Router.balance` of every router, in the model's order; tokens_per_expert_LE is of a whole optimizer step."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router, tokens_per_expert_E in zip(routers, tokens_per_expert_LE, strict=True):
        router.balance(tokens_per_expert_E, rate)
