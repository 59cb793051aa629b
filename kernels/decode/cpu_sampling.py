"""Draws a token of each row from its logits, with the token's log probability, in one call for all rows."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from cdrmix.kernels.common.elementwise import array, compiled, exp, with_sums

BLOCK = 64  # probabilities that are summed at once, so that a row's sum is no chain of additions


@with_sums
def _sum(x, first, end):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(first, end):
        total += np.float64(x[i])
    return total


@compiled
def _exponentials(x, most, temperature, y):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        y[i] = exp((x[i] - most) / temperature)


@compiled
def _choose(logits, points, tokens, log_probs, temperature, weights, sums):  # type: ignore[no-untyped-def]
    batch, V = logits.shape
    for row in range(batch):
        best = 0
        for i in range(1, V):
            if logits[row, i] > logits[row, best]:
                best = i
        most = logits[row, best]
        _exponentials(logits[row], most, temperature, weights)
        total = 0.0
        for block in range(len(sums)):
            sums[block] = _sum(weights, block * BLOCK, min(V, (block + 1) * BLOCK))
            total += sums[block]
        token = best
        if len(points):
            point, sofar, block = points[row] * total, 0.0, 0
            while block + 1 < len(sums) and sofar + sums[block] <= point:
                sofar += sums[block]
                block += 1
            for i in range(block * BLOCK, min(V, (block + 1) * BLOCK)):
                if weights[i] > 0:
                    token = i
                    sofar += np.float64(weights[i])
                    if sofar > point:
                        break
        tokens[row] = token
        log_probs[row] = (logits[row, token] - most) / temperature - math.log(total)


def choose(logits_BV: Tensor, temperature: float, points_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """int64 tokens [B] and float32 log probabilities [B], from contiguous float32 logits.

    points: float64 in [0, 1), for the inverse of the distribution function, as in `cdrmix.inference.sampling.inverse`;
    None: the most probable token, of equal ones the first, and temperature 1. A logit that is NaN or infinite gives a
    log probability of NaN.
    """
    batch, V = logits_BV.shape
    tokens, log_probs = torch.empty(batch, dtype=torch.int64), torch.empty(batch)
    points = np.empty(0) if points_B is None else points_B.contiguous().numpy()
    weights, sums = np.empty(V, np.float32), np.empty(-(-V // BLOCK))
    by = np.float32(1 if points_B is None else temperature)
    _choose(array(logits_BV, batch, V), points, tokens.numpy(), log_probs.numpy(), by, weights, sums)
    return tokens, log_probs
