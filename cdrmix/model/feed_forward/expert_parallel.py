"""Expert parallelism: the ranks of a group each hold some experts of each layer, and exchange the rows routed to them.

Shapes: T tokens, D model, E experts, R = T * k routed rows, S ranks of the group, L = E / S experts of each rank,
N rows that arrive at a rank, C rows that an expert keeps at most of one rank's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cdrmix import ops
from cdrmix.config.schema_model import Model
from cdrmix.model.feed_forward.moe import EXPERT_PARAMETERS, MoeFeedForward
from cdrmix.model.initial_values import narrowed
from cdrmix.ops.backend import compute_dtype


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks that together hold every expert once, seen from one rank: rank r holds the r-th E / size experts."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def share(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of all experts: [E, ...] -> [E / size, ...], a view."""
        return whole.chunk(self.size)[self.rank]


MOST_PADDING = 2  # most slots of a padded exchange for each row; with more, waiting for the counts costs less


class Plan(NamedTuple):
    """How many rows one layer sends to each rank of the group, and gets from each; None: equally many for all."""

    sent: list[int] | None
    received: list[int] | None
    group: dist.ProcessGroup


def host_knows(x: Tensor) -> bool:
    """Whether the host can read counts on the device of x without waiting."""
    return x.device.type == "cpu"


class ExpertParallelFeedForward(MoeFeedForward):
    """A mixture of experts of which this rank holds one part, and the others of its group the rest.

    Every rank routes its own tokens over all experts, so a rank's output is that of the whole layer for its tokens.
    The parameters have the values that the whole layer has. All ranks of the group call `forward`
    together. A rank without tokens does so too, because it computes rows of others. Where a capacity drops rows, in
    training, and all ranks have equally many tokens, GPUs exchange as many rows as the capacity allows, and no rank
    waits for counts. equal_tokens: whether they have.
    """

    def __init__(self, config: Model, experts: ExpertGroup, *, equal_tokens: bool = True) -> None:
        super().__init__(config)
        self.experts, self.equal_tokens = experts, equal_tokens
        mine = experts.share(torch.arange(config.feed_forward.experts, device="cpu"))
        for name in EXPERT_PARAMETERS:
            setattr(self, name, narrowed(getattr(self, name), 0, mine))

    def mix(self, x_TD: Tensor, routing: ops.Routing) -> Tensor:
        """The routed experts' weighted sum for each token, on whichever rank they are; [T, D] in the compute dtype."""
        capacity = self.router.capacity(len(x_TD))
        if capacity is not None and self.equal_tokens and not host_knows(x_TD):
            capacity = min(capacity, len(x_TD))  # a token chooses an expert at most once
            if 0 < len(routing.counts_E) * capacity <= MOST_PADDING * len(routing.order_R):
                return self._mix_padded(x_TD, routing, capacity)
        return self._mix_counted(x_TD, routing)

    def _mix_padded(self, x_TD: Tensor, routing: ops.Routing, capacity: int) -> Tensor:
        """With C slots for every expert and rank, of which the first hold rows: the host needs no counts.

        Slots without rows are sent as zeros, and are dropped rows for the experts.
        """
        experts, group = self.experts, self.experts.group
        counts_SL = routing.counts_E.view(experts.size, -1)
        received_SL = torch.empty_like(counts_SL)
        counting = dist.all_to_all_single(received_SL, counts_SL.contiguous(), group=group, async_op=True)
        x_RD = ops.moe_dispatch(x_TD.to(compute_dtype(x_TD)), routing)
        sorted_R = routing.weights_TK.flatten().index_select(0, routing.order_R)
        slots = Slots.of(routing.counts_E, capacity, len(routing.order_R))
        plan = Plan(None, None, group)
        moving: list[Any] = []
        packed = _Moved.apply(x_RD, *slots), _Moved.apply(sorted_R, *slots)
        x_ND, weights_N = _Exchange.apply(moving, plan, len(slots.row_N), *packed)
        counting.wait()
        expert_N, order_N = arrived_slots(received_SL, capacity)
        for message in moving:
            message.wait()
        y_ND = super().mix(x_ND, local_routing(weights_N, expert_N, received_SL, order_N))
        moving = []
        (back_ND,) = _Exchange.apply(moving, plan, len(slots.row_N), y_ND)
        for message in moving:
            message.wait()
        return ops.moe_combine(_Moved.apply(back_ND, *slots.inverse()), routing)

    def _mix_counted(self, x_TD: Tensor, routing: ops.Routing) -> Tensor:
        """With messages of exactly the rows, whose counts the host has to know.

        Dropped rows are not sent. The counts are sent, and copied to the host, while the rows are gathered. The rows
        are sent while the weights are sent and the order of the arriving rows is computed. The products need the rows,
        so nothing else can overlap.
        """
        group, tokens = self.experts.group, x_TD.shape[0]
        counting = _Counting(routing.counts_E.view(self.experts.size, -1), group)
        received_SL = counting.received_SL
        x_RD = ops.moe_dispatch(x_TD.to(compute_dtype(x_TD)), routing)
        sorted_R = routing.weights_TK.flatten().index_select(0, routing.order_R)
        sent, received = counting.wait()
        plan = Plan(sent, received, group)
        arriving = sum(received)
        moving: list[Any] = []
        x_ND, weights_N = _Exchange.apply(moving, plan, arriving, x_RD, sorted_R)
        order_N, expert_N = arrived_order(received_SL, arriving)
        for message in moving:
            message.wait()

        y_ND = super().mix(x_ND, local_routing(weights_N, expert_N, received_SL, order_N))
        moving = []
        (y_RD,) = _Exchange.apply(moving, _reverse(plan), tokens * self.router.top_k, y_ND)
        for message in moving:
            message.wait()
        return ops.moe_combine(y_RD, routing)


