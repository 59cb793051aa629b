"""Sequence parallelism: the ranks of a group each compute one slice of the tokens of the same rows.

Parts that compute each token by itself need no change. The others get what comes before a rank's slice from the ranks
before it: the last tokens (token shift, convolution), the state of a recurrence, or the other slices of some heads
(attention). Rank r of S has the tokens r T/S to (r + 1) T/S of every row.

A recurrence S_t = S_{t-1} M_t + B_t is affine in the state. So the state after a slice is S M + B for the state S
before it, with M the product of the slice's transitions and B its state after a start from zero. Each rank computes M
and B of its slice, all gather both, and each adds up those of the ranks before it.

Shapes: B rows, T tokens of a whole row, S ranks, L = T / S tokens of a slice, W tokens, H heads, N head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that hold the slices of the same rows, seen from one of them: rank r holds the r-th slice."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def slice(self, whole: Tensor) -> Tensor:
        """This rank's slice of a tensor of whole rows: [B, T, ...] -> [B, L, ...], a view."""
        return whole.chunk(self.size, 1)[self.rank]

    def gather(self, x: Tensor) -> Tensor:
        """The x of every rank, [S, *x.shape]. Differentiable: each rank's use adds to the gradient of x."""
        gathered: Tensor = _Gather.apply(x, self)
        return gathered

    def heads(self, x_BLHN: Tensor) -> Tensor:
        """The whole rows of this rank's share of the heads: [B, L, H, N] -> [B, T, H / S, N] (Ulysses, arXiv
        2309.14509). H must be a multiple of S."""
        moved = _Exchange.apply(x_BLHN.unflatten(2, (self.size, -1)).movedim(2, 0), self)
        whole: Tensor = moved.movedim(0, 1).flatten(1, 2)
        return whole

    def tokens(self, y_BTHN: Tensor) -> Tensor:
        """The inverse of `heads`: [B, T, H / S, N] -> [B, L, H, N]."""
        moved = _Exchange.apply(y_BTHN.unflatten(1, (self.size, -1)).movedim(1, 0), self)
        mine: Tensor = moved.movedim(0, 2).flatten(2, 3)
        return mine

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, the same bits in each of them; no gradient."""
        summed = x.detach().clone()
        dist.all_reduce(summed, group=self.group)
        return summed


@dataclass(frozen=True)
class SequenceSlice:
    """A rank's slice of a batch: what its mixers know of the tokens before it.

    cu_seqlens: of the whole rows; None: each row is one document. documents: N, their number.
    first_B, last_B: int64, the document of the first and of the last token of the slice of each row.
    continues_B: bool, whether the first token continues a document of the slice before. passes_B: bool, whether all
        tokens are of this document.
    """

    group: SequenceGroup
    cu_seqlens: Tensor | None
    documents: int
    first_B: Tensor
    last_B: Tensor
    continues_B: Tensor
    passes_B: Tensor

    def before(self, x_BLD: Tensor, count: int) -> Tensor:
        """The last `count` tokens before the slice, [B, count, D], also of other documents; zeros in the first rank."""
        assert x_BLD.shape[1] >= count, "conflicts/parallel.py refuses shorter slices"
        rank = self.group.rank
        halo = self.group.gather(x_BLD[:, x_BLD.shape[1] - count :])[max(rank - 1, 0)]
        # The first rank too uses what it gathered: every rank has to call the exchange of the backward pass.
        return halo if rank > 0 else halo.masked_fill(torch.ones((), dtype=torch.bool, device=halo.device), 0)

    def states_before(self, final: Tensor, transition: Tensor, apply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The states before the documents as far as they are in the slice, [N, ...]: zeros for those that start in it.

        final: [N, ...], the states after them from starts at zero. transition: [B, ...], of each row's whole slice.
        apply: the product of a state and a transition.
        """
        final, passes_B = final.index_select(0, self.last_B), self.passes_B.view(-1, *(1,) * (transition.ndim - 1))
        transition = transition.where(passes_B, 0)
        packed = self.group.gather(torch.cat([final.flatten(1), transition.flatten(1)], 1))
        finals, transitions = packed.split([final[0].numel(), transition[0].numel()], 2)
        state = finals[0].view_as(final)
        with torch.autocast(final.device.type, enabled=False):  # states are float32, and so are their products
            for rank in range(1, self.group.rank):
                state = apply(state, transitions[rank].view_as(transition)) + finals[rank].view_as(final)
        state = state.where(self.continues_B.view(-1, *(1,) * (final.ndim - 1)), 0)
        return state.new_zeros(self.documents, *state.shape[1:]).index_copy(0, self.first_B, state)


def slice_of(
    group: SequenceGroup, cu_seqlens: Tensor | None, rows: int, length: int, device: torch.device
) -> tuple[SequenceSlice, Tensor | None]:
    """A group's slice of rows of `length` tokens, and the cu_seqlens of the slice.

    cu_seqlens: of the whole rows; both are None where each row is one document. A document without tokens in the slice
    is empty there, so that no shape depends on values, for which the host would have to wait.
    """
    mine = length // group.size
    begins_B = torch.arange(rows, device=device) * length + group.rank * mine
    if cu_seqlens is None:
        continues_B = torch.full_like(begins_B, group.rank > 0, dtype=torch.bool)
        number_B = torch.arange(rows, device=device)
        return SequenceSlice(group, None, rows, number_B, number_B, continues_B, continues_B), None
    bounds = cu_seqlens.long()
    first_B = torch.searchsorted(bounds, begins_B, right=True) - 1
    last_B = torch.searchsorted(bounds, begins_B + mine - 1, right=True) - 1
    continues_B = bounds[first_B] < begins_B
    passes_B = continues_B & (first_B == last_B)
    here = bounds // length * mine + (bounds % length - group.rank * mine).clamp(0, mine)
    sequence = SequenceSlice(group, cu_seqlens, len(bounds) - 1, first_B, last_B, continues_B, passes_B)
    return sequence, here.to(cu_seqlens)


class _Gather(torch.autograd.Function):
    """The x of every rank; backward, the sum of the gradients that the ranks have for this rank's x, in rank order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(group.size, *x.shape)
        dist.all_gather(list(gathered), x.contiguous(), group=group.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group).sum(0), None


class _Exchange(torch.autograd.Function):
    """Part i of x [S, ...] goes to rank i; the result has the parts from all ranks. Its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(x: Tensor, group: SequenceGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group.group)
    return received
