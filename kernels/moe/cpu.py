"""The routed experts on a CPU: float32, one dense product for each matrix and expert, activations fused with weights.

The formulas are in `reference.py`, which also runs the other dtypes. An activation, with the element-wise work around
it, reads each row once and writes it once. The rows of one expert are in buffers that the next expert reuses, and are
added to their tokens at once, because new memory from the system costs more than the sums (32 MB: 25 ms when new, 3 ms
when written again). A token's rows are added in the order of the experts, and one thread adds a row, so the bits do not
depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cdrmix.kernels.common.elementwise import ZERO, array, compiled, run, sigmoid, with_sums
from cdrmix.kernels.common.products import FEW, mm, product_of_rows
from cdrmix.kernels.moe import reference as reference_moe

ROWS = 16  # rows that a thread takes at a time
TWO = np.float32(2)


@compiled
def _relu2(first, stride, z, weights, hidden):  # type: ignore[no-untyped-def]
    rows, width = hidden.shape
    for piece in range(first * ROWS, rows, stride * ROWS):
        for row in range(piece, min(piece + ROWS, rows)):
            for j in range(width):
                positive = z[row, j] if not z[row, j] < ZERO else ZERO  # NaN stays NaN; max() would drop it
                hidden[row, j] = weights[row] * positive * positive


@with_sums
def _relu2_backward(first, stride, z, weights, dhidden, hidden, dz, dweights):  # type: ignore[no-untyped-def]
    rows, width = hidden.shape
    for piece in range(first * ROWS, rows, stride * ROWS):
        for row in range(piece, min(piece + ROWS, rows)):
            weight, total = weights[row], ZERO
            for j in range(width):
                positive = z[row, j] if not z[row, j] < ZERO else ZERO  # NaN stays NaN; max() would drop it
                slope = positive * dhidden[row, j]
                total += slope * positive
                hidden[row, j] = weight * positive * positive
                dz[row, j] = TWO * weight * slope
            dweights[row] = total


@compiled
def _swiglu(first, stride, z, weights, hidden):  # type: ignore[no-untyped-def]
    rows, width = hidden.shape
    for piece in range(first * ROWS, rows, stride * ROWS):
        for row in range(piece, min(piece + ROWS, rows)):
            for j in range(width):
                gate = z[row, 2 * j]
                hidden[row, j] = weights[row] * z[row, 2 * j + 1] * gate * sigmoid(gate)[0]


@with_sums
def _swiglu_backward(first, stride, z, weights, dhidden, hidden, dz, dweights):  # type: ignore[no-untyped-def]
    rows, width = hidden.shape
    for piece in range(first * ROWS, rows, stride * ROWS):
        for row in range(piece, min(piece + ROWS, rows)):
            weight, total = weights[row], ZERO
            for j in range(width):
                gate, up = z[row, 2 * j], z[row, 2 * j + 1]
                share, _, slope = sigmoid(gate)
                silu = gate * share
                weighted = weight * dhidden[row, j]
                total += dhidden[row, j] * silu * up
                hidden[row, j] = weight * silu * up
                dz[row, 2 * j] = weighted * up * (share + gate * slope)
                dz[row, 2 * j + 1] = weighted * silu
            dweights[row] = total


@compiled
def _add_rows(first, stride, rows, tokens, total):  # type: ignore[no-untyped-def]
    """total[tokens[i]] += rows[i], for tokens that are all different."""
    count, width = rows.shape
    for piece in range(first * ROWS, count, stride * ROWS):
        for row in range(piece, min(piece + ROWS, count)):
            token = tokens[row]
            for j in range(width):
                total[token, j] += rows[row, j]


KERNELS = {"relu2": (_relu2, _relu2_backward), "swiglu": (_swiglu, _swiglu_backward)}


def _run(kernel: Any, *tensors: Tensor) -> None:
    """Runs a kernel over the rows of its first tensor."""
    run(kernel, tensors[0].numel(), *(array(x, *x.shape) for x in tensors))


def experts_forward(
    x_TD: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    weights_TK: Tensor,
    order_R: Tensor,
    counts_E: Tensor,
    *,
    activation: str,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """As `reference_moe.experts_forward`."""
    if x_TD.dtype != torch.float32:
        return reference_moe.experts_forward(
            x_TD, w_up, w_down, weights_TK, order_R, counts_E, activation=activation, recompute=recompute
        )
    k = weights_TK.shape[1]
    token_R = order_R.div(k, rounding_mode="floor")
    weights_R = weights_TK.view(-1).index_select(0, order_R)
    spans, longest = reference_moe.row_spans(counts_E)
    x = x_TD.new_empty(longest, x_TD.shape[1])
    z = x_TD.new_empty(len(order_R) if not recompute else longest, w_up.shape[2])
    hidden = x_TD.new_empty(longest, w_down.shape[1])
    y, y_TD = torch.empty_like(x), torch.zeros_like(x_TD)
    for expert, span in enumerate(spans):
        rows = span.stop - span.start
        if rows:
            z_here, hidden_here = z[span] if not recompute else z[:rows], hidden[:rows]
            torch.index_select(x_TD, 0, token_R[span], out=x[:rows])
            _product(x[:rows], w_up[expert], z_here)
            _run(KERNELS[activation][0], z_here, weights_R[span], hidden_here)
            _product(hidden_here, w_down[expert], y[:rows])
            _run(_add_rows, y[:rows], token_R[span], y_TD)
    if not recompute:
        z[spans[-1].stop :] = 0
    return y_TD, z if not recompute else z.new_empty(0)


def _product(x_RI: Tensor, w_IO: Tensor, out_RO: Tensor) -> None:
    """out = x w; in a forward pass the bits of a row do not depend on the number of rows."""
    if len(x_RI) >= FEW:
        mm(x_RI, w_IO, out=out_RO)
    else:
        out_RO.copy_(product_of_rows(x_RI, w_IO))


def experts_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    weights_TK: Tensor,
    order_R: Tensor,
    counts_E: Tensor,
    z: Tensor,
    up_sum: Tensor | None = None,
    down_sum: Tensor | None = None,
    *,
    activation: str,
    recompute: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference_moe.experts_backward`."""
    if x_TD.dtype != torch.float32:
        sums = up_sum, down_sum
        return reference_moe.experts_backward(
            dy_TD,
            x_TD,
            w_up,
            w_down,
            weights_TK,
            order_R,
            counts_E,
            z,
            *sums,
            activation=activation,
            recompute=recompute,
        )
    k = weights_TK.shape[1]
    token_R = order_R.div(k, rounding_mode="floor")
    weights_R = weights_TK.view(-1).index_select(0, order_R)
    dweights_R = torch.zeros_like(weights_R)
    spans, longest = reference_moe.row_spans(counts_E)
    _, width, columns = w_up.shape
    x, dy = x_TD.new_empty(longest, width), x_TD.new_empty(longest, width)
    hidden, dhidden = x_TD.new_empty(longest, w_down.shape[1]), x_TD.new_empty(longest, w_down.shape[1])
    dz, z_again = x_TD.new_empty(longest, columns), x_TD.new_empty(0 if not recompute else longest, columns)
    dx, dx_TD = torch.empty_like(x), torch.zeros_like(x_TD)
    dw_up, dw_down = reference_moe.gradient_like(w_up, up_sum), reference_moe.gradient_like(w_down, down_sum)
    for expert, span in enumerate(spans):
        rows = span.stop - span.start
        if not rows:
            for dw, total in ((dw_up, up_sum), (dw_down, down_sum)):
                if total is None:
                    dw[expert] = 0
            continue
        x_here, dy_here, z_here = x[:rows], dy[:rows], z[span] if not recompute else z_again[:rows]
        hidden_here, dhidden_here, dz_here = hidden[:rows], dhidden[:rows], dz[:rows]
        torch.index_select(x_TD, 0, token_R[span], out=x_here)
        torch.index_select(dy_TD, 0, token_R[span], out=dy_here)
        if recompute:
            mm(x_here, w_up[expert], out=z_here)
        mm(dy_here, w_down[expert].mT, out=dhidden_here)
        weights, dweights = weights_R[span], dweights_R[span]
        _run(KERNELS[activation][1], z_here, weights, dhidden_here, hidden_here, dz_here, dweights)
        reference_moe.weight_product(hidden_here, dy_here, expert, dw_down, down_sum)
        reference_moe.weight_product(x_here, dz_here, expert, dw_up, up_sum)
        mm(dz_here, w_up[expert].mT, out=dx[:rows])
        _run(_add_rows, dx[:rows], token_R[span], dx_TD)
    dweights_TK = torch.empty_like(weights_TK)
    dweights_TK.view(-1)[order_R] = dweights_R
    return dx_TD, dw_up, dw_down, dweights_TK


dispatch = reference_moe.dispatch
product_forward, product_backward = reference_moe.product_forward, reference_moe.product_backward


def combine(y_RD: Tensor, order_R: Tensor, counts_E: Tensor, k: int) -> Tensor:
    """As `reference_moe.combine`, with the same bits, and in one pass over the rows where no route is dropped."""
    if y_RD.dtype != torch.float32 or int(counts_E.sum()) < len(order_R) or not len(order_R):
        return reference_moe.combine(y_RD, order_R, counts_E, k)
    return functional.embedding_bag(reference_moe.inverse_order(order_R).view(-1, k), y_RD, mode="sum")