class _Counting:
    """Counts of rows on the way from the other ranks and to the host, on a separate stream where there are streams.

    So the host waits for the router only, and not for later work of the device, which continues while the host prepares
    the next steps. sent_SL: int64, rows for each rank's experts. received_SL: those from each rank, valid after `wait`.
    """

    def __init__(self, sent_SL: Tensor, group: dist.ProcessGroup) -> None:
        self.received_SL = torch.empty_like(sent_SL)
        self._sent_SL = sent_SL
        self._on_host: tuple[Tensor, torch.cuda.Event] | None = None
        if sent_SL.device.type != "cuda":
            self._message = dist.all_to_all_single(self.received_SL, sent_SL, group=group, async_op=True)
            return
        stream = _stream_of_counts(sent_SL.device)
        stream.wait_stream(torch.cuda.current_stream(sent_SL.device))
        with torch.cuda.stream(stream):
            dist.all_to_all_single(self.received_SL, sent_SL, group=group)
            # Copies to the host that do not block need pinned memory.
            self._on_host = self._sums().to("cpu", non_blocking=True), stream.record_event()

    def wait(self) -> tuple[list[int], list[int]]:
        """Rows for each rank and from each; the only time that the host waits in a layer."""
        if self._on_host is None:
            self._message.wait()
            sums = self._sums()
        else:
            sums, done = self._on_host
            torch.cuda.current_stream(self.received_SL.device).wait_event(done)
            done.synchronize()
        sent, received = sums.tolist()
        return sent, received

    def _sums(self) -> Tensor:
        return torch.stack([self._sent_SL.sum(1), self.received_SL.sum(1)])


