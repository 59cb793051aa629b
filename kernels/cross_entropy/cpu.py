"""Cross-entropy of a linear map on a CPU: the products of `reference_loss`, with a fused kernel for the logits.

The kernel gets the maximum of each row, and then reads and writes the logits twice, each row on one thread. Plain
PyTorch takes twice as long (512 x 4,096 logits, benchmarks/LOG.md).
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from cdrmix.kernels.common.elementwise import ONE, ZERO, array, exp, run, with_sums
from cdrmix.kernels.cross_entropy import reference as reference_loss

ROWS = 8  # rows that a thread takes at a time
PIECE = 512  # a row is summed in pieces of so many logits, which keeps float32's accuracy


@with_sums
def _softmax_rows(first, stride, logits, tops, targets, scales, z_loss, smoothing, wants_gradient, losses):  # type: ignore[no-untyped-def]
    rows, V = logits.shape
    chosen, even = ONE - smoothing, smoothing / np.float32(V)
    for block in range(first * ROWS, rows, stride * ROWS):
        for row in range(block, min(block + ROWS, rows)):
            top, total, shift_total = tops[row], ZERO, ZERO
            for target_set in range(targets.shape[1]):
                losses[row, target_set] = (logits[row, targets[row, target_set]] - top) * chosen
            for start in range(0, V, PIECE):
                # A slice: LLVM does not know that start + v >= 0, and would not vectorize logits[row, start + v].
                values, some, some_shifts = logits[row, start : start + PIECE], ZERO, ZERO
                for v in range(len(values)):
                    shift = values[v] - top
                    some_shifts += shift
                    exponential = exp(shift)
                    some += exponential
                    values[v] = exponential
                total += some
                shift_total += some_shifts
            log_total = np.float32(math.log(total))
            lse, both = top + log_total, ZERO
            for target_set in range(targets.shape[1]):
                score = losses[row, target_set]
                if smoothing > ZERO:  # otherwise a logit of -inf would give 0 * inf
                    score += even * shift_total
                scale = scales[row, target_set]
                losses[row, target_set] = scale * (log_total - score + z_loss * lse * lse)
                both += scale
            if wants_gradient:
                factor, away = both * (ONE + np.float32(2) * z_loss * lse) / total, both * even
                for v in range(V):
                    logits[row, v] = logits[row, v] * factor - away
                for target_set in range(targets.shape[1]):
                    logits[row, targets[row, target_set]] -= scales[row, target_set] * chosen


def softmax_rows(
    logits_NV: Tensor,
    targets_NK: Tensor,
    scales_NK: Tensor,
    *,
    z_loss: float,
    label_smoothing: float,
    wants_gradient: bool,
) -> Tensor:
    """As `reference_loss.softmax_rows`, in float32, which the products also accumulate in."""
    assert logits_NV.dtype == torch.float32
    losses_NK = torch.empty_like(scales_NK, memory_format=torch.contiguous_format)
    tensors = logits_NV, logits_NV.amax(-1), targets_NK.contiguous(), scales_NK.contiguous()
    numbers = np.float32(z_loss), np.float32(label_smoothing)
    arrays = (array(x, *x.shape) for x in tensors)
    run(_softmax_rows, logits_NV.numel(), *arrays, *numbers, wants_gradient, array(losses_NK, *losses_NK.shape))
    return losses_NK


cross_entropy_forward = functools.partial(reference_loss.cross_entropy_forward, softmax_rows=softmax_rows)
