"""Tensor parallelism: the ranks of a group each compute a share of the channels, heads and ids of the same tokens.

A branch of a block reads the whole residual stream. Its first matrices are divided by their outputs, its last one by
its inputs, so each rank has a part of a sum over channels, and one sum over the ranks gives the branch's output. In the
backward pass the same holds for the input: each rank has a part of its gradient (arXiv 1909.08053, section 3). All
ranks get the same bits from such a sum, so the parts that every rank computes whole, such as routers, agree.

A parameter that every rank holds whole has a part of its gradient in each rank if it is used behind `copied`. Such a
parameter has to go through `copied` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdrmix.kernels.common.products import add_product, mm
from cdrmix.ops.weights import compute_weight

MOST_LOGITS = 1 << 24  # of the loss in memory at once
MOST_ROWS = 1 << 13  # of a chunk; PyTorch sums fewer than 32,768 numbers on one thread, always in the same order


@dataclass(frozen=True)
class Cut:
    """How a parameter is divided: along `dim`, each of the consecutive `segments` of it by itself.

    segments: their widths in the whole parameter; None: it is one.
    """

    dim: int
    segments: tuple[int, ...] | None = None

    def share(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The part of a whole parameter that a rank holds."""
        segments = whole.split(self._segments(whole.shape[self.dim]), self.dim)
        return torch.cat([segment.chunk(size, self.dim)[rank] for segment in segments], self.dim)

    def whole(self, shares: Sequence[Tensor]) -> Tensor:
        """The whole parameter from the parts of all ranks, in their order."""
        size = len(shares)
        widths = [width // size for width in self._segments(size * shares[0].shape[self.dim])]
        parts = zip(*(share.split(widths, self.dim) for share in shares), strict=True)
        return torch.cat([part for segment in parts for part in segment], self.dim)

    def whole_shape(self, share: torch.Size, size: int) -> torch.Size:
        """The shape of the whole parameter."""
        return torch.Size([*share[: self.dim], share[self.dim] * size, *share[self.dim + 1 :]])

    def _segments(self, width: int) -> list[int]:
        return [width] if self.segments is None else list(self.segments)


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that compute the same tokens, seen from one of them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def reduce_(self, x: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """The sum of the ranks' x, the same bits in each; in place."""
        dist.all_reduce(x, operation, self.group)
        return x

    def copied(self, x: Tensor) -> Tensor:
        """x, which all ranks hold, for a use in which each computes a part: the gradient is the sum of theirs."""
        copy: Tensor = _Copied.apply(x, self)
        return copy

    def summed(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x. Its gradient is each rank's."""
        total: Tensor = _Summed.apply(x, self)
        return total


class Divisible(nn.Module):
    """A module that can be divided among the ranks of a group.

    tensor: the group; None: this rank has the whole module.
    """

    tensor: TensorGroup | None = None

    def cuts(self) -> Mapping[str, Cut]:
        """The parameters that are divided, by name in the module; the others stay whole in every rank."""
        raise NotImplementedError

    def narrow(self, size: int) -> None:
        """Divides the module's own numbers, such as that of its heads, by the number of ranks."""

    def copied(self, x: Tensor) -> Tensor:
        """`TensorGroup.copied`, in a divided module."""
        return x if self.tensor is None else self.tensor.copied(x)

    def summed(self, x: Tensor) -> Tensor:
        """`TensorGroup.summed`, in a divided module."""
        return x if self.tensor is None else self.tensor.summed(x)

    def copied_parameters(self, *parameters: Tensor) -> Sequence[Tensor]:
        """Parameters that are whole in every rank, for uses behind `copied`: one sum for all of them."""
        if self.tensor is None:
            return parameters
        flat = self.copied(torch.cat([parameter.flatten() for parameter in parameters]))
        parts = flat.split([parameter.numel() for parameter in parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]


@torch.no_grad()
def divide(part: nn.Module, group: TensorGroup) -> None:
    """Keeps this rank's share of a part of a model. DeepSpeed counts a parameter with `tensor_model_parallel` in every
    rank for the gradient norm, and others in the first rank only."""
    for module in part.modules():
        if not isinstance(module, Divisible):
            continue
        for name, cut in module.cuts().items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            share = nn.Parameter(cut.share(getattr(owner, leaf).detach(), group.rank, group.size).clone())
            share.tensor_model_parallel, share.cut = True, cut  # type: ignore[attr-defined]
            setattr(owner, leaf, share)
        module.tensor = group
        module.narrow(group.size)


def cut_of(parameter: Tensor) -> Cut | None:
    """How a parameter is divided; None: every rank holds it whole."""
    return getattr(parameter, "cut", None)


def cross_entropy(hidden_RD: Tensor, weight_VD: Tensor, targets: Tensor, weights: Tensor, group: TensorGroup) -> Tensor:
    """`ops.linear_cross_entropy` with this rank's rows of the head: the weighted sum of cross-entropies, in nats.

    hidden: [R, D], whole in every rank. weight: [V / size, D]. targets: int64 [R] or [S, R], ids of the whole
    vocabulary. weights: of their shape; a row without a weight other than 0 gets gradients of zero, whatever its hidden
    state. Returns a scalar, or [S]; the same bits in every rank. The gradients are computed in the forward pass, and
    all sets must get the same gradient.
    """
    sets = targets.ndim == 2
    if not sets:
        targets, weights = targets.unsqueeze(0), weights.unsqueeze(0)
    loss_S: Tensor = _CrossEntropy.apply(hidden_RD, weight_VD, targets, weights, group)
    return loss_S if sets else loss_S.squeeze(0)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.reduce_(gradients[0].clone(memory_format=torch.contiguous_format)), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return group.reduce_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _CrossEntropy(torch.autograd.Function):
    """The loss and both gradients, over chunks of rows. The gradient of the hidden states is summed over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, weight_VD: Tensor, targets_SR: Tensor, weights_SR: Tensor, group: TensorGroup
    ) -> Tensor:
        device = hidden_RD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_RD.dtype
        wide = torch.float64 if hidden_RD.dtype == torch.float64 else torch.float32
        narrow_VD = compute_weight(weight_VD, dtype)
        rows = len(weight_VD)
        hidden_gradient = torch.empty_like(hidden_RD, dtype=wide)
        weight_gradient = torch.zeros_like(weight_VD, dtype=wide)
        losses = []
        step = min(MOST_ROWS, max(1, MOST_LOGITS // rows))
        with torch.autocast(device, enabled=False):
            for hidden, targets, weights, gradient in zip(
                hidden_RD.detach().to(dtype).split(step),
                (targets_SR - group.rank * rows).split(step, 1),
                weights_SR.to(wide).split(step, 1),
                hidden_gradient.split(step),
                strict=True,
            ):
                hidden = hidden.masked_fill(~(weights != 0).any(0).unsqueeze(1), 0)
                logits = mm(hidden, narrow_VD.mT).to(wide)
                largest = group.reduce_(logits.amax(1), dist.ReduceOp.MAX)
                mine = (targets >= 0) & (targets < rows)
                index = targets.clamp(0, rows - 1)
                found = torch.where(mine, logits.gather(1, index.mT).mT, 0.0)  # [S, chunk]
                logits = logits.sub_(largest.unsqueeze(1)).exp_()
                sums = group.reduce_(torch.cat([logits.sum(1).unsqueeze(0), found]))
                normalizer = sums[0].log() + largest
                losses.append((weights * (normalizer - sums[1:])).sum(1))
                logits.mul_((weights.sum(0) / sums[0]).unsqueeze(1))
                logits.scatter_add_(1, index.mT, -torch.where(mine, weights, 0.0).mT)
                gradient.copy_(mm(logits.to(dtype), narrow_VD))
                add_product(weight_gradient, logits.to(dtype), hidden)
            group.reduce_(hidden_gradient)
        ctx.save_for_backward(hidden_gradient.to(hidden_RD.dtype), weight_gradient.to(weight_VD.dtype))
        return torch.stack(losses).sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        factor = gradients[0][0]
        hidden_gradient, weight_gradient = (each * factor.to(each.dtype) for each in ctx.saved_tensors)
        return hidden_gradient, weight_gradient, None, None, None
