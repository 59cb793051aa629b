"""The element-wise work around RWKV-7's recurrence on a CPU: float32, each tensor read once and written once.

The formulas are in `reference.py`. The backward passes compute every sigmoid, norm and mean again from the inputs.
Tensors are [B T H, K], one row a token and head; parameters are [H, K] or [n, H, K]. Tokens are processed in pieces of
TOKENS, each on one thread. Parameters' gradients are summed within a piece, and then over the pieces in order, so no
bit depends on the number of threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdrmix.kernels.common.elementwise import ONE, ZERO, array, compiled, run, sigmoid, with_sums

TOKENS = 128  # of a piece: partial sums take 1/128 of a tensor, and sums of 128 terms keep float32's accuracy

NORMALISE_EPS = np.float32(1e-12)  # of torch.nn.functional.normalize
DECAY = np.float32(-math.exp(-0.5))


@compiled
def _streams_forward(first, stride, x, mixes, last, starts, length, s0, s1, s2, s3, s4, s5):  # type: ignore[no-untyped-def]
    tokens, width = x.shape
    before = np.empty(width, np.float32)
    for piece in range(first * TOKENS, tokens, stride * TOKENS):
        for t in range(piece, min(piece + TOKENS, tokens)):
            # Loops, since numba compiles the error message of `before[:] = row` for two seconds.
            if starts[t]:
                for j in range(width):
                    before[j] = ZERO
            elif t % length == 0:
                for j in range(width):
                    before[j] = last[t // length, j]
            elif t == piece:
                for j in range(width):
                    before[j] = x[t - 1, j]
            for j in range(width):
                here = x[t, j]
                difference = before[j] - here
                s0[t, j] = here + difference * mixes[0, j]
                s1[t, j] = here + difference * mixes[1, j]
                s2[t, j] = here + difference * mixes[2, j]
                s3[t, j] = here + difference * mixes[3, j]
                s4[t, j] = here + difference * mixes[4, j]
                s5[t, j] = here + difference * mixes[5, j]
                before[j] = here


@compiled
def _streams_backward(  # type: ignore[no-untyped-def]
    first, stride, d0, d1, d2, d3, d4, d5, x, mixes, last, starts, length, dx, dlast, partial
):
    """From the last token of a piece to its first; `later`: gradients that the next token adds to this one."""
    tokens, width = x.shape
    before, later = np.empty(width, np.float32), np.empty(width, np.float32)
    for piece in range(first * TOKENS, tokens, stride * TOKENS):
        dmixes = partial[piece // TOKENS]
        dmixes[:] = ZERO
        end = min(piece + TOKENS, tokens)
        for j in range(width):
            later[j] = ZERO
        if end < tokens and end % length != 0 and not starts[end]:
            for j in range(width):
                later[j] = (d0[end, j] * mixes[0, j] + d1[end, j] * mixes[1, j] + d2[end, j] * mixes[2, j]) + (
                    d3[end, j] * mixes[3, j] + d4[end, j] * mixes[4, j] + d5[end, j] * mixes[5, j]
                )
        for t in range(end - 1, piece - 1, -1):
            alone = starts[t]
            if alone:
                for j in range(width):
                    before[j] = ZERO
            elif t % length == 0:
                for j in range(width):
                    before[j] = last[t // length, j]
            else:
                for j in range(width):
                    before[j] = x[t - 1, j]
            for j in range(width):
                e0, e1, e2, e3, e4, e5 = d0[t, j], d1[t, j], d2[t, j], d3[t, j], d4[t, j], d5[t, j]
                shifted = (e0 * mixes[0, j] + e1 * mixes[1, j] + e2 * mixes[2, j]) + (
                    e3 * mixes[3, j] + e4 * mixes[4, j] + e5 * mixes[5, j]
                )
                difference = before[j] - x[t, j]
                dx[t, j] = ((e0 + e1 + e2) + (e3 + e4 + e5) - shifted) + later[j]
                later[j] = shifted
                dmixes[0, j] += e0 * difference
                dmixes[1, j] += e1 * difference
                dmixes[2, j] += e2 * difference
                dmixes[3, j] += e3 * difference
                dmixes[4, j] += e4 * difference
                dmixes[5, j] += e5 * difference
            if t % length == 0:
                for j in range(width):
                    dlast[t // length, j] = ZERO if alone else later[j]
            if alone or t % length == 0:
                for j in range(width):
                    later[j] = ZERO


@with_sums
def _keys_forward(first, stride, k, decay, rate, w0, a0, k_k, k_a, log_w, new_k, a, b):  # type: ignore[no-untyped-def]
    rows, head_size = k.shape
    heads = w0.shape[0]
    piece = TOKENS * heads
    for start in range(first * piece, rows, stride * piece):
        for row in range(start, min(start + piece, rows)):
            head = row % heads
            square = ZERO
            for j in range(head_size):
                removal_key = k[row, j] * k_k[head, j]
                square += removal_key * removal_key
            norm = np.float32(math.sqrt(square))
            inverse = ONE / NORMALISE_EPS if norm < NORMALISE_EPS else ONE / norm
            for j in range(head_size):
                log_w[row, j] = DECAY * sigmoid(w0[head, j] + decay[row, j])[0]
                learned, rest, _ = sigmoid(a0[head, j] + rate[row, j])
                removal_key = k[row, j] * k_k[head, j] * inverse
                new_k[row, j] = k[row, j] * (ONE - rest * k_a[head, j])
                a[row, j] = -removal_key
                b[row, j] = removal_key * learned


@with_sums
def _keys_backward(  # type: ignore[no-untyped-def]
    first, stride, dlog_w, dnew_k, da, db, k, decay, rate, w0, a0, k_k, k_a, dk, ddecay, drate, partial
):
    rows, head_size = k.shape
    heads = w0.shape[0]
    piece = TOKENS * heads
    for start in range(first * piece, rows, stride * piece):
        sums = partial[start // piece]
        sums[:] = ZERO
        for row in range(start, min(start + piece, rows)):
            head = row % heads
            square = ZERO
            for j in range(head_size):
                removal_key = k[row, j] * k_k[head, j]
                square += removal_key * removal_key
            norm = np.float32(math.sqrt(square))
            inverse = ONE / NORMALISE_EPS if norm < NORMALISE_EPS else ONE / norm
            along = ZERO  # the gradient's component along the removal key, which the norm removes
            for j in range(head_size):
                learned, rest, slope = sigmoid(a0[head, j] + rate[row, j])
                removal_key = k[row, j] * k_k[head, j] * inverse
                dremoval_key = db[row, j] * learned - da[row, j]
                along += dremoval_key * removal_key
                dk[row, j] = dremoval_key
                dlearned = db[row, j] * removal_key + dnew_k[row, j] * k[row, j] * k_a[head, j]
                drate[row, j] = dlearned * slope
                sums[1, head, j] += dlearned * slope
                sums[3, head, j] -= dnew_k[row, j] * k[row, j] * rest
            if norm < NORMALISE_EPS:
                along = ZERO
            for j in range(head_size):
                slope = sigmoid(w0[head, j] + decay[row, j])[2]
                ddecay[row, j] = dlog_w[row, j] * DECAY * slope
                sums[0, head, j] += dlog_w[row, j] * DECAY * slope
                rest = sigmoid(a0[head, j] + rate[row, j])[1]
                removal_key = k[row, j] * k_k[head, j] * inverse
                dproduct = (dk[row, j] - removal_key * along) * inverse
                dk[row, j] = dproduct * k_k[head, j] + dnew_k[row, j] * (ONE - rest * k_a[head, j])
                sums[2, head, j] += dproduct * k[row, j]


@compiled
def _values_forward(first, stride, v, v_first, v_gate, v0, new_v):  # type: ignore[no-untyped-def]
    tokens, width = v.shape
    for piece in range(first * TOKENS, tokens, stride * TOKENS):
        for t in range(piece, min(piece + TOKENS, tokens)):
            for j in range(width):
                new_v[t, j] = v[t, j] + (v_first[t, j] - v[t, j]) * sigmoid(v0[j] + v_gate[t, j])[0]


@compiled
def _values_backward(first, stride, dnew_v, v, v_first, v_gate, v0, dv, dv_first, dv_gate, partial):  # type: ignore[no-untyped-def]
    tokens, width = v.shape
    for piece in range(first * TOKENS, tokens, stride * TOKENS):
        dv0 = partial[piece // TOKENS]
        dv0[:] = ZERO
        for t in range(piece, min(piece + TOKENS, tokens)):
            for j in range(width):
                share, rest, slope = sigmoid(v0[j] + v_gate[t, j])
                dv[t, j] = dnew_v[t, j] * rest
                dv_first[t, j] = dnew_v[t, j] * share
                dgate = dnew_v[t, j] * (v_first[t, j] - v[t, j]) * slope
                dv_gate[t, j] = dgate
                dv0[j] += dgate


@with_sums
def _output_forward(first, stride, y, r, k, v, gate, r_k, weight, bias, eps, out):  # type: ignore[no-untyped-def]
    rows, head_size = y.shape
    heads = r_k.shape[0]
    piece = TOKENS * heads
    count = np.float32(head_size)
    for start in range(first * piece, rows, stride * piece):
        for row in range(start, min(start + piece, rows)):
            head = row % heads
            mean, bonus, variance = ZERO, ZERO, ZERO
            for j in range(head_size):
                mean += y[row, j]
                bonus += r[row, j] * k[row, j] * r_k[head, j]
            mean /= count
            for j in range(head_size):
                variance += (y[row, j] - mean) * (y[row, j] - mean)
            scale = ONE / np.float32(math.sqrt(variance / count + eps))
            for j in range(head_size):
                normed = (y[row, j] - mean) * scale * weight[head, j] + bias[head, j]
                out[row, j] = (normed + bonus * v[row, j]) * gate[row, j]


@with_sums
def _output_backward(  # type: ignore[no-untyped-def]
    first, stride, dout, y, r, k, v, gate, r_k, weight, bias, eps, dy, dr, dk, dv, dgate, partial
):
    rows, head_size = y.shape
    heads = r_k.shape[0]
    piece = TOKENS * heads
    count = np.float32(head_size)
    for start in range(first * piece, rows, stride * piece):
        sums = partial[start // piece]
        sums[:] = ZERO
        for row in range(start, min(start + piece, rows)):
            head = row % heads
            mean, bonus, variance = ZERO, ZERO, ZERO
            for j in range(head_size):
                mean += y[row, j]
                bonus += r[row, j] * k[row, j] * r_k[head, j]
            mean /= count
            for j in range(head_size):
                variance += (y[row, j] - mean) * (y[row, j] - mean)
            scale = ONE / np.float32(math.sqrt(variance / count + eps))
            dbonus, dmean, along = ZERO, ZERO, ZERO
            for j in range(head_size):
                normed = (y[row, j] - mean) * scale
                dgated = dout[row, j] * gate[row, j]
                dgate[row, j] = dout[row, j] * (normed * weight[head, j] + bias[head, j] + bonus * v[row, j])
                dbonus += dgated * v[row, j]
                dmean += dgated * weight[head, j]
                along += dgated * weight[head, j] * normed
                sums[1, head, j] += dgated * normed
                sums[2, head, j] += dgated
            dmean /= count
            along /= count
            for j in range(head_size):
                normed = (y[row, j] - mean) * scale
                dgated = dout[row, j] * gate[row, j]
                dy[row, j] = (dgated * weight[head, j] - dmean - normed * along) * scale
                dv[row, j] = dgated * bonus
                dr[row, j] = dbonus * k[row, j] * r_k[head, j]
                dk[row, j] = dbonus * r[row, j] * r_k[head, j]
                sums[0, head, j] += dbonus * r[row, j] * k[row, j]


@compiled
def _sum_pieces(partial, total):  # type: ignore[no-untyped-def]
    total[:] = ZERO
    for piece in range(partial.shape[0]):
        for j in range(partial.shape[1]):
            total[j] += partial[piece, j]


def _partial(x: Tensor, count: int) -> Tensor:
    """Memory for `count` sums over tokens, one row a piece: [pieces, count, D]."""
    batch, length = x.shape[:2]
    return x.new_empty(-(-batch * length // TOKENS), count, x.numel() // (batch * length))


def _sum(partial: Tensor) -> Tensor:
    """The sums over all pieces, [count, D]."""
    pieces, count, width = partial.shape
    total = partial.new_empty(count, width)
    _sum_pieces(array(partial, pieces, count * width), array(total, count * width))
    return total


def _edges(x_BTD: Tensor, last_BD: Tensor | None, starts_BT: Tensor | None) -> tuple[Any, Any]:
    batch, length, width = x_BTD.shape
    last = x_BTD.new_zeros(batch, width) if last_BD is None else last_BD
    starts = torch.zeros(batch, length, dtype=torch.bool) if starts_BT is None else starts_BT
    return array(last, batch, width), array(starts, batch * length)


def time_mix_streams_forward(
    x_BTD: Tensor, mixes_6D: Tensor, last_BD: Tensor | None, starts_BT: Tensor | None, dtype: torch.dtype
) -> list[Tensor]:
    """The six streams [B, T, D]; dtype is float32."""
    assert dtype == torch.float32
    _, length, width = x_BTD.shape
    streams = [torch.empty_like(x_BTD) for _ in range(6)]
    x, mixes, *outputs = (array(x, -1, width) for x in (x_BTD, mixes_6D, *streams))
    last, starts = _edges(x_BTD, last_BD, starts_BT)
    run(_streams_forward, x_BTD.numel(), x, mixes, last, starts, length, *outputs)
    return streams


def time_mix_streams_backward(
    dstreams: list[Tensor], x_BTD: Tensor, mixes_6D: Tensor, last_BD: Tensor | None, starts_BT: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [B, T, D], dmixes [6, D], dlast [B, D]."""
    batch, length, width = x_BTD.shape
    dx, dlast, partial = torch.empty_like(x_BTD), x_BTD.new_empty(batch, width), _partial(x_BTD, 6)
    *gradients, x, mixes = (array(x, -1, width) for x in (*dstreams, x_BTD, mixes_6D))
    last, starts = _edges(x_BTD, last_BD, starts_BT)
    outputs = array(dx, -1, width), array(dlast, batch, width), array(partial, *partial.shape)
    run(_streams_backward, x_BTD.numel(), *gradients, x, mixes, last, starts, length, *outputs)
    return dx, _sum(partial), dlast