@functools.cache
def _stream_of_counts(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def local_routing(weights_N: Tensor, expert_N: Tensor, received_SL: Tensor, order_N: Tensor) -> ops.Routing:
    """The arrived rows as tokens that each have one choice."""
    zero, counts_L = weights_N.new_zeros(()), received_SL.sum(0)
    return ops.Routing(
        weights_TK=weights_N.unsqueeze(1),
        experts_TK=expert_N.unsqueeze(1),
        counts_E=counts_L,
        tokens_per_expert_E=counts_L,
        order_R=order_N,
        load_balance=zero,
        z_loss=zero,
    )


class Slots(NamedTuple):
    """The positions of rows sorted by expert among C slots an expert. row_N: the row of each slot, and whether there is
    one; slot_R: the slot of each row, and whether it was kept."""

    row_N: Tensor
    filled_N: Tensor
    slot_R: Tensor
    kept_R: Tensor

    @classmethod
    def of(cls, counts_E: Tensor, capacity: int, rows: int) -> Slots:
        """counts_E: int64, at most `capacity` each; rows: all rows, with the dropped ones after the last expert's."""
        ends_E = counts_E.cumsum(0)
        starts_E = ends_E - counts_E
        place_N = torch.arange(len(counts_E) * capacity, device=counts_E.device)
        expert_N, nth_N = place_N // capacity, place_N % capacity
        filled_N = nth_N < counts_E[expert_N]
        row_R = torch.arange(rows, device=counts_E.device)
        expert_R = torch.searchsorted(ends_E, row_R, right=True).clamp(max=len(counts_E) - 1)
        kept_R = row_R < ends_E[-1]
        slot_R = torch.where(kept_R, expert_R * capacity + row_R - starts_E[expert_R], 0)
        return cls(torch.where(filled_N, starts_E[expert_N] + nth_N, 0), filled_N, slot_R, kept_R)

    def inverse(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same for the opposite direction."""
        return self.slot_R, self.kept_R, self.row_N, self.filled_N


def arrived_slots(received_SL: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """The expert of each arrived slot, sender by sender; and the order of their rows by expert, then sender.

    received_SL: int64, rows of each expert here from each rank, in the first of C slots each. Returns two int64
    [S L C]; in the order, slots without rows are last.
    """
    senders, experts = received_SL.shape
    place_N = torch.arange(senders * experts * capacity, device=received_SL.device)
    expert_N = place_N // capacity % experts
    filled_N = place_N % capacity < received_SL.flatten()[place_N // capacity]
    return expert_N, torch.where(filled_N, expert_N, experts).argsort(stable=True)


def arrived_order(received_SL: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The order by expert of rows that arrived sender by sender, each sender's sorted by expert; and each row's expert.

    received_SL: int64, rows of each expert here from each rank; rows: their sum, which may be 0.
    Returns the order [rows] int64, as Routing.order_R for k = 1, and the experts [rows] int64.
    """
    senders, experts = received_SL.shape
    begins_SL = (received_SL.flatten().cumsum(0) - received_SL.flatten()).view(senders, experts)
    counts_LS = received_SL.mT.flatten()
    ends_LS = counts_LS.cumsum(0)
    place_N = torch.arange(rows, device=received_SL.device)
    # Blocks of the sorted order are by expert, then sender; position i is in the first block that ends after it.
    block_N = torch.searchsorted(ends_LS, place_N, right=True)
    order_N = place_N + (begins_SL.mT.flatten() - (ends_LS - counts_LS))[block_N]
    expert_N = torch.searchsorted(received_SL.flatten().cumsum(0), place_N, right=True) % experts
    return order_N, expert_N


class _Moved(torch.autograd.Function):
    """Moves rows: result i is row source[i] if it exists, else zero; gradients are moved back by target."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, there: Tensor, target: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(target, back)
        return _taken(x, source, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _taken(gradient, *ctx.saved_tensors), None, None, None, None


def _taken(x: Tensor, source: Tensor, there: Tensor) -> Tensor:
    return x.index_select(0, source).masked_fill_(~there.view(-1, *[1] * (x.dim() - 1)), 0)


class _Exchange(torch.autograd.Function):
    """Sends rows of several tensors to the ranks of a group and receives theirs, by a plan; gradients go back.

    moving: collects the pending messages, which the caller waits for before it reads. length: rows of the results, at
    least those that arrive; the rest is zero. Of the tensors the first sum(plan.sent) rows are sent, or all.
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
    results = []
    for tensor, length in zip(tensors, lengths, strict=True):
        leaving = len(tensor) if plan.sent is None else sum(plan.sent)
        arriving = length if plan.received is None else sum(plan.received)
        result = tensor.new_empty(length, *tensor.shape[1:])
        if arriving < length:  # fewer rows arrive than there are, because some were dropped
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
