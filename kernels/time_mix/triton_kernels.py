"""The kernels of `triton.py`: element-wise work around RWKV-7's recurrence, on tiles of tokens by channels.

Values are float32 in registers, for all dtypes of the tensors; offsets are int64, token numbers int32.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(z):
    """sigmoid(z), sigmoid(-z), and their product, which is the derivative; none loses digits by cancellation."""
    small = tl.exp(-tl.abs(z))
    larger = 1.0 / (1.0 + small)
    smaller = small * larger
    return tl.where(z >= 0, larger, smaller), tl.where(z >= 0, smaller, larger), larger * smaller


@triton.jit
def _read(pointer, offset, mask):
    return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _read_row(pointer, offset):
    """A parameter of every channel, as a row to be broadcast over tokens."""
    return tl.load(pointer + offset).to(tl.float32)[None, :]


@triton.jit
def _difference(
    x, last, starts, x_tile, token, column, inside, tokens, length, width,
    HAS_LAST: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """x_{t-1} - x_t; x_{t-1} is zero where a document starts, and `last` or zero at the first token of a row."""
    begins = token % length == 0
    alone = begins
    if HAS_STARTS:
        started = tl.load(starts + token, mask=token < tokens, other=0) != 0
        alone = begins | started
    else:
        started = token < 0
    here = token.to(tl.int64)[:, None] * width + column[None, :]
    before = _read(x, here - width, inside & ~alone[:, None])
    if HAS_LAST:
        row = (token // length).to(tl.int64)[:, None] * width + column[None, :]
        before += _read(last, row, inside & (begins & ~started)[:, None])
    return before - x_tile


@triton.jit
def _read_mix(mixes, i: tl.constexpr, width, column):
    return tl.load(mixes + i * width + column, mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def _write_stream(stream, mixes, i: tl.constexpr, width, column, here, inside, x_tile, difference):
    mix = _read_mix(mixes, i, width, column)[None, :]
    tl.store(stream + here, (x_tile + difference * mix).to(stream.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "length", "units"])
def time_mix_streams_forward_kernel(
    x, mixes, last, starts, s0, s1, s2, s3, s4, s5, tokens, length, units,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LAST: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Six streams [tokens, D] of x [tokens, D], D = units UNIT; mixes [6, D]; last [B, D]; starts int8 [tokens]."""
    width = units * UNIT
    across = tl.cdiv(width, BLOCK_D)
    token = tl.program_id(0) // across * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) % across * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (token < tokens)[:, None] & (column < width)[None, :]
    here = token.to(tl.int64)[:, None] * width + column[None, :]
    x_tile = _read(x, here, inside)
    difference = _difference(
        x, last, starts, x_tile, token, column, inside, tokens, length, width, HAS_LAST, HAS_STARTS
    )
    _write_stream(s0, mixes, 0, width, column, here, inside, x_tile, difference)
    _write_stream(s1, mixes, 1, width, column, here, inside, x_tile, difference)
    _write_stream(s2, mixes, 2, width, column, here, inside, x_tile, difference)
    _write_stream(s3, mixes, 3, width, column, here, inside, x_tile, difference)
    _write_stream(s4, mixes, 4, width, column, here, inside, x_tile, difference)
    _write_stream(s5, mixes, 5, width, column, here, inside, x_tile, difference)


@triton.jit
def _write_sum(partial, program, i: tl.constexpr, count: tl.constexpr, width, column, tile):
    """The tile's sum over tokens, as row i of the program's `count` rows of partial."""
    tl.store(partial + (program.to(tl.int64) * count + i) * width + column, tl.sum(tile, 0), mask=column < width)


@triton.jit
def _continues(starts, token, tokens, length, HAS_STARTS: tl.constexpr):
    """Whether x_{t-1} of a token is that of the token before it."""
    follows = (token < tokens) & (token % length != 0)
    if HAS_STARTS:
        follows = follows & (tl.load(starts + token, mask=token < tokens, other=1) == 0)
    return follows


