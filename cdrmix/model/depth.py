"""Mixture-of-Depths (arXiv 2404.02258): which tokens a branch of a block computes, and which it skips.

A branch adds sigmoid(s) f(x) to the residual stream of the tokens with s + b > 0, and nothing to that of the others. A
token's score s is a product of its own normed input, and b is a number that changes only between optimizer steps. So
the decision is causal, and the same in training, in evaluation and in generation. The paper's top-k over a row is not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdrmix.kernels.common.products import product_of_rows
from cdrmix.model.context import Context

FIRST_BIAS = 1.0  # of a new router, whose scores are 0: every token is kept


class Gated(NamedTuple):
    """The report of one router: tokens kept and all tokens (int64 scalars); in training the threshold of the score
    that would keep the configured share of these tokens, and the lowest score (float32 scalars, otherwise 0).
    Filling is no token."""

    kept: Tensor
    tokens: Tensor
    threshold: Tensor
    lowest: Tensor


class Gate(NamedTuple):
    """The decision of a router for T tokens: the factor of each token's output, sigmoid(s), [T] in float32 at least
    and with a gradient; whether it is kept, bool [T], which filling never is; the report."""

    weight_T: Tensor
    keep_T: Tensor
    gated: Gated


class DepthRouter(nn.Module):
    """Decides for each token whether a branch computes it: s + bias > 0, s = weight . x / sqrt(D), x the input.

    A step of AdamW changes each weight by the learning rate, so without the divisor s would change by the rate times D
    in the worst case, and so fast in the first steps that no bias could follow (benchmarks/LOG.md).

    capacity: the share of the tokens to keep, a mean over the global batch and not over each row.
    weight: [1, D], zero at first. bias: [1], a buffer: the same in every process under every ZeRO stage, and part of
        the weights in checkpoints and exports. Only `move` changes it, once an optimizer step.
    """

    bias: Tensor

    def __init__(self, d_model: int, capacity: float) -> None:
        super().__init__()
        self.capacity = capacity
        self.weight = nn.Parameter(torch.zeros(1, d_model))
        self.register_buffer("bias", torch.full((1,), FIRST_BIAS))

    def forward(self, x_TD: Tensor) -> Tensor:
        """x [T, D] -> scores [T, 1], float32 at least. `gate` is a separate method as `Router.route` is."""
        with torch.autocast(x_TD.device.type, enabled=False):
            x_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
            return product_of_rows(x_TD, self.weight.mT.to(x_TD.dtype)) * x_TD.shape[1] ** -0.5

    def gate(self, x_TD: Tensor, context: Context | None = None) -> Gate:
        """The decision for each position of x [T, D], the normed input of the branch. T may be 0.

        context: filling is not kept, and is in no count. Of a slice of rows, the threshold is that of whole rows. None:
            every position is a token of whole rows.
        """
        tokens, sequence = (None, None) if context is None else (context.tokens, context.group)
        score_T = self(x_TD).squeeze(1)
        with torch.no_grad():
            keep_T, scores_T, count = score_T + self.bias > 0, score_T.float(), len(score_T)
            if tokens is not None:
                keep_T, count = keep_T & tokens.is_token_R, len(tokens.places_N)
                scores_T = scores_T.masked_fill(~tokens.is_token_R, math.inf)  # sorted after those of all tokens
            kept, number = keep_T.sum(), torch.full((), count, device=keep_T.device)
            threshold = lowest = torch.zeros((), device=keep_T.device)
            if self.training and len(keep_T):
                scores = scores_T if sequence is None else sequence.gather(scores_T)
                sorted_R = scores.flatten().sort().values
                # Scores above the one at this place are kept, where no two are equal.
                if tokens is None:
                    place = min(max(round((1 - self.capacity) * len(sorted_R)) - 1, 0), len(sorted_R) - 1)
                    threshold = sorted_R[place]
                else:
                    whole = number if sequence is None else sequence.total(number)
                    place_1 = ((1 - self.capacity) * whole.double()).round().long().sub(1).clamp(min=0).reshape(1)
                    threshold = sorted_R.index_select(0, place_1).squeeze(0)  # an index would wait for the device
                lowest = sorted_R[0]
        return Gate(score_T.sigmoid(), keep_T, Gated(kept, number, threshold, lowest))

    @torch.no_grad()
    def move(self, threshold: float, lowest: float, released: float, rate: float) -> None:
        """One step of the bias towards the configured share of kept tokens.

        threshold, lowest: of `Gated`, means over the global batch. released: 0 to 1, from keeping all tokens to the
        configured share. rate: the part of the distance that the bias moves.
        """
        target = -(lowest + released * (threshold - lowest))
        self.bias += rate * (target - self.bias)


class DepthStats(NamedTuple):
    """The reports of all routers of the depth, stacked in the model's order, [G] each: see `Gated`."""

    kept_G: Tensor
    tokens_G: Tensor
    threshold_G: Tensor
    lowest_G: Tensor


def move_biases(model: nn.Module, threshold_G: Tensor, lowest_G: Tensor, released: float, rate: float) -> None:
    """`DepthRouter.move` of every router, in the model's order; the figures are means over a whole optimizer step."""
    routers = [module for module in model.modules() if isinstance(module, DepthRouter)]
    for router, threshold, lowest in zip(routers, threshold_G.tolist(), lowest_G.tolist(), strict=True):
        router.move(threshold, lowest, released, rate)
