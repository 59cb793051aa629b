"""Softmax attention in a compiled decoding step: rotary positions, and a token's attention over keys in buffers.

Shapes: N head width, a multiple of 8; P positions. The keys and values of a row are [kv heads, capacity, N]. A table
of int64 [rows, 4] has for each row the addresses of its keys and values, the floats from head to head, and its past
tokens.
"""

from __future__ import annotations

import numpy as np

from cdrmix.kernels.common.simd import (
    SIMD_WIDTH,
    copy,
    exponential,
    fused,
    integer,
    load,
    minus,
    number,
    over,
    part,
    plus,
    put,
    root,
    row_sums,
    same,
    spread,
    store,
    times,
    zero,
)
from cdrmix.kernels.decode.cpu_lanes import ONE, to_lanes, to_rows

ROW = 4  # integers of a row in the table: keys, values, distance of heads, past tokens
ZERO = np.float32(0)


@part
def angles(cosine, sine, cosines, sines, half, table, begun, rows, tokens, lanes, stride):  # type: ignore[no-untyped-def]
    """The rows of the tables [P, half] at each lane's position, as registers [half, lanes].

    begun: tokens that this run has already read of each row, besides the past tokens of the table.
    """
    for n in range(rows * tokens):
        position = integer(table, n // tokens * ROW + 3) + begun + n % tokens
        for i in range(half):
            put(cosine, i * stride + n, number(cosines, position * half + i))
            put(sine, i * stride + n, number(sines, position * half + i))


@part
def heads(x, count, N, weight, epsilon, cosine, sine, lanes, stride):  # type: ignore[no-untyped-def]
    """Each head of x in place: its RMS norm unless weight is 0, then its rotation unless cosine is 0."""
    half = N // 2
    for h in range(count):
        first = h * N * stride
        for n in range(0, lanes, SIMD_WIDTH):
            if weight != 0:
                squares = zero()
                for i in range(N):
                    value = load(x, first + i * stride + n)
                    squares = fused(value, value, squares)
                scale = over(same(ONE), root(plus(over(squares, same(np.float32(N))), same(epsilon))))
                for i in range(N):
                    at = first + i * stride + n
                    store(x, at, times(times(load(x, at), scale), spread(weight, i)))
            if cosine != 0:
                for i in range(half):
                    at, beyond = first + i * stride + n, first + (i + half) * stride + n
                    left, right = load(x, at), load(x, beyond)
                    c, s = load(cosine, i * stride + n), load(sine, i * stride + n)
                    store(x, at, minus(times(left, c), times(right, s)))
                    store(x, beyond, fused(left, s, times(right, c)))


@part
def _scores(q, k, scores, count, N, scale, sums):  # type: ignore[no-untyped-def]
    """scale q k^T over `count` keys, and their largest; 8 keys at a time, of which the last may be repeated."""
    largest = np.float32(-np.inf)
    for first in range(0, count, SIMD_WIDTH):
        for j in range(SIMD_WIDTH):
            at = min(first + j, count - 1) * N
            total = zero()
            for i in range(0, N, SIMD_WIDTH):
                total = fused(load(k, at + i), load(q, i), total)
            store(sums, j * SIMD_WIDTH, total)
        store(scores, first, times(row_sums(sums, 0), same(scale)))
        for j in range(first, min(first + SIMD_WIDTH, count)):
            score = number(scores, j)
            if not score <= largest:
                largest = score
    return largest


@part
def _weights(scores, count, largest):  # type: ignore[no-untyped-def]
    """exp(score - largest) in place, and their sum."""
    for j in range(0, count, SIMD_WIDTH):
        store(scores, j, exponential(minus(load(scores, j), same(largest))))
    total = ZERO
    for j in range(count):
        total += number(scores, j)
    return total


@part
def _values(weights, v, y, count, N, total):  # type: ignore[no-untyped-def]
    """y = weights V / total. Four sums for each vector, because a sum waits four cycles for the one before."""
    whole = count - count % 4
    for i in range(0, N, SIMD_WIDTH):
        y0, y1, y2, y3 = zero(), zero(), zero(), zero()
        for j in range(0, whole, 4):
            y0 = fused(load(v, j * N + i), spread(weights, j), y0)
            y1 = fused(load(v, (j + 1) * N + i), spread(weights, j + 1), y1)
            y2 = fused(load(v, (j + 2) * N + i), spread(weights, j + 2), y2)
            y3 = fused(load(v, (j + 3) * N + i), spread(weights, j + 3), y3)
        for j in range(whole, count):
            y0 = fused(load(v, j * N + i), spread(weights, j), y0)
        store(y, i, over(plus(plus(y0, y1), plus(y2, y3)), same(total)))


@part
def attend(  # type: ignore[no-untyped-def]
    q, k, v, y, table, H, kv_heads, N, scale, scratch, scores, begun, rows, tokens, lanes, stride,
):  # fmt: skip
    """Appends the keys and values of each row's tokens to its buffers, and attends over all of them.

    scratch: registers of (2 H + 2 kv_heads) N rows, and 8 vectors. scores: floats for the longest row, and 8 more.
    """
    width, narrow = H * N, kv_heads * N
    q_rows = scratch
    y_rows = q_rows + 4 * width * stride
    k_rows = y_rows + 4 * width * stride
    v_rows = k_rows + 4 * narrow * stride
    sums = v_rows + 4 * narrow * stride
    to_rows(q, q_rows, width, width, lanes, stride)
    to_rows(k, k_rows, narrow, narrow, lanes, stride)
    to_rows(v, v_rows, narrow, narrow, lanes, stride)
    for row in range(rows):
        keys, values = integer(table, row * ROW), integer(table, row * ROW + 1)
        apart, past = integer(table, row * ROW + 2), integer(table, row * ROW + 3) + begun
        for group in range(kv_heads):
            keys_of, values_of = keys + 4 * group * apart, values + 4 * group * apart
            for t in range(tokens):
                at = (row * tokens + t) * narrow + group * N
                copy(k_rows, at, keys_of, (past + t) * N, N)
                copy(v_rows, at, values_of, (past + t) * N, N)
                for h in range(group * (H // kv_heads), (group + 1) * (H // kv_heads)):
                    at = 4 * ((row * tokens + t) * width + h * N)
                    count = past + t + 1
                    largest = _scores(q_rows + at, keys_of, scores, count, N, scale, sums)
                    total = _weights(scores, count, largest)
                    _values(scores, values_of, y_rows + at, count, N, total)
    to_lanes(y_rows, y, width, width, lanes, stride)
