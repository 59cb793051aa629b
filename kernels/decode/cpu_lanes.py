"""The element-wise work of a compiled decoding step, norms and products, over registers [width, lanes].

Arrays are addresses (common/simd.py). stride: floats from one row of a register to the next; lanes: a multiple of 8, at
most stride. A sum over a row's channels is taken in their order, in each lane for itself.
"""

from __future__ import annotations

import numpy as np

from cdrmix.kernels.common.simd import (
    SIMD_WIDTH,
    exponential,
    fused,
    integer,
    larger,
    load,
    minus,
    number,
    over,
    part,
    plus,
    put,
    root,
    same,
    spread,
    store,
    tile,
    times,
    transpose,
    zero,
)

PAIR = 2 * SIMD_WIDTH  # lanes of the wide tiles
OUTPUTS = 6  # of the largest tile: 12 sums, 2 vectors of x and a weight fit 16 registers
ONE, TWO = np.float32(1), np.float32(2)


def _tiles(count):  # type: ignore[no-untyped-def]
    """Compiles the outputs of `product` from `first` on in tiles of `count`; it returns the first that is left."""
    wide, narrow = tile(count, 2), tile(count, 1)

    @part
    def outputs_from(first, x, w, y, inputs, outputs, per_output, per_input, begun, lanes, stride):  # type: ignore[no-untyped-def]
        while first + count <= outputs:
            at, to = w + 4 * first * per_output, y + 4 * first * stride
            for n in range(0, lanes - PAIR + 1, PAIR):
                wide(x + 4 * n, stride, at, per_output, per_input, inputs, to + 4 * n, begun)
            if lanes % PAIR:
                n = lanes - SIMD_WIDTH
                narrow(x + 4 * n, stride, at, per_output, per_input, inputs, to + 4 * n, begun)
            first += count
        return first

    return outputs_from


_in_sixes, _in_pairs, _alone = map(_tiles, (OUTPUTS, 2, 1))


@part
def product(x, w, y, inputs, outputs, per_output, per_input, begun, lanes, stride):  # type: ignore[no-untyped-def]
    """y [outputs, lanes] = w x, plus y itself if begun; w [o, i] at o per_output + i per_input.

    The outputs are the outer loop: a weight is read from memory once, for all lanes.
    """
    first = _in_sixes(0, x, w, y, inputs, outputs, per_output, per_input, begun, lanes, stride)
    first = _in_pairs(first, x, w, y, inputs, outputs, per_output, per_input, begun, lanes, stride)
    _alone(first, x, w, y, inputs, outputs, per_output, per_input, begun, lanes, stride)


