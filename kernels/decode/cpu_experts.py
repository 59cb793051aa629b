"""A mixture of experts in a compiled decoding step: the choice of experts for each lane, and their feed-forwards.

Shapes: E experts, k of them for a token, D width, F hidden width, Z = F or, for SwiGLU, 2 F with gates and ups in
turns; w_up [E, D, Z], w_down [E, F, D]. The definitions are in kernels/moe/reference.py.
"""

from __future__ import annotations

import math

import numpy as np
from cdrmix.kernels.common.simd import SIMD_WIDTH, load, number, part, put, store, times
from cdrmix.kernels.decode.cpu_lanes import product, relu2, swiglu

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
    x, y, chosen, w_up, w_down, E, D, F, gated, x_of, hidden, y_of, lane_of, count, lanes, stride
):
    """y [D, lanes]: the sum over the chosen experts, in their order, of weight times feed-forward.

    An expert's lanes are gathered to the front of the register x_of, and its result is added where they came from.
    Lanes that have no token get zeros. lane_of: floats, for the numbers of an expert's lanes, then their weights.
    """
    Z = 2 * F if gated else F
    for d in range(D):
        for n in range(lanes):
            put(y, d * stride + n, ZERO)
    for e in range(E):
        found = 0
        for n in range(count):
            if number(chosen, e * stride + n) >= ZERO:
                put(lane_of, found, np.float32(n))
                put(lane_of, stride + found, number(chosen, e * stride + n))
                found += 1
        if found == 0:
            continue
        filled = found + -found % SIMD_WIDTH
        for i in range(found, filled):  # the rest of a vector repeats a lane, and is not added
            put(lane_of, i, number(lane_of, 0))
            put(lane_of, stride + i, ZERO)
        for d in range(D):
            for i in range(filled):
                put(x_of, d * stride + i, number(x, d * stride + int(number(lane_of, i))))
        product(x_of, w_up + 4 * e * D * Z, hidden, D, Z, 1, Z, 0, filled, stride)
        if gated:
            swiglu(hidden, hidden + 4 * stride, F, 2, filled, stride)
        else:
            relu2(hidden, F, filled, stride)
        for f in range(F):
            for i in range(0, filled, SIMD_WIDTH):
                at = f * stride + i
                store(hidden, at, times(load(hidden, at), load(lane_of, stride + i)))
        product(hidden, w_down + 4 * e * F * D, y_of, F, D, 1, D, 0, filled, stride)
        for d in range(D):
            for i in range(found):
                at = d * stride + int(number(lane_of, i))
                put(y, at, number(y, at) + number(y_of, d * stride + i))
