"""The residual sum and its norm on a CPU: float32, row by row, each tensor read once and written once.

The formulas are in `reference.py`. Rows are processed in pieces of ROWS, each on one thread. The gradients of weight
and bias are summed within a piece, and then over the pieces in order, so no bit depends on the number of threads.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from cdrmix.kernels.common.elementwise import ONE, ZERO, array, run, with_sums

LIGHT = 8  # an element takes an eighth of other kernels' time, so a second thread pays from 8 times as many elements on
ROWS = 128  # of a piece: partial sums take 1/128 of a tensor, and sums of 128 terms keep float32's accuracy


@with_sums
def _forward(first, stride, x, y, weight, bias, eps, centred, has_y, has_bias, total, normed, statistics):  # type: ignore[no-untyped-def]
    rows, width = x.shape
    count = np.float32(width)
    for piece in range(first * ROWS, rows, stride * ROWS):
        for row in range(piece, min(piece + ROWS, rows)):
            mean, square = ZERO, ZERO
            if has_y:
                for j in range(width):
                    here = x[row, j] + y[row, j]
                    total[row, j] = here
                    mean += here
            elif centred:
                for j in range(width):
                    mean += total[row, j]
            mean = mean / count if centred else ZERO
            if centred:
                statistics[1, row] = mean
            for j in range(width):
                square += (total[row, j] - mean) * (total[row, j] - mean)
            inverse = ONE / np.float32(math.sqrt(square / count + eps))
            statistics[0, row] = inverse
            if has_bias:
                for j in range(width):
                    normed[row, j] = (total[row, j] - mean) * inverse * weight[j] + bias[j]
            else:
                for j in range(width):
                    normed[row, j] = (total[row, j] - mean) * inverse * weight[j]


@with_sums
def _backward(  # type: ignore[no-untyped-def]
    first, stride, dnormed, dtotal, total, weight, statistics, has_dtotal, centred, has_bias, dx, partial
):
    rows, width = total.shape
    count = np.float32(width)
    for piece in range(first * ROWS, rows, stride * ROWS):
        sums = partial[piece // ROWS]
        sums[:] = ZERO
        for row in range(piece, min(piece + ROWS, rows)):
            inverse, mean = statistics[0, row], ZERO
            if centred:
                mean = statistics[1, row]
            along, across = ZERO, ZERO
            if has_bias:
                for j in range(width):
                    standard = (total[row, j] - mean) * inverse
                    gradient = dnormed[row, j] * weight[j]
                    along += gradient * standard
                    across += gradient
                    sums[0, j] += dnormed[row, j] * standard
                    sums[1, j] += dnormed[row, j]
            else:
                for j in range(width):
                    standard = (total[row, j] - mean) * inverse
                    gradient = dnormed[row, j] * weight[j]
                    along += gradient * standard
                    across += gradient
                    sums[0, j] += dnormed[row, j] * standard
            along /= count
            across = across / count if centred else ZERO
            if has_dtotal:
                for j in range(width):
                    standard = (total[row, j] - mean) * inverse
                    dx[row, j] = (dnormed[row, j] * weight[j] - across - standard * along) * inverse + dtotal[row, j]
            else:
                for j in range(width):
                    standard = (total[row, j] - mean) * inverse
                    dx[row, j] = (dnormed[row, j] * weight[j] - across - standard * along) * inverse


@with_sums
def _sum_pieces(partial, total):  # type: ignore[no-untyped-def]
    total[:] = ZERO
    for piece in range(partial.shape[0]):
        for j in range(partial.shape[1]):
            total[j] += partial[piece, j]


def add_norm_forward(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, *, eps: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + y (empty without y), its norm, and statistics for the backward pass; dtype is float32."""
    assert dtype == torch.float32
    width = x.shape[-1]
    rows = x.numel() // width
    total = x.new_empty(0) if y is None else torch.empty_like(x)
    normed, statistics = torch.empty_like(x), x.new_empty(2 if centred else 1, rows)
    tensors = (array(x, rows, width), array(x if y is None else y, rows, width))
    parameters = (array(weight, width), array(weight if bias is None else bias, width))
    flags = np.float32(eps), centred, y is not None, bias is not None
    results = (array(x if y is None else total, rows, width), array(normed, rows, width))
    run(_forward, x.numel() // LIGHT, *tensors, *parameters, *flags, *results, array(statistics, *statistics.shape))
    return total, normed, statistics


def add_norm_backward(
    dnormed: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    statistics: Tensor,
    *,
    has_bias: bool,
    y_dtype: torch.dtype | None,
    wants_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dy (empty, because y is float32 as x is), and dweight and dbias [1 or 2, D]."""
    assert y_dtype is None
    width = total.shape[-1]
    rows = total.numel() // width
    count = 2 if has_bias else 1
    dx, sums = torch.empty_like(total), total.new_empty(count, width)
    partial = total.new_empty(-(-rows // ROWS), count, width)
    given = (array(x, rows, width) for x in (dnormed, dnormed if dtotal is None else dtotal, total))
    parameters = array(weight, width), array(statistics, *statistics.shape)
    flags = dtotal is not None, len(statistics) == 2, has_bias
    results = array(dx, rows, width), array(partial, *partial.shape)
    run(_backward, total.numel() // LIGHT, *given, *parameters, *flags, *results)
    _sum_pieces(array(partial, len(partial), count * width), array(sums, count * width))
    return dx, total.new_empty(0), sums
