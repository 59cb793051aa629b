"""Expert parallelism: the ranks of a group share out each layer's experts and send each other the rows routed to them.

Shapes: T tokens, D model, E experts, R = T * k routed rows, S ranks of the group, L = E / S experts of each rank,
N rows that arrive at a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdrmix import ops
from cdrmix.config.schema import Model
from cdrmix.model.experts import EXPERT_PARAMETERS, MoeFeedForward
from cdrmix.ops.backend import compute_dtype


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks that together hold every expert once, seen from one of them: rank r the r-th E / size of them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def share(self, whole: Tensor) -> Tensor:
        """This rank's experts of a tensor of them all: [E, ...] -> [E / size, ...], a view."""
        return whole.chunk(self.size)[self.rank]


class Plan(NamedTuple):
    """Who sends how many rows in one layer: to each rank of the group, and from each, of which experts here [S, L]."""

    sent: list[int]
    received: list[int]
    received_SL: Tensor
    group: dist.ProcessGroup


class ExpertParallelFeedForward(MoeFeedForward):
    """A mixture of experts of which this rank holds a share, and the others of its group the rest.

    Every rank routes its own tokens over all experts, so a rank's output is that of the whole layer for its tokens.
    The parameters are drawn as the whole layer's are, and then cut. All ranks of the group call `forward` together,
    also one that has no tokens: it computes the rows of others.
    """

    def __init__(self, config: Model, experts: ExpertGroup) -> None:
        super().__init__(config)
        self.experts = experts
        for name in EXPERT_PARAMETERS:
            whole = getattr(self, name)
            setattr(self, name, nn.Parameter(experts.share(whole.detach()).clone()))

    def mix(self, x_TD: Tensor, routing: ops.Routing) -> Tensor:
        """The routed experts' weighted sum a token, wherever the experts are; [T, D] in the compute dtype.

        Dropped rows are not sent. The counts travel while the rows are gathered, and the rows while the weights
        travel and the order of the arrived rows is made; the products need the rows, so no more can overlap.
        """
        group, tokens = self.experts.group, x_TD.shape[0]
        counts_SL = routing.counts_E.view(self.experts.size, -1)
        received_SL = torch.empty_like(counts_SL)
        counting = dist.all_to_all_single(received_SL, counts_SL.contiguous(), group=group, async_op=True)
        x_RD = ops.moe_dispatch(x_TD.to(compute_dtype(x_TD)), routing)
        counting.wait()
        # The one copy to the host: how long the messages are.
        sent, received = torch.stack([counts_SL.sum(1), received_SL.sum(1)]).tolist()
        plan = Plan(sent, received, received_SL, group)

        sorted_R = routing.weights_TK.flatten().index_select(0, routing.order_R)
        arriving = sum(received)
        moving: list[Any] = []
        x_ND, weights_N = _Exchange.apply(moving, plan, arriving, x_RD, sorted_R)
        order_N, expert_N = arrived_order(received_SL, arriving)
        for message in moving:
            message.wait()

        zero = weights_N.new_zeros(())
        counts_L = received_SL.sum(0)
        here = ops.Routing(
            weights_TK=weights_N.unsqueeze(1),
            experts_TK=expert_N.unsqueeze(1),
            counts_E=counts_L,
            demand_E=counts_L,
            order_R=order_N,
            load_balance=zero,
            z_loss=zero,
        )
        y_ND = super().mix(x_ND, here)
        moving = []
        (y_RD,) = _Exchange.apply(moving, _reverse(plan), tokens * self.router.top_k, y_ND)
        for message in moving:
            message.wait()
        return ops.moe_combine(y_RD, routing)


def arrived_order(received_SL: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The order by expert of rows that arrived sender by sender, each sender's by expert; and each row's expert.

    received_SL: int64, rows of each expert here from each rank; rows: their sum, which may be 0.
    Returns order [rows] int64, as Routing.order_R of k = 1 has it, and the experts [rows] int64.
    """
    senders, experts = received_SL.shape
    begins_SL = (received_SL.flatten().cumsum(0) - received_SL.flatten()).view(senders, experts)
    counts_LS = received_SL.mT.flatten()
    ends_LS = counts_LS.cumsum(0)
    place_N = torch.arange(rows, device=received_SL.device)
    # Blocks of the sorted order are by expert, then sender; place i is in the first block that ends after it.
    block_N = torch.searchsorted(ends_LS, place_N, right=True)
    order_N = place_N + (begins_SL.mT.flatten() - (ends_LS - counts_LS))[block_N]
    expert_N = torch.searchsorted(received_SL.flatten().cumsum(0), place_N, right=True) % experts
    return order_N, expert_N


class _Exchange(torch.autograd.Function):
    """Rows of several tensors to the ranks of a group and from them, as a plan says; the gradients go the way back.

    moving: takes up the messages under way, which the caller waits for before it reads. length: rows of the results,
    at least those that arrive; the rest is zero. Of the tensors the first sum(plan.sent) rows are sent.
    """

    @staticmethod
    def forward(ctx: Any, moving: list[Any], plan: Plan, length: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.lengths = plan, [len(tensor) for tensor in tensors]
        return _start(moving, plan, [length] * len(tensors), tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        moving: list[Any] = []
        back = _start(moving, _reverse(ctx.plan), ctx.lengths, gradients)
        for message in moving:
            message.wait()
        return None, None, None, *back


def _reverse(plan: Plan) -> Plan:
    return plan._replace(sent=plan.received, received=plan.sent)


def _start(moving: list[Any], plan: Plan, lengths: Sequence[int], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    leaving, arriving = sum(plan.sent), sum(plan.received)
    results = []
    for tensor, length in zip(tensors, lengths, strict=True):
        result = tensor.new_empty(length, *tensor.shape[1:])
        if arriving < length:  # as many as were dropped
            result[arriving:] = 0
        moving.append(
            dist.all_to_all_single(
                result[:arriving],
                tensor[:leaving].contiguous(),
                plan.received,
                plan.sent,
                group=plan.group,
                async_op=True,
            )
        )
        results.append(result)
    return tuple(results)
