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
from cdrmix.model.initial_values import narrowed
from cdrmix.ops.cross_entropy import check_targets, unit_of
from cdrmix.ops.weights import compute_weight

IGNORED = -100  # a target that does not count, as of `ops.linear_cross_entropy`
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
        return whole.index_select(self.dim, self.indices(whole.shape[self.dim], rank, size).to(whole.device))

    def indices(self, width: int, rank: int, size: int) -> Tensor:
        """The indices along `dim` that a rank holds of a parameter of this width."""
        segments = torch.arange(width, device="cpu").split(self._segments(width))
        return torch.cat([segment.chunk(size)[rank] for segment in segments])

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
        """The parameters that are divided, by name in the module; the others stay whole in every rank, as all do in a
        module that does not override this. Reads no shapes: parameters that ZeRO-3 has partitioned have none."""
        return {}

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
    for name, cut in cuts_of(part).items():
        path, _, leaf = name.rpartition(".")
        owner = part.get_submodule(path)
        whole = getattr(owner, leaf)
        share = narrowed(whole, cut.dim, cut.indices(whole.shape[cut.dim], group.rank, group.size))
        share.tensor_model_parallel, share.cut = True, cut  # type: ignore[attr-defined]
        setattr(owner, leaf, share)
    for module in part.modules():
        if isinstance(module, Divisible):
            module.tensor = group
            module.narrow(group.size)


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """How each parameter of a model is divided, or would be, by name. Those that stay whole are left out."""
    return {
        f"{prefix}.{name}" if prefix else name: cut_of(module.get_parameter(name)) or cut
        for prefix, module in model.named_modules()
        if isinstance(module, Divisible)
        for name, cut in module.cuts().items()
    }


def cut_of(parameter: Tensor) -> Cut | None:
    """How a parameter is divided; None: every rank holds it whole."""
    return getattr(parameter, "cut", None)


def cross_entropy(hidden_RD: Tensor, weight_VD: Tensor, targets: Tensor, weights: Tensor, group: TensorGroup) -> Tensor:
    """The weighted sum of cross-entropies, in nats, with this rank's rows of the head; as `ops.linear_cross_entropy`
    computes it, without smoothing and z-loss.

    hidden: [R, D], whole in every rank. weight: [V / size, D]. targets: int64 [R] or [S, R], ids of the whole
    vocabulary, or IGNORED. weights: of their shape; a row without a target that counts gets gradients of zero, whatever
    its hidden state. Returns a scalar, or [S]; the same bits in every rank. The gradients are computed in the forward
    pass, and all sets must get the same gradient. Raises ValueError for a target outside the vocabulary where
    `ops.linear_cross_entropy` does.
    """
    if type(targets) is Tensor:  # not one of a trace, which has no values
        check_targets(targets, group.size * len(weight_VD), IGNORED)
    sets = targets.ndim == 2
    if not sets:
        targets, weights = targets.unsqueeze(0), weights.unsqueeze(0)
    wide = torch.promote_types(hidden_RD.dtype, torch.float32)
    weights = weights.to(wide).masked_fill(targets == IGNORED, 0)
    unit = unit_of(weights, wide)  # the gradients are rounded to 16 bits with weights of at most 1
    wanted = torch.is_grad_enabled() and (hidden_RD.requires_grad or weight_VD.requires_grad)
    loss_S: Tensor = _CrossEntropy.apply(hidden_RD, weight_VD, targets, weights / unit, group, wanted) * unit
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
    """The losses [S], and if wanted both gradients of their sum, over chunks of rows. The gradient of the hidden states
    is summed over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        targets_SR: Tensor,
        weights_SR: Tensor,
        group: TensorGroup,
        wanted: bool,
    ) -> Tensor:
        device, wide, rows = hidden_RD.device.type, weights_SR.dtype, len(weight_VD)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_RD.dtype
        narrow_VD, narrow_RD = compute_weight(weight_VD, dtype), hidden_RD.detach().to(dtype)
        hidden_gradient = hidden_RD.new_empty(hidden_RD.shape if wanted else 0, dtype=wide)
        weight_gradient = weight_VD.new_zeros(weight_VD.shape if wanted else 0, dtype=wide)
        losses = weights_SR.new_zeros(len(weights_SR))
        size = min(MOST_ROWS, max(1, MOST_LOGITS // rows))
        with torch.autocast(device, enabled=False):
            for chunk in (slice(first, first + size) for first in range(0, len(hidden_RD), size)):
                weights, targets = weights_SR[:, chunk], targets_SR[:, chunk] - group.rank * rows
                hidden = narrow_RD[chunk].masked_fill(~(weights != 0).any(0).unsqueeze(1), 0)
                logits = mm(hidden, narrow_VD.mT).to(wide)
                largest = group.reduce_(logits.amax(1), dist.ReduceOp.MAX)
                mine = (targets >= 0) & (targets < rows)
                index = targets.clamp(0, rows - 1).mT
                found = logits.gather(1, index).mT.where(mine, 0)  # of the targets, in the rank that has them
                logits.sub_(largest.unsqueeze(1)).exp_()
                sums = group.reduce_(torch.cat([logits.sum(1).unsqueeze(0), found]))
                losses += (weights * (sums[0].log() + largest - sums[1:])).sum(1)
                if wanted:
                    logits.mul_((weights.sum(0) / sums[0]).unsqueeze(1))
                    logits.scatter_add_(1, index, -weights.where(mine, 0).mT)
                    hidden_gradient[chunk] = mm(logits.to(dtype), narrow_VD)
                    add_product(weight_gradient, logits.to(dtype), hidden)
        if wanted:
            group.reduce_(hidden_gradient)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.dtypes = hidden_RD.dtype, weight_VD.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        factor = gradients[0][0]
        made = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *((gradient * factor).to(dtype) for gradient, dtype in made), None, None, None, None
