"""The loops of the SSD scan for one CPU thread, compiled by numba: small matrix products, a chunk of tokens at a time.

Arrays are passed as addresses, and indices count floats (common/simd.py). Shapes: K and V are the widths rounded up to
multiples of 8, as in scratch memory; C tokens a chunk, a multiple of 8. A chunk's tensors are first copied to scratch
memory with contiguous rows, padded with zeros, so the products need no code for remainders.
"""

from __future__ import annotations

from numba import njit

from cdrmix.kernels.common.simd import (
    SIMD_WIDTH,
    copy,
    exponential,
    fill,
    fused,
    integer,
    load,
    loop,
    number,
    plus,
    put,
    row_sums,
    spread,
    store,
    times,
    transpose,
    zero,
    zero_below,
)

PAIR = 2 * SIMD_WIDTH  # columns of a product's block; with 4 rows its sums fill 8 of 16 registers
ZERO, ONE = 1, 2  # their indices in the constants
FULL, LOWER, UPPER, CAUSAL = range(4)  # A is full, lower or upper triangular; CAUSAL: only the product's lower triangle


@njit(nogil=True)
def _product(  # type: ignore[no-untyped-def]
    out, a, a_row, a_column, b, rows, columns, depth, shape, factor
):
    """out = factor out + A B for out [rows, columns], B [depth, columns], rows a multiple of 4, columns of 8.

    A [rows, depth] has strides, so it may be a transpose. factor: an address; 0: out need not be initialised.
    Triangles are computed by blocks of 4 rows and 16 columns. The rest of a block of a triangular A must be 0; the rest
    of a block of a CAUSAL product is overwritten.
    """
    for j in range(0, columns - SIMD_WIDTH, PAIR):
        for i in range(j if shape == CAUSAL else 0, rows, 4):
            o0, o1, o2, o3 = i * columns + j, (i + 1) * columns + j, (i + 2) * columns + j, (i + 3) * columns + j
            x0, x1, x2, x3, y0, y1, y2, y3 = zero(), zero(), zero(), zero(), zero(), zero(), zero(), zero()
            if factor != 0:
                f = spread(factor, 0)
                x0, y0 = times(load(out, o0), f), times(load(out, o0 + SIMD_WIDTH), f)
                x1, y1 = times(load(out, o1), f), times(load(out, o1 + SIMD_WIDTH), f)
                x2, y2 = times(load(out, o2), f), times(load(out, o2 + SIMD_WIDTH), f)
                x3, y3 = times(load(out, o3), f), times(load(out, o3 + SIMD_WIDTH), f)
            for d in range(i if shape == UPPER else 0, i + 4 if shape == LOWER else depth):
                b0, b1 = load(b, d * columns + j), load(b, d * columns + j + SIMD_WIDTH)
                at = i * a_row + d * a_column
                a_d = spread(a, at)
                x0, y0 = fused(b0, a_d, x0), fused(b1, a_d, y0)
                a_d = spread(a, at + a_row)
                x1, y1 = fused(b0, a_d, x1), fused(b1, a_d, y1)
                a_d = spread(a, at + 2 * a_row)
                x2, y2 = fused(b0, a_d, x2), fused(b1, a_d, y2)
                a_d = spread(a, at + 3 * a_row)
                x3, y3 = fused(b0, a_d, x3), fused(b1, a_d, y3)
            store(out, o0, x0)
            store(out, o0 + SIMD_WIDTH, y0)
            store(out, o1, x1)
            store(out, o1 + SIMD_WIDTH, y1)
            store(out, o2, x2)
            store(out, o2 + SIMD_WIDTH, y2)
            store(out, o3, x3)
            store(out, o3 + SIMD_WIDTH, y3)
    if columns % PAIR:
        j = columns - SIMD_WIDTH
        for i in range(j if shape == CAUSAL else 0, rows, 4):
            o0, o1, o2, o3 = i * columns + j, (i + 1) * columns + j, (i + 2) * columns + j, (i + 3) * columns + j
            x0, x1, x2, x3 = zero(), zero(), zero(), zero()
            if factor != 0:
                f = spread(factor, 0)
                x0, x1 = times(load(out, o0), f), times(load(out, o1), f)
                x2, x3 = times(load(out, o2), f), times(load(out, o3), f)
            for d in range(i if shape == UPPER else 0, i + 4 if shape == LOWER else depth):
                b0 = load(b, d * columns + j)
                at = i * a_row + d * a_column
                x0, x1 = fused(b0, spread(a, at), x0), fused(b0, spread(a, at + a_row), x1)
                x2, x3 = fused(b0, spread(a, at + 2 * a_row), x2), fused(b0, spread(a, at + 3 * a_row), x3)
            store(out, o0, x0)
            store(out, o1, x1)
            store(out, o2, x2)
            store(out, o3, x3)


