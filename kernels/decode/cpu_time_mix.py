"""RWKV-7's recurrence and what is around it, in a compiled decoding step (kernels/time_mix/reference.py, rwkv7).

Shapes: registers [D, lanes] with D = H K, H heads of K channels, a multiple of 8; rows [lanes, D].
"""

from __future__ import annotations

import math

import numpy as np

from cdrmix.kernels.common.simd import (
    SIMD_WIDTH,
    exponential,
    fused,
    larger,
    load,
    minus,
    over,
    part,
    plus,
    root,
    row_sums,
    same,
    spread,
    store,
    times,
    zero,
)
from cdrmix.kernels.decode.cpu_lanes import ONE, sigmoid_of, to_lanes, to_rows

SLOWEST = np.float32(-math.exp(-0.5))  # the largest decay's logarithm
LEAST = np.float32(1e-12)  # of a key's length, as in `torch.nn.functional.normalize`


@part
def keys(  # type: ignore[no-untyped-def]
    k, decay, rate, v, v_first, v_gate, w0, a0, v0, k_k, k_a, a, H, K, factor, lanes, stride,
):  # fmt: skip
    """The recurrence's inputs in place, as `time_mix_keys` defines them: the decay becomes w = exp(log_w), the rate b.

    v_first 0: v stays. factor: of b, 2 where eigenvalues may be negative.
    """
    for n in range(0, lanes, SIMD_WIDTH):
        for h in range(H):
            squares = zero()
            for d in range(h * K, h * K + K):
                at = d * stride + n
                key = times(load(k, at), spread(k_k, d))
                store(a, at, key)
                squares = fused(key, key, squares)
            length = over(same(ONE), larger(root(squares), same(LEAST)))
            for d in range(h * K, h * K + K):
                at = d * stride + n
                log_w = times(same(SLOWEST), sigmoid_of(plus(load(decay, at), spread(w0, d))))
                store(decay, at, exponential(log_w))
                learned = sigmoid_of(plus(load(rate, at), spread(a0, d)))
                key = times(load(a, at), length)
                store(a, at, minus(zero(), key))
                store(rate, at, times(same(factor), times(key, learned)))
                store(k, at, times(load(k, at), fused(minus(learned, same(ONE)), spread(k_a, d), same(ONE))))
                if v_first != 0:
                    share = sigmoid_of(plus(load(v_gate, at), spread(v0, d)))
                    value = load(v, at)
                    store(v, at, fused(minus(load(v_first, at), value), share, value))


@part
def _removed(S, a, sums, K):  # type: ignore[no-untyped-def]
    """The products of 8 rows of S with a."""
    for j in range(SIMD_WIDTH):
        total = zero()
        for i in range(0, K, SIMD_WIDTH):
            total = fused(load(S, j * K + i), load(a, i), total)
        store(sums, j * SIMD_WIDTH, total)
    return row_sums(sums, 0)


@part
def _step(S, r, w, k, b, v, removed, sums, K):  # type: ignore[no-untyped-def]
    """8 rows of S become S w + removed b^T + v k^T; returns their products with r. Four rows share the loads."""
    for j in range(0, SIMD_WIDTH, 4):
        v0, v1, v2, v3 = spread(v, j), spread(v, j + 1), spread(v, j + 2), spread(v, j + 3)
        e0, e1, e2, e3 = spread(removed, j), spread(removed, j + 1), spread(removed, j + 2), spread(removed, j + 3)
        y0, y1, y2, y3 = zero(), zero(), zero(), zero()
        for i in range(0, K, SIMD_WIDTH):
            w_i, k_i, b_i, r_i = load(w, i), load(k, i), load(b, i), load(r, i)
            at = j * K + i
            s0 = fused(v0, k_i, fused(e0, b_i, times(load(S, at), w_i)))
            s1 = fused(v1, k_i, fused(e1, b_i, times(load(S, at + K), w_i)))
            s2 = fused(v2, k_i, fused(e2, b_i, times(load(S, at + 2 * K), w_i)))
            s3 = fused(v3, k_i, fused(e3, b_i, times(load(S, at + 3 * K), w_i)))
            store(S, at, s0)
            store(S, at + K, s1)
            store(S, at + 2 * K, s2)
            store(S, at + 3 * K, s3)
            y0, y1, y2, y3 = fused(s0, r_i, y0), fused(s1, r_i, y1), fused(s2, r_i, y2), fused(s3, r_i, y3)
        store(sums, j * SIMD_WIDTH, y0)
        store(sums, (j + 1) * SIMD_WIDTH, y1)
        store(sums, (j + 2) * SIMD_WIDTH, y2)
        store(sums, (j + 3) * SIMD_WIDTH, y3)
    return row_sums(sums, 0)


@part
def recur(r, w, k, v, a, b, y, state, H, K, scratch, rows, tokens, lanes, stride):  # type: ignore[no-untyped-def]
    """y = S r after S = S w + (S a) b^T + v k^T, token after token; state [rows, H, K, K] becomes the last S.

    scratch: 7 registers of D rows, and 9 vectors.
    """
    D = H * K
    size = 4 * D * stride
    of = scratch
    for x in (r, w, k, v, a, b):
        to_rows(x, of, D, D, lanes, stride)
        of += size
    to, sums, removed = of, of + size, of + size + 4 * SIMD_WIDTH * SIMD_WIDTH
    for row in range(rows):
        for h in range(H):
            S = state + 4 * (row * H + h) * K * K
            for t in range(tokens):
                at = scratch + 4 * ((row * tokens + t) * D + h * K)
                for j in range(0, K, SIMD_WIDTH):
                    block = S + 4 * j * K
                    store(removed, 0, _removed(block, at + 4 * size, sums, K))
                    value = _step(
                        block, at, at + size, at + 2 * size, at + 5 * size, at + 3 * size + 4 * j, removed, sums, K
                    )
                    store(to + 4 * ((row * tokens + t) * D + h * K), j, value)
    to_lanes(to, y, D, D, lanes, stride)


@part
def group(y, r, k, v, gate, r_k, weight, bias, H, K, epsilon, lanes, stride):  # type: ignore[no-untyped-def]
    """y becomes (group_norm(y) + (sum_K r k r_k) v) gate, as `time_mix_output` defines it."""
    count = same(np.float32(K))
    for n in range(0, lanes, SIMD_WIDTH):
        for h in range(H):
            total, squares, bonus = zero(), zero(), zero()
            for d in range(h * K, h * K + K):
                at = d * stride + n
                total = plus(total, load(y, at))
                bonus = fused(times(load(r, at), load(k, at)), spread(r_k, d), bonus)
            mean = over(total, count)
            for d in range(h * K, h * K + K):
                value = minus(load(y, d * stride + n), mean)
                squares = fused(value, value, squares)
            scale = over(same(ONE), root(plus(over(squares, count), same(epsilon))))
            for d in range(h * K, h * K + K):
                at = d * stride + n
                value = fused(times(minus(load(y, at), mean), scale), spread(weight, d), spread(bias, d))
                store(y, at, times(fused(bonus, load(v, at), value), load(gate, at)))
