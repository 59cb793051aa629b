"""The loss in plain PyTorch: the specification, the oracle, and the CPU path; a linear map and its cross-entropy.

Shapes: R rows (tokens with a target), D model, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy of a linear map, by blocks of tokens: gradients are made while a block's logits exist."""

    ROWS = 512  # tokens of one block: 512 x 50,272 float32 logits are 103 MB

    @staticmethod
    def forward(ctx, hidden_RD, weight_VD, targets_R, weights_R):  # type: ignore[no-untyped-def]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        accumulate = torch.promote_types(hidden_RD.dtype, torch.float32)
        losses = weights_R.new_empty(targets_R.numel(), dtype=accumulate)
        dhidden = torch.empty_like(hidden_RD) if needs_hidden else None
        dweight = torch.zeros_like(weight_VD, dtype=accumulate) if needs_weight else None
        for start in range(0, targets_R.numel(), _LinearCrossEntropy.ROWS):
            span = slice(start, start + _LinearCrossEntropy.ROWS)
            target = targets_R[span].unsqueeze(-1)
            logits = (hidden_RD[span] @ weight_VD.mT).to(accumulate)
            logits -= logits.amax(-1, keepdim=True)
            chosen = logits.gather(-1, target)
            exponentials = logits.exp_()
            total = exponentials.sum(-1, keepdim=True)
            losses[span] = (total.log() - chosen).squeeze(-1)
            if needs_hidden or needs_weight:
                scale = weights_R[span].unsqueeze(-1).to(accumulate)
                dlogits = exponentials.mul_(scale / total)
                dlogits.scatter_(-1, target, dlogits.gather(-1, target) - scale)
                dlogits = dlogits.to(hidden_RD.dtype)
                if dhidden is not None:
                    torch.mm(dlogits, weight_VD, out=dhidden[span])
                if dweight is not None:
                    dweight += dlogits.mT @ hidden_RD[span]
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight_dtype = weight_VD.dtype
        return (losses * weights_R.to(accumulate)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):  # type: ignore[no-untyped-def]
        dhidden, dweight = ctx.saved_tensors
        return (
            # In dloss's own precision: rounded to bfloat16 it would scale the whole gradient by up to 0.4 %.
            None if dhidden is None else (dhidden.to(dloss.dtype) * dloss).to(dhidden.dtype),
            None if dweight is None else (dweight * dloss).to(ctx.weight_dtype),
            None,
            None,
        )


def linear_cross_entropy(hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, weights_R: Tensor) -> Tensor:
    """sum_r weights_r (logsumexp(W h_r) - (W h_r)[target_r]), without the [R, V] logits in full.

    hidden_RD: [R, D]; weight_VD: [V, D]; targets_R: int64 [R] in [0, V); weights_R: [R], not differentiated.
    Returns a scalar, in float32 at least.
    """
    if not torch.is_grad_enabled():  # a Function is told which inputs require gradients, not whether they are wanted
        hidden_RD, weight_VD = hidden_RD.detach(), weight_VD.detach()
    return _LinearCrossEntropy.apply(hidden_RD, weight_VD, targets_R, weights_R)