@njit(nogil=True)
def _copy_in(source, at, stride, count, width, target, rows, padded):  # type: ignore[no-untyped-def]
    """Copies `count` rows of `width` floats, `stride` apart, to rows of `padded`, padded with zeros."""
    whole = width // SIMD_WIDTH * SIMD_WIDTH
    for row in range(count):
        for j in range(0, whole, SIMD_WIDTH):
            store(target, row * padded + j, load(source, at + row * stride + j))
        if whole < padded:
            store(target, row * padded + whole, zero())
            for j in range(whole, width):
                put(target, row * padded + j, number(source, at + row * stride + j))
    for j in range(count * padded, rows * padded, SIMD_WIDTH):
        store(target, j, zero())


@njit(nogil=True)
def _copy_out(source, padded, target, at, stride, count, width, begun):  # type: ignore[no-untyped-def]
    """Copies back what `_copy_in` copied; adds it where another head has written (begun)."""
    whole = width // SIMD_WIDTH * SIMD_WIDTH
    for row in range(count):
        for j in range(0, whole, SIMD_WIDTH):
            x = load(source, row * padded + j)
            store(target, at + row * stride + j, plus(load(target, at + row * stride + j), x) if begun else x)
        for j in range(whole, width):
            y = number(source, row * padded + j)
            put(target, at + row * stride + j, number(target, at + row * stride + j) + y if begun else y)


@njit(nogil=True)
def _transpose_matrix(source, rows, columns, target):  # type: ignore[no-untyped-def]
    """[rows, columns] to [columns, rows], both multiples of 8."""
    for i in range(0, rows, SIMD_WIDTH):
        for j in range(0, columns, SIMD_WIDTH):
            transpose(source, i * columns + j, columns, target, j * rows + i, rows)


@njit(nogil=True)
def _multiply_rows(x, factors, rows, columns, target):  # type: ignore[no-untyped-def]
    for row in range(rows):
        f = spread(factors, row)
        for j in range(row * columns, (row + 1) * columns, SIMD_WIDTH):
            store(target, j, times(load(x, j), f))


@njit(nogil=True)
def _multiply_triangle(x, y, rows, target):  # type: ignore[no-untyped-def]
    """target = x y, element by element, [rows, rows], on and below the diagonal, up to whole vectors of columns."""
    for row in range(rows):
        for j in range(row * rows, row * rows + row + 1, SIMD_WIDTH):
            store(target, j, times(load(x, j), load(y, j)))


@njit(nogil=True)
def _row_products(x, y, rows, columns, target, partial):  # type: ignore[no-untyped-def]
    """target_i = sum_j x_ij y_ij. partial: [rows, 8]."""
    for row in range(rows):
        total = zero()
        for j in range(row * columns, (row + 1) * columns, SIMD_WIDTH):
            total = fused(load(x, j), load(y, j), total)
        store(partial, row * SIMD_WIDTH, total)
    for row in range(0, rows, SIMD_WIDTH):
        store(target, row, row_sums(partial, row * SIMD_WIDTH))