@part
def embed(ids, table, y, V, width, rows, tokens, apart, lanes, stride):  # type: ignore[no-untyped-def]
    """y [width, lanes]: the rows of the table for int64 ids [rows, tokens], rows `apart`; lanes without one get id 0's.

    So every lane holds numbers of ordinary size, which cost no time as denormal ones do. Returns whether all ids are
    from 0 to V - 1.
    """
    for n in range(lanes):
        token = 0
        if n < rows * tokens:
            token = integer(ids, n // tokens * apart + n % tokens)
            if token < 0 or token >= V:
                return False
        for d in range(width):
            put(y, d * stride + n, number(table, token * width + d))
    return True


@part
def to_rows(x, y, width, row, lanes, stride):  # type: ignore[no-untyped-def]
    """y [lanes, row]: the transpose of the first `width` rows, a multiple of 8, of x [width, lanes]."""
    for d in range(0, width, SIMD_WIDTH):
        for n in range(0, lanes, SIMD_WIDTH):
            transpose(x, d * stride + n, stride, y, n * row + d, row)


@part
def to_lanes(x, y, width, row, lanes, stride):  # type: ignore[no-untyped-def]
    """The inverse of `to_rows`: y [width, lanes] from x [lanes, row]."""
    for n in range(0, lanes, SIMD_WIDTH):
        for d in range(0, width, SIMD_WIDTH):
            transpose(x, n * row + d, row, y, d * stride + n, stride)


@part
def norm(x, y, weight, bias, out, width, epsilon, lanes, stride):  # type: ignore[no-untyped-def]
    """x += y unless y is 0; out: the layer norm of x, or the RMS norm where bias is 0."""
    count = same(np.float32(width))
    for n in range(0, lanes, SIMD_WIDTH):
        total, squares = zero(), zero()
        for d in range(width):
            at = d * stride + n
            value = load(x, at)
            if y != 0:
                value = plus(value, load(y, at))
                store(x, at, value)
            total = plus(total, value)
        mean = over(total, count) if bias != 0 else zero()
        for d in range(width):
            value = minus(load(x, d * stride + n), mean)
            squares = fused(value, value, squares)
        scale = over(same(ONE), root(plus(over(squares, count), same(epsilon))))
        for d in range(width):
            value = times(times(minus(load(x, d * stride + n), mean), scale), spread(weight, d))
            store(out, d * stride + n, plus(value, spread(bias, d)) if bias != 0 else value)


@part
def shift(x, out, state, width, rows, tokens, lanes, stride):  # type: ignore[no-untyped-def]
    """out: the token before each lane's. state [rows, width]: that before each row's first; then each row's last."""
    if tokens > 1:
        for d in range(width):
            for n in range(0, lanes - SIMD_WIDTH, SIMD_WIDTH):
                store(out, d * stride + n + 1, load(x, d * stride + n))
            for n in range(lanes - SIMD_WIDTH, lanes - 1):
                put(out, d * stride + n + 1, number(x, d * stride + n))
    for d in range(width):
        for n in range(rows * tokens, lanes):  # lanes without a token
            put(out, d * stride + n, number(x, d * stride + n))
    for r in range(rows):
        for d in range(width):
            put(out, d * stride + r * tokens, number(state, r * width + d))
            put(state, r * width + d, number(x, d * stride + r * tokens + tokens - 1))


@part
def mix(x, before, weight, out, width, lanes, stride):  # type: ignore[no-untyped-def]
    """out = x + (before - x) weight, one weight a channel."""
    for d in range(width):
        share = spread(weight, d)
        for n in range(d * stride, d * stride + lanes, SIMD_WIDTH):
            value = load(x, n)
            store(out, n, fused(minus(load(before, n), value), share, value))


@part
def sigmoid_of(x):  # type: ignore[no-untyped-def]
    return over(same(ONE), plus(same(ONE), exponential(minus(zero(), x))))


@part
def sigmoid(x, width, lanes, stride):  # type: ignore[no-untyped-def]
    for d in range(width):
        for n in range(d * stride, d * stride + lanes, SIMD_WIDTH):
            store(x, n, sigmoid_of(load(x, n)))


@part
def tanh(x, width, lanes, stride):  # type: ignore[no-untyped-def]
    """tanh(x) = 2 sigmoid(2 x) - 1, with an absolute error of 2 units in the last place of 1."""
    for d in range(width):
        for n in range(d * stride, d * stride + lanes, SIMD_WIDTH):
            twice = plus(load(x, n), load(x, n))
            store(x, n, minus(times(same(TWO), sigmoid_of(twice)), same(ONE)))


@part
def relu2(x, width, lanes, stride):  # type: ignore[no-untyped-def]
    for d in range(width):
        for n in range(d * stride, d * stride + lanes, SIMD_WIDTH):
            positive = larger(load(x, n), zero())  # NaN stays NaN
            store(x, n, times(positive, positive))


@part
def swiglu(gate, up, width, apart, lanes, stride):  # type: ignore[no-untyped-def]
    """hidden f: silu(gate) up, from rows f `apart` of gate and of up to row f of gate."""
    for d in range(width):
        for n in range(0, lanes, SIMD_WIDTH):
            value = load(gate, d * apart * stride + n)
            product = times(times(value, sigmoid_of(value)), load(up, d * apart * stride + n))
            store(gate, d * stride + n, product)


@part
def add(x, y, width, lanes, stride):  # type: ignore[no-untyped-def]
    for d in range(width):
        for n in range(d * stride, d * stride + lanes, SIMD_WIDTH):
            store(y, n, plus(load(y, n), load(x, n)))