def time_mix_keys_forward(
    k: Tensor,
    decay: Tensor,
    rate: Tensor,
    v: Tensor,
    v_first: Tensor | None,
    v_gate: Tensor | None,
    w0: Tensor,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
    head_size: int,
) -> list[Tensor]:
    """log_w, k', a, b and, where v_first is given, v': each [B, T, D]."""
    width = k.shape[-1]
    results = [torch.empty_like(k) for _ in range(4)]
    run(_keys_forward, k.numel(), *(array(x, -1, head_size) for x in (k, decay, rate, w0, a0, k_k, k_a, *results)))
    if v_first is None or v_gate is None or v0 is None:
        return results
    new_v = torch.empty_like(v)
    tensors = (array(x, -1, width) for x in (v, v_first, v_gate))
    run(_values_forward, v.numel(), *tensors, array(v0, width), array(new_v, -1, width))
    return [*results, new_v]


def time_mix_keys_backward(
    gradients: list[Tensor],
    k: Tensor,
    decay: Tensor,
    rate: Tensor,
    v: Tensor,
    v_first: Tensor | None,
    v_gate: Tensor | None,
    w0: Tensor,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
    head_size: int,
) -> list[Tensor]:
    """dk, ddecay, drate, [4, D] of w0, a0, k_k, k_a and, where v_first is given, dv, dv_first, dv_gate, dv0 [1, D].

    gradients: of log_w, k', a, b and, where v_first is given, v'.
    """
    width, partial = k.shape[-1], _partial(k, 4)
    results = [torch.empty_like(k) for _ in range(3)]
    tensors = (*gradients[:4], k, decay, rate, w0, a0, k_k, k_a, *results)
    by_head = (partial.shape[0], 4, width // head_size, head_size)
    run(_keys_backward, k.numel(), *(array(x, -1, head_size) for x in tensors), array(partial, *by_head))
    results.append(_sum(partial))
    if v_first is None or v_gate is None or v0 is None:
        return results
    partial = _partial(k, 1)
    changes = [torch.empty_like(v) for _ in range(3)]
    inputs = (array(x, -1, width) for x in (gradients[4], v, v_first, v_gate))
    outputs = (array(x, -1, width) for x in (*changes, partial))
    run(_values_backward, v.numel(), *inputs, array(v0, width), *outputs)
    return [*results, *changes, _sum(partial)]


def time_mix_output_forward(
    y: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """[B, T, D] from y, r, k, v [B, T, H, K]."""
    out = torch.empty_like(gate)
    *inputs, output = (array(x, -1, y.shape[-1]) for x in (y, r, k, v, gate, r_k, weight, bias, out))
    run(_output_forward, y.numel(), *inputs, np.float32(eps), output)
    return out


def time_mix_output_backward(
    dout: Tensor,
    y: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    r_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> list[Tensor]:
    """dy, dr, dk, dv, dgate, and [3, D] of r_k, weight, bias."""
    results, partial = [torch.empty_like(x) for x in (y, r, k, v, gate)], _partial(y, 3)
    inputs = (array(x, -1, y.shape[-1]) for x in (dout, y, r, k, v, gate, r_k, weight, bias))
    outputs = (array(x, -1, y.shape[-1]) for x in results)
    by_head = (partial.shape[0], 3, *r_k.shape)
    run(_output_backward, y.numel(), *inputs, np.float32(eps), *outputs, array(partial, *by_head))
    return [*results, _sum(partial)]
