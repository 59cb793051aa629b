"""A mixture of experts in a compiled decoding step: the choice of experts for each lane, and their feed-forwards.

Shapes: E experts, k of them for a token, D width, F hidden width, Z = F or, for SwiGLU, 2 F with gates and ups in
turns; w_up [E, D, Z], w_down [E, F, D]. The definitions are in kernels/moe/reference.py.
"""

from __future__ import annotations

import math

import numpy as np

from cdrmix.kernels.common.simd import SIMD_WIDTH, copy, load, number, part, plus, put, store, times, zero
from cdrmix.kernels.decode.cpu_lanes import product, relu2, swiglu, to_lanes, to_rows

ZERO = np.float32(0)


@part
def choose(logits, bias, chosen, E, k, count, stride):  # type: ignore[no-untyped-def]
    """chosen [E, lanes]: the weight of each expert for each lane, -1 where it is not chosen.

    The k largest of logit + bias (bias 0: none) are chosen, of equal ones the first, and their logits' softmax is the
    weights. Returns whether all logits are finite.
    """
    for n in range(count):
        for e in range(E):
            if not math.isfinite(number(logits, e * stride + n)):
                return False
            put(chosen, e * stride + n, np.float32(-1))
        largest = np.float32(-np.inf)
        for _ in range(k):
            best, score = -1, np.float32(-np.inf)
            for e in range(E):
                here = number(logits, e * stride + n)
                if bias != 0:
                    here += number(bias, e)
                if number(chosen, e * stride + n) < ZERO and (best < 0 or here > score):
                    best, score = e, here
            put(chosen, best * stride + n, np.float32(1))
            largest = max(largest, number(logits, best * stride + n))
        total = ZERO
        for e in range(E):
            if number(chosen, e * stride + n) > ZERO:
                weight = np.float32(math.exp(number(logits, e * stride + n) - largest))
                put(chosen, e * stride + n, weight)
                total += weight
        for e in range(E):
            weight = number(chosen, e * stride + n)
            if weight >= ZERO:
                put(chosen, e * stride + n, weight / total)
    return True


@part
def experts(  # type: ignore[no-untyped-def]
    x, y, chosen, w_up, w_down, E, D, F, gated, scratch, hidden, lane_of, count, lanes, stride,
):  # fmt: skip
    """y [D, lanes]: the sum over the chosen experts, in their order, of weight times feed-forward.

    The rows of an expert's lanes are copied to the front, and its results are added to the rows that they came from.
    scratch: 4 registers of D rows. lane_of: two rows of a register, for an expert's lanes and their weights.
    """
    Z = 2 * F if gated else F
    x_rows, y_rows = scratch, scratch + 4 * D * stride
    rows, here = y_rows + 4 * D * stride, y_rows + 8 * D * stride
    to_rows(x, x_rows, D, D, lanes, stride)
    for n in range(lanes):
        for d in range(0, D, SIMD_WIDTH):
            store(y_rows, n * D + d, zero())
    for e in range(E):
        found = 0
        for n in range(count):
            weight = number(chosen, e * stride + n)
            if weight >= ZERO:
                put(lane_of, found, np.float32(n))
                put(lane_of, stride + found, weight)
                copy(x_rows, n * D, rows, found * D, D)
                found += 1
        if found == 0:
            continue
        filled = found + -found % SIMD_WIDTH
        for i in range(found, filled):  # the rest of a vector repeats the first lane; its results are not used
            copy(rows, 0, rows, i * D, D)
            put(lane_of, stride + i, ZERO)
        to_lanes(rows, here, D, D, filled, stride)
        product(here, w_up + 4 * e * D * Z, hidden, D, Z, 1, Z, 0, filled, stride)
        if gated:
            swiglu(hidden, hidden + 4 * stride, F, 2, filled, stride)
        else:
            relu2(hidden, F, filled, stride)
        for f in range(F):
            for i in range(0, filled, SIMD_WIDTH):
                at = f * stride + i
                store(hidden, at, times(load(hidden, at), load(lane_of, stride + i)))
        product(hidden, w_down + 4 * e * F * D, here, F, D, 1, D, 0, filled, stride)
        to_rows(here, rows, D, D, filled, stride)
        for i in range(found):
            n = int(number(lane_of, i))
            for d in range(0, D, SIMD_WIDTH):
                store(y_rows, n * D + d, plus(load(y_rows, n * D + d), load(rows, i * D + d)))
    to_lanes(y_rows, y, D, D, lanes, stride)