@njit(nogil=True)
def _power(x, count):  # type: ignore[no-untyped-def]
    """Replaces x by e^x."""
    for i in range(0, count, SIMD_WIDTH):
        y = load(x, i)
        store(x, i, zero_below(y, exponential(y)))


@njit(nogil=True)
def _decays(  # type: ignore[no-untyped-def]
    log, at, stride, count, rows, exclusive, weights, entering, leaving, through, constants
):
    """The decay factors of a chunk; every exponent is a sum of log decays, never a difference of two sums.

    weights [rows, rows]: e^(sum from after j's write to i's read), 0 where i does not read j, up to whole vectors.
    entering, leaving [rows]: e^(sum from the chunk's start to i's read), e^(sum from after j's write to its end).
    through [8]: e^(sum over the chunk) first. constants: -inf, 0, 1.
    """
    fill(constants, leaving, 0, rows)  # -inf: no token has written yet
    fill(constants, through, 0, SIMD_WIDTH)
    total = number(constants, ZERO)
    if exclusive:
        store(weights, 0, zero())
        put(entering, 0, total)
    for row in range(rows):
        if row < count:
            total += number(log, at + row * stride)
            step = spread(log, at + row * stride)
            for j in range(0, row, SIMD_WIDTH):
                store(leaving, j, plus(load(leaving, j), step))
        put(leaving, row, number(constants, ZERO))
        reader = row + 1 if exclusive else row
        if reader < rows:
            put(entering, reader, total)
            for j in range(0, reader + 1, SIMD_WIDTH):
                x = load(leaving, j)
                store(weights, reader * rows + j, zero_below(x, exponential(x)))
    put(through, 0, total)
    _power(entering, rows)
    _power(leaving, rows)
    _power(through, SIMD_WIDTH)


@njit(nogil=True)
def _sum_decay_gradients(  # type: ignore[no-untyped-def]
    dweights, dentering, dleaving, dthrough, rows, count, exclusive, running, partial, masks, dlog, at, stride
):
    """dlog_l: the sum of the gradients of all exponents that contain token l's log decay.

    dweights [rows, rows] of pairs j < l <= i (l < i if exclusive), summed over i from the last, then over j, so that
    no terms cancel. dentering [rows] of the reads from l on, dleaving [rows] of the writes before l, dthrough a number.
    Scratch: running [rows], partial [rows, 8]. masks [8, 8]: row n has n ones.
    """
    fill(masks, running, 0, rows)
    for row in range(rows - 1, -1, -1):
        reader = row + 1 if exclusive else row
        if reader < rows:
            for j in range(0, reader + 1, SIMD_WIDTH):
                store(running, j, plus(load(running, j), load(dweights, reader * rows + j)))
        whole, total = row // SIMD_WIDTH * SIMD_WIDTH, zero()
        for j in range(0, whole, SIMD_WIDTH):
            total = plus(total, load(running, j))
        total = fused(load(running, whole), load(masks, (row - whole) * SIMD_WIDTH), total)
        store(partial, row * SIMD_WIDTH, total)
    for row in range(0, rows, SIMD_WIDTH):
        store(running, row, row_sums(partial, row * SIMD_WIDTH))
    later = number(masks, 0)  # 0
    for row in range(count - 1, -1, -1):
        if not exclusive:
            later += number(dentering, row)
        put(running, row, number(running, row) + later)
        if exclusive:
            later += number(dentering, row)
    earlier = number(masks, 0)
    for row in range(count):
        put(dlog, at + row * stride, number(running, row) + earlier + dthrough)
        earlier += number(dleaving, row)