@triton.jit(do_not_specialize=["tokens", "length", "units"])
def time_mix_streams_backward_kernel(
    d0, d1, d2, d3, d4, d5, x, mixes, last, starts, dx, dlast, partial, tokens, length, units,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LAST: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """dx [tokens, D], dlast [B, D], and partial sums [programs, 6, D] of dmixes.

    A program goes through its BLOCK tokens from the last to the first. What a token sends to the one before it, and
    x_{t-1}, stay in registers for the next step, and every thread has its own channels, so no step waits for a
    reduction. On an H200 a tile of 16 tokens with a reduction for each stream took 7 times as long as its bytes.
    """
    width = units * UNIT
    across = tl.cdiv(width, BLOCK_D)
    program = tl.program_id(0) // across
    column = tl.program_id(0) % across * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < width
    m0, m1 = _read_mix(mixes, 0, width, column), _read_mix(mixes, 1, width, column)
    m2, m3 = _read_mix(mixes, 2, width, column), _read_mix(mixes, 3, width, column)
    m4, m5 = _read_mix(mixes, 4, width, column), _read_mix(mixes, 5, width, column)
    zero = tl.zeros([BLOCK_D], tl.float32)
    s0, s1, s2, s3, s4, s5 = zero, zero, zero, zero, zero, zero

    stop = tl.minimum((program + 1) * BLOCK, tokens)
    here = stop.to(tl.int64) * width + column
    after = inside & _continues(starts, stop, tokens, length, HAS_STARTS)
    received = _read(d0, here, after) * m0 + _read(d1, here, after) * m1 + _read(d2, here, after) * m2
    received += _read(d3, here, after) * m3 + _read(d4, here, after) * m4 + _read(d5, here, after) * m5
    x_here = _read(x, here - width, inside)
    for step in range(stop - program * BLOCK):
        token = stop - 1 - step
        here = token.to(tl.int64) * width + column
        g0, g1, g2 = _read(d0, here, inside), _read(d1, here, inside), _read(d2, here, inside)
        g3, g4, g5 = _read(d3, here, inside), _read(d4, here, inside), _read(d5, here, inside)
        x_before = _read(x, here - width, inside & (token > 0))
        follows = _continues(starts, token, tokens, length, HAS_STARTS)
        before = tl.where(follows, x_before, 0.0)
        if HAS_LAST:
            begins = token % length == 0
            entered = begins
            if HAS_STARTS:
                entered = begins & (tl.load(starts + token) == 0)
            row = (token // length).to(tl.int64) * width + column
            before += _read(last, row, inside & entered)
        gap = before - x_here
        s0 += g0 * gap
        s1 += g1 * gap
        s2 += g2 * gap
        s3 += g3 * gap
        s4 += g4 * gap
        s5 += g5 * gap
        sent = g0 * m0 + g1 * m1 + g2 * m2 + g3 * m3 + g4 * m4 + g5 * m5
        total = g0 + g1 + g2 + g3 + g4 + g5 - sent + received
        tl.store(dx + here, total.to(dx.dtype.element_ty), mask=inside)
        if HAS_LAST:
            tl.store(dlast + row, tl.where(entered, sent, 0.0).to(dlast.dtype.element_ty), mask=inside & begins)
        received = tl.where(follows, sent, 0.0)
        x_here = x_before
    sums = partial + program.to(tl.int64) * 6 * width + column
    tl.store(sums, s0, mask=inside)
    tl.store(sums + width, s1, mask=inside)
    tl.store(sums + 2 * width, s2, mask=inside)
    tl.store(sums + 3 * width, s3, mask=inside)
    tl.store(sums + 4 * width, s4, mask=inside)
    tl.store(sums + 5 * width, s5, mask=inside)


@triton.jit
def _removal_key(k_tile, k_k):
    """kk, the normalised k k_k; 1 / its norm; and where the norm is below the least allowed."""
    product = k_tile * k_k
    norm = tl.sqrt(tl.sum(product * product, 1))[:, None]
    small = norm < 1e-12
    inverse = 1.0 / tl.where(small, 1e-12, norm)
    return product * inverse, inverse, small


@triton.jit(do_not_specialize=["tokens", "heads"])
def time_mix_keys_forward_kernel(
    k, decay, rate, v, v_first, v_gate, w0, a0, v0, k_k, k_a, log_w, new_k, a, b, new_v, tokens, heads,
    K: tl.constexpr, BLOCK: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    """log_w, k', a, b and (HAS_V) v', all [tokens, H, K]."""
    head = tl.program_id(0) % heads
    token = tl.program_id(0) // heads * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None]
    column = head * K + tl.arange(0, K)
    here = (token.to(tl.int64)[:, None] * heads + head) * K + tl.arange(0, K)[None, :]
    k_tile = _read(k, here, inside)
    removal_key, _, _ = _removal_key(k_tile, _read_row(k_k, column))
    learned, rest, _ = _sigmoid(_read_row(a0, column) + _read(rate, here, inside))
    share, _, _ = _sigmoid(_read_row(w0, column) + _read(decay, here, inside))
    tl.store(log_w + here, -0.6065306597126334 * share, mask=inside)  # -exp(-1/2)
    changed = k_tile * (1.0 - rest * _read_row(k_a, column))
    tl.store(new_k + here, changed.to(new_k.dtype.element_ty), mask=inside)
    tl.store(a + here, (-removal_key).to(a.dtype.element_ty), mask=inside)
    tl.store(b + here, (removal_key * learned).to(b.dtype.element_ty), mask=inside)
    if HAS_V:
        v_tile = _read(v, here, inside)
        share, _, _ = _sigmoid(_read_row(v0, column) + _read(v_gate, here, inside))
        mixed = v_tile + (_read(v_first, here, inside) - v_tile) * share
        tl.store(new_v + here, mixed.to(new_v.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "heads"])
def time_mix_keys_backward_kernel(
    dlog_w, dnew_k, da, db, k, decay, rate, w0, a0, k_k, k_a, dk, ddecay, drate, partial, tokens, heads,
    K: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The gradients of k, decay and rate, and partial sums [programs, 4, D] of w0's, a0's, k_k's and k_a's."""
    head = tl.program_id(0) % heads
    program = tl.program_id(0) // heads
    column = head * K + tl.arange(0, K)
    zero = tl.zeros([BLOCK, K], tl.float32)
    dw0, da0, dk_k, dk_a = zero, zero, zero, zero
    for step in range(STEPS):
        token = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = (token < tokens)[:, None]
        here = (token.to(tl.int64)[:, None] * heads + head) * K + tl.arange(0, K)[None, :]
        _, _, slope = _sigmoid(_read_row(w0, column) + _read(decay, here, inside))
        change = -0.6065306597126334 * _read(dlog_w, here, inside) * slope
        dw0 += change
        tl.store(ddecay + here, change.to(ddecay.dtype.element_ty), mask=inside)

        k_tile = _read(k, here, inside)
        removal_key, inverse, small = _removal_key(k_tile, _read_row(k_k, column))
        learned, rest, slope = _sigmoid(_read_row(a0, column) + _read(rate, here, inside))
        db_tile, dnew = _read(db, here, inside), _read(dnew_k, here, inside)
        change = (db_tile * removal_key + dnew * k_tile * _read_row(k_a, column)) * slope
        da0 += change
        tl.store(drate + here, change.to(drate.dtype.element_ty), mask=inside)
        dk_a -= dnew * k_tile * rest
        dremoval_key = db_tile * learned - _read(da, here, inside)
        along = tl.sum(dremoval_key * removal_key, 1)[:, None]  # removed by the norm, unless that is below its least
        dproduct = (dremoval_key - removal_key * tl.where(small, 0.0, along)) * inverse
        dk_k += dproduct * k_tile
        change = dproduct * _read_row(k_k, column) + dnew * (1.0 - rest * _read_row(k_a, column))
        tl.store(dk + here, change.to(dk.dtype.element_ty), mask=inside)
    width = heads * K
    _write_sum(partial, program, 0, 4, width, column, dw0)
    _write_sum(partial, program, 1, 4, width, column, da0)
    _write_sum(partial, program, 2, 4, width, column, dk_k)
    _write_sum(partial, program, 3, 4, width, column, dk_a)


@triton.jit(do_not_specialize=["tokens", "heads"])
def time_mix_values_backward_kernel(
    dnew_v, v, v_first, v_gate, v0, dv, dv_first, dv_gate, partial, tokens, heads,
    K: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The gradients of v, v_first and v_gate, and partial sums [programs, 1, D] of v0's.

    Separate from the keys' kernel, with which it shares no tensor: together they took 237 registers.
    """
    head = tl.program_id(0) % heads
    program = tl.program_id(0) // heads
    column = head * K + tl.arange(0, K)
    dv0 = tl.zeros([BLOCK, K], tl.float32)
    for step in range(STEPS):
        token = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = (token < tokens)[:, None]
        here = (token.to(tl.int64)[:, None] * heads + head) * K + tl.arange(0, K)[None, :]
        share, rest, slope = _sigmoid(_read_row(v0, column) + _read(v_gate, here, inside))
        gradient = _read(dnew_v, here, inside)
        tl.store(dv + here, (gradient * rest).to(dv.dtype.element_ty), mask=inside)
        tl.store(dv_first + here, (gradient * share).to(dv_first.dtype.element_ty), mask=inside)
        change = gradient * (_read(v_first, here, inside) - _read(v, here, inside)) * slope
        dv0 += change
        tl.store(dv_gate + here, change.to(dv_gate.dtype.element_ty), mask=inside)
    _write_sum(partial, program, 0, 1, heads * K, column, dv0)


@triton.jit
def _normalise(y_tile, eps, K: tl.constexpr):
    """(y - mean) / deviation, and 1 / deviation."""
    centred = y_tile - (tl.sum(y_tile, 1) / K)[:, None]
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / K + eps)[:, None]
    return centred * scale, scale


@triton.jit(do_not_specialize=["tokens", "heads", "eps"])
def time_mix_output_forward_kernel(
    y, r, k, v, gate, r_k, weight, bias, out, tokens, heads, eps, K: tl.constexpr, BLOCK: tl.constexpr
):
    """(norm(y) weight + bias + (sum_K r k r_k) v) gate, [tokens, H, K]."""
    head = tl.program_id(0) % heads
    token = tl.program_id(0) // heads * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None]
    column = head * K + tl.arange(0, K)
    here = (token.to(tl.int64)[:, None] * heads + head) * K + tl.arange(0, K)[None, :]
    normed, _ = _normalise(_read(y, here, inside), eps, K)
    bonus = tl.sum(_read(r, here, inside) * _read(k, here, inside) * _read_row(r_k, column), 1)[:, None]
    mixed = normed * _read_row(weight, column) + _read_row(bias, column) + bonus * _read(v, here, inside)
    tl.store(out + here, (mixed * _read(gate, here, inside)).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "heads", "eps"])
def time_mix_output_backward_kernel(
    dout, y, r, k, v, gate, r_k, weight, bias, dy, dr, dk, dv, dgate, partial, tokens, heads, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The gradients of y, r, k, v and gate, and partial sums of r_k's, weight's and bias's."""
    head = tl.program_id(0) % heads
    program = tl.program_id(0) // heads
    column = head * K + tl.arange(0, K)
    zero = tl.zeros([BLOCK, K], tl.float32)
    dr_k, dweight, dbias = zero, zero, zero
    for step in range(STEPS):
        token = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = (token < tokens)[:, None]
        here = (token.to(tl.int64)[:, None] * heads + head) * K + tl.arange(0, K)[None, :]
        normed, scale = _normalise(_read(y, here, inside), eps, K)
        dout_tile, v_tile = _read(dout, here, inside), _read(v, here, inside)
        dgated = dout_tile * _read(gate, here, inside)
        dweight += dgated * normed
        dbias += dgated
        dnormed = dgated * _read_row(weight, column)
        mean, along = tl.sum(dnormed, 1)[:, None] / K, tl.sum(dnormed * normed, 1)[:, None] / K
        tl.store(dy + here, ((dnormed - mean - normed * along) * scale).to(dy.dtype.element_ty), mask=inside)
        r_tile, k_tile = _read(r, here, inside), _read(k, here, inside)
        read_key = k_tile * _read_row(r_k, column)
        bonus = tl.sum(r_tile * read_key, 1)[:, None]
        mixed = normed * _read_row(weight, column) + _read_row(bias, column) + bonus * v_tile
        tl.store(dgate + here, (dout_tile * mixed).to(dgate.dtype.element_ty), mask=inside)
        tl.store(dv + here, (dgated * bonus).to(dv.dtype.element_ty), mask=inside)
        dbonus = tl.sum(dgated * v_tile, 1)[:, None]
        tl.store(dr + here, (dbonus * read_key).to(dr.dtype.element_ty), mask=inside)
        tl.store(dk + here, (dbonus * r_tile * _read_row(r_k, column)).to(dk.dtype.element_ty), mask=inside)
        dr_k += dbonus * r_tile * k_tile
    width = heads * K
    _write_sum(partial, program, 0, 3, width, column, dr_k)
    _write_sum(partial, program, 1, 3, width, column, dweight)
    _write_sum(partial, program, 2, 3, width, column, dbias)
