"""Plastic adapters in a compiled decoding step: reads and updates of the fast weights, token after token of a row.

The formulas are in kernels/fast_weights/reference.py (`step`) and ops/fast_weights.py (`plastic_commit`). Shapes: r low
rank, d width of the keys, a multiple of 8, g 1 with a gate, else 0.
"""

from __future__ import annotations

import math

import numpy as np

from cdrmix.kernels.common.simd import (
    SIMD_WIDTH,
    exponential,
    fused,
    load,
    minus,
    number,
    over,
    part,
    plus,
    put,
    same,
    spread,
    store,
    times,
    zero,
)
from cdrmix.kernels.decode.cpu_lanes import ONE, TWO, to_lanes, to_rows
from cdrmix.kernels.decode.program import DELTA, OJA

ZERO = np.float32(0)
SHRINK = 1 - 2**-22  # ops/fast_weights.py: a row that was scaled down stays within the limit after two roundings


@part
def _sum(scratch, vector):  # type: ignore[no-untyped-def]
    """The sum of the 8 floats of a vector."""
    store(scratch, 0, vector)
    left = (number(scratch, 0) + number(scratch, 1)) + (number(scratch, 2) + number(scratch, 3))
    return left + ((number(scratch, 4) + number(scratch, 5)) + (number(scratch, 6) + number(scratch, 7)))


@part
def _inner(x, y, d, scratch):  # type: ignore[no-untyped-def]
    total = zero()
    for i in range(0, d, SIMD_WIDTH):
        total = fused(load(x, i), load(y, i), total)
    return _sum(scratch, total)


@part
def _sigmoid(x, scratch):  # type: ignore[no-untyped-def]
    store(scratch, 0, over(same(ONE), plus(same(ONE), exponential(minus(zero(), same(x))))))
    return number(scratch, 0)


@part
def _unit(x, y, d, floor, scratch):  # type: ignore[no-untyped-def]
    """y = x / sqrt(x . x + floor)."""
    scale = same(ONE / np.float32(math.sqrt(_inner(x, x, d, scratch) + floor)))
    for i in range(0, d, SIMD_WIDTH):
        store(y, i, times(load(x, i), scale))


@part
def _update(pending, k, values, beta, r, d, rule, scratch):  # type: ignore[no-untyped-def]
    """pending [r, d] after one token. k is changed for the rule oja."""
    if rule == OJA:
        for i in range(r):
            value = spread(values, i)
            for j in range(0, d, SIMD_WIDTH):
                store(k, j, minus(load(k, j), times(load(pending, i * d + j), value)))
    for i in range(r):
        change = number(values, i)
        row = pending + 4 * i * d
        if rule == DELTA:
            change -= _inner(row, k, d, scratch)
        factor = same(beta * change)
        for j in range(0, d, SIMD_WIDTH):
            store(row, j, fused(factor, load(k, j), load(row, j)))


@part
def _commit(a, pending, r, d, decay, limit):  # type: ignore[no-untyped-def]
    """a: pending with rows of at most the length `limit`, which is compared in float64; pending: decay a."""
    for i in range(r):
        squares = 0.0
        for j in range(d):
            value = float(number(pending, i * d + j))
            squares += value * value
        length = math.sqrt(squares)
        scale = np.float32(SHRINK * limit / length) if length > limit else ONE
        for j in range(0, d, SIMD_WIDTH):
            value = times(load(pending, i * d + j), same(scale))
            store(a, i * d + j, value)
            store(pending, i * d + j, times(value, same(decay)))


@part
def adapt(  # type: ignore[no-untyped-def]
    own, read, a, pending, last, position, r, d, gates, constants, rule, chunk, rate, scratch, rows, tokens, lanes,
    stride,
):  # fmt: skip
    """read [r, lanes]: alpha A q of each token, with the A of its chunk; updates A, pending and last [rows, ...].

    own [d + 2 g + r, lanes]: the products with the slow weights, as in `ops.plastic_step`. position: tokens of the
    chunk before. constants: alpha, decay, limit, floor. scratch: registers as high as own and as read, then 2 d + 8
    floats.
    """
    width = d + 2 * gates + r
    row = width + -width % SIMD_WIDTH
    ranks = r + -r % SIMD_WIDTH
    reads = scratch + 4 * row * stride
    q = reads + 4 * ranks * stride
    k, sums = q + 4 * d, q + 8 * d
    alpha, decay, limit, floor = number(constants, 0), number(constants, 1), number(constants, 2), number(constants, 3)
    strength = TWO * _sigmoid(number(rate, 0), sums)
    to_rows(own, scratch, row, row, lanes, stride)
    for index in range(rows):
        a_of, pending_of = a + 4 * index * r * d, pending + 4 * index * r * d
        last_of = last + 4 * index * (d + gates)
        place = position
        for t in range(tokens):
            mine = scratch + 4 * (index * tokens + t) * row
            before = last_of if t == 0 else mine - 4 * row
            to = reads + 4 * (index * tokens + t) * ranks
            _unit(mine, q, d, floor, sums)
            _unit(before, k, d, floor, sums)
            beta = strength
            if gates:
                beta *= _sigmoid(number(before, d) + number(mine, d + 1), sums)
            for i in range(r):
                put(to, i, alpha * _inner(a_of + 4 * i * d, q, d, sums))
            _update(pending_of, k, mine + 4 * (d + 2 * gates), beta, r, d, rule, sums)
            place += 1
            if place == chunk:
                place = 0
                _commit(a_of, pending_of, r, d, decay, limit)
        mine = scratch + 4 * (index * tokens + tokens - 1) * row
        for i in range(d + gates):
            put(last_of, i, number(mine, i))
    to_lanes(reads, read, ranks, ranks, lanes, stride)