@loop
def scan(  # type: ignore[no-untyped-def]
    first, stride, items, heads, groups, key_width, value_width, C, exclusive, starts,
    q, k, v, log, state, y, last, checkpoints,
    M, S, q_, k_, k_t, v_, y_, scores, weights, entering, leaving, through, constants,
):  # fmt: skip
    """Items (a document and head) first, first + stride, ...: y [tokens, H, V], last [N, H, V, K].

    starts: address of int64 [N + 1]. state, last and checkpoints are 0 where they are absent.
    checkpoints [tokens // C, H, K, V]: the states, transposed, before each chunk except a document's first; those of a
    document that starts at token s begin at number s // C.
    Scratch: M, the state as [K, V], and S [V, K]; q_, k_ [C, K]; k_t [K, C]; v_, y_ [C, V]; scores, weights [C, C];
    entering, leaving [C]; through [8]. constants: -inf, 0, 1.
    """
    K, V = (key_width + 7) // 8 * 8, (value_width + 7) // 8 * 8
    per_group = heads // groups
    for item in range(first, items, stride):
        document = item // heads
        head = item - document * heads
        begin, end = integer(starts, document), integer(starts, document + 1)
        if state == 0:
            fill(constants + 4 * ZERO, M, 0, K * V)
        else:
            _copy_in(state, item * value_width * key_width, key_width, value_width, key_width, S, V, K)
            _transpose_matrix(S, V, K, M)
        for block in range(begin, end, C):
            count = min(C, end - block)
            rows = (count + 7) // 8 * 8
            if checkpoints != 0 and block > begin:
                kept = begin // C + (block - begin) // C - 1
                copy(M, 0, checkpoints, (kept * heads + head) * K * V, K * V)
            at_k = (block * groups + head // per_group) * key_width
            at_v = (block * heads + head) * value_width
            _copy_in(q, at_k, groups * key_width, count, key_width, q_, rows, K)
            _copy_in(k, at_k, groups * key_width, count, key_width, k_, rows, K)
            _copy_in(v, at_v, heads * value_width, count, value_width, v_, rows, V)
            _transpose_matrix(k_, rows, K, k_t)
            _decays(
                log, block * heads + head, heads, count, rows, exclusive, weights, entering, leaving, through, constants
            )
            _product(scores, q_, K, 1, k_t, rows, rows, K, CAUSAL, 0)
            _multiply_triangle(scores, weights, rows, scores)
            _product(y_, q_, K, 1, M, rows, V, K, FULL, 0)
            _multiply_rows(y_, entering, rows, V, y_)
            _product(y_, scores, rows, 1, v_, rows, V, rows, LOWER, constants + 4 * ONE)
            _copy_out(y_, V, y, at_v, heads * value_width, count, value_width, False)
            _multiply_rows(v_, leaving, rows, V, v_)
            _product(M, k_, 1, K, v_, K, V, rows, FULL, through)
        if last != 0:
            _transpose_matrix(M, K, V, S)
            _copy_out(S, K, last, item * value_width * key_width, key_width, value_width, key_width, False)


@loop
def scan_back(  # type: ignore[no-untyped-def]
    first, stride, items, heads, groups, parts, key_width, value_width, C, exclusive, tokens, starts,
    q, k, v, log, state, checkpoints, dy, dlast, dq, dk, dv, dlog, dstate,
    S, D, D_t, q_, k_, k_t, v_, v_t, dy_, read, written, dv_, entered, left, scores, dscores, weights,
    entering, leaving, through, dentering, dleaving, running, partial, masks, constants,
):  # fmt: skip
    """The adjoint of `scan` over items (a document, group and part of its heads), from the last chunk to the first.

    A part has heads / (groups parts) heads, in order: their gradients of q and k are summed in this order.
    dq, dk: [parts, tokens, G, K]. state, dlast and dstate are 0 where they are absent.
    Scratch besides that of `scan`: D, the state's gradient as [K, V], and D_t [V, K]; v_t [V, C]; dy_, dv_, entered,
    left [C, V]; read, written [C, K]; scores, dscores [C, C]; dentering, dleaving [C]; running [max(C, V)]; partial
    [max(C, V), 8]. masks: see _sum_decay_gradients.
    """
    K, V = (key_width + 7) // 8 * 8, (value_width + 7) // 8 * 8
    one, per_part, per_group = constants + 4 * ONE, heads // (groups * parts), heads // groups
    for item in range(first, items, stride):
        document = item // (groups * parts)
        group, part = item // parts - document * groups, item % parts
        begin, end = integer(starts, document), integer(starts, document + 1)
        first_head = group * per_group + part * per_part
        for head in range(first_head, first_head + per_part):
            of_state = (document * heads + head) * value_width * key_width
            if dlast == 0:
                fill(constants + 4 * ZERO, D, 0, K * V)
            else:
                _copy_in(dlast, of_state, key_width, value_width, key_width, D_t, V, K)
                _transpose_matrix(D_t, V, K, D)
            for block in range(begin + (end - begin - 1) // C * C, begin - 1, -C):
                count = min(C, end - block)
                rows = (count + 7) // 8 * 8
                if block > begin:
                    kept = begin // C + (block - begin) // C - 1
                    _transpose_matrix(checkpoints + 4 * (kept * heads + head) * K * V, K, V, S)
                elif state == 0:
                    fill(constants + 4 * ZERO, S, 0, K * V)
                else:
                    _copy_in(state, of_state, key_width, value_width, key_width, S, V, K)
                at_k, at_v = (block * groups + group) * key_width, (block * heads + head) * value_width
                at_log, at_part = block * heads + head, part * tokens * groups * key_width
                _copy_in(q, at_k, groups * key_width, count, key_width, q_, rows, K)
                _copy_in(k, at_k, groups * key_width, count, key_width, k_, rows, K)
                _copy_in(v, at_v, heads * value_width, count, value_width, v_, rows, V)
                _copy_in(dy, at_v, heads * value_width, count, value_width, dy_, rows, V)
                _transpose_matrix(k_, rows, K, k_t)
                _transpose_matrix(v_, rows, V, v_t)
                _transpose_matrix(D, K, V, D_t)
                _decays(log, at_log, heads, count, rows, exclusive, weights, entering, leaving, through, constants)
                _product(scores, q_, K, 1, k_t, rows, rows, K, CAUSAL, 0)
                _multiply_triangle(scores, weights, rows, scores)
                _product(dscores, dy_, V, 1, v_t, rows, rows, V, CAUSAL, 0)
                _multiply_triangle(dscores, weights, rows, weights)  # the gradient of q k^T; replaces the decay weights
                _multiply_triangle(dscores, scores, rows, dscores)  # the gradient of the exponents
                _multiply_rows(dy_, entering, rows, V, entered)
                _multiply_rows(v_, leaving, rows, V, left)

                _product(read, entered, V, 1, S, rows, K, V, FULL, 0)
                _row_products(read, q_, rows, K, dentering, partial)
                _product(read, weights, rows, 1, k_, rows, K, rows, LOWER, one)
                _copy_out(read, K, dq, at_part + at_k, groups * key_width, count, key_width, head > first_head)

                _product(written, left, V, 1, D_t, rows, K, V, FULL, 0)
                _row_products(written, k_, rows, K, dleaving, partial)
                _product(written, weights, 1, rows, q_, rows, K, rows, UPPER, one)
                _copy_out(written, K, dk, at_part + at_k, groups * key_width, count, key_width, head > first_head)

                _product(dv_, k_, K, 1, D, rows, V, K, FULL, 0)
                _multiply_rows(dv_, leaving, rows, V, dv_)
                _product(dv_, scores, 1, rows, dy_, rows, V, rows, UPPER, one)
                _copy_out(dv_, V, dv, at_v, heads * value_width, count, value_width, False)

                _row_products(S, D_t, V, K, running, partial)
                dthrough = number(constants, ZERO)
                for i in range(V):
                    dthrough += number(running, i)
                dthrough *= number(through, 0)
                _sum_decay_gradients(
                    dscores, dentering, dleaving, dthrough, rows, count, exclusive, running, partial, masks,
                    dlog, at_log, heads,
                )  # fmt: skip
                _product(D, q_, 1, K, entered, K, V, rows, FULL, through)
            if dstate != 0:
                _transpose_matrix(D, K, V, D_t)
                _copy_out(D_t, K, dstate, of_state, key_width, value_width, key_width, False)
