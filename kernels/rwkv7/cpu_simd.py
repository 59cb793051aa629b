"""The loops of the RWKV-7 recurrence for one CPU thread, compiled by numba with explicit vectors of 8 float32.

Arrays are passed as addresses, and indices count floats (common/simd.py).

Shapes: K key width (a multiple of 16), V value width (a multiple of 32), H heads, C tokens a block.
A document and head is one item. Its state S [V, K] is in the L1 cache, in tiles:
    forward   [V / 16, K, 16], a vector holds values: S a and S r are sums over K, which stay in registers
    backward  [V, K], a vector holds keys: dr, dlog_w, dk, da, db are sums over V, which stay in registers
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
    plus,
    prefetch_span,
    row_sums,
    spread,
    store,
    times,
    transpose,
    zero,
)

TILE = 2 * SIMD_WIDTH  # values of a forward tile: 2 registers for each of S a, S r, v and the next S a
ROWS = 32  # value rows of a backward tile: its dS and the states of its block stay in L1 and L2
SPARE = 48  # unused floats after each state of a block; at distances of a power of two they would share few L1 sets


@njit(nogil=True)
def _to_tiles(rows, at, tiles, to, K, V):  # type: ignore[no-untyped-def]
    """Copies [V, K] to [V / 16, K, 16]."""
    for v in range(0, V, SIMD_WIDTH):
        for k in range(0, K, SIMD_WIDTH):
            transpose(rows, at + v * K + k, K, tiles, to + v // TILE * TILE * K + k * TILE + v % TILE, TILE)


@njit(nogil=True)
def _from_tiles(tiles, at, rows, to, K, V):  # type: ignore[no-untyped-def]
    """Copies [V / 16, K, 16] to [V, K]."""
    for v in range(0, V, SIMD_WIDTH):
        for k in range(0, K, SIMD_WIDTH):
            transpose(tiles, at + v // TILE * TILE * K + k * TILE + v % TILE, TILE, rows, to + v * K + k, K)


@loop
def scan(  # type: ignore[no-untyped-def]
    first, stride, items, heads, K, V, spacing, starts,
    r, log_w, k, v, a, b, state, y, removed, last, checkpoints,
    S, w, constants,
):  # fmt: skip
    """Items first, first + stride, ...: y [tokens, H, V], removed (S_{t-1} a_t) [tokens, H, V], last [N, H, V, K].

    starts: address of int64 [N + 1]. state, removed, last and checkpoints are 0 where they are absent.
    checkpoints [tokens // C, H, V / 16, K, 16]: the states before each block of C tokens, except a document's first
    block; those of a document that starts at token s begin at number s // C.
    Scratch: S [V, K]; w [C, K]. constants: 0, then 1.
    """
    token = heads * K
    for item in range(first, items, stride):
        document = item // heads
        head = item - document * heads
        begin, end = integer(starts, document), integer(starts, document + 1)
        if state == 0:
            fill(constants, S, 0, K * V)
        else:
            _to_tiles(state, item * K * V, S, 0, K, V)
        for block in range(begin, end, spacing):
            stop = min(block + spacing, end)
            if checkpoints != 0 and block > begin:
                number = begin // spacing + (block - begin) // spacing - 1
                copy(S, 0, checkpoints, (number * heads + head) * K * V, K * V)
            for t in range(block, stop):
                for i in range(0, K, SIMD_WIDTH):
                    store(w, (t - block) * K + i, exponential(load(log_w, t * token + head * K + i)))
            for tile in range(0, V, TILE):
                base = tile * K
                here = block * token + head * K
                removed0, removed1 = zero(), zero()
                for i in range(K):
                    a_i = spread(a, here + i)
                    removed0 = fused(load(S, base + i * TILE), a_i, removed0)
                    removed1 = fused(load(S, base + i * TILE + SIMD_WIDTH), a_i, removed1)
                for t in range(block, stop):
                    here = t * token + head * K
                    after = here + token if t + 1 < stop else here  # the last token of a block has no next S a
                    decay = (t - block) * K
                    value_token = (t * heads + head) * V
                    if tile == 0:  # prefetch of the next block: a token is H K floats after its predecessor
                        for x in (r, log_w, k, a, b):
                            prefetch_span(x, here + spacing * token, K)
                        for x in (v, y, removed if removed != 0 else y):
                            prefetch_span(x, value_token + spacing * heads * V, V)
                    value = value_token + tile
                    if removed != 0:
                        store(removed, value, removed0)
                        store(removed, value + SIMD_WIDTH, removed1)
                    v0, v1 = load(v, value), load(v, value + SIMD_WIDTH)
                    y0, y1, next0, next1 = zero(), zero(), zero(), zero()
                    for i in range(K):
                        w_i, b_i, k_i = spread(w, decay + i), spread(b, here + i), spread(k, here + i)
                        r_i, a_i = spread(r, here + i), spread(a, after + i)
                        at = base + i * TILE
                        s0 = fused(v0, k_i, fused(removed0, b_i, times(load(S, at), w_i)))
                        s1 = fused(v1, k_i, fused(removed1, b_i, times(load(S, at + SIMD_WIDTH), w_i)))
                        store(S, at, s0)
                        store(S, at + SIMD_WIDTH, s1)
                        y0, y1 = fused(s0, r_i, y0), fused(s1, r_i, y1)
                        next0, next1 = fused(s0, a_i, next0), fused(s1, a_i, next1)
                    store(y, value, y0)
                    store(y, value + SIMD_WIDTH, y1)
                    removed0, removed1 = next0, next1
        if last != 0:
            _from_tiles(S, 0, last, item * K * V, K, V)


@njit(nogil=True)
def _recompute(source, states, size, count, K, w, b, k, v, removed, token_k, token_v):  # type: ignore[no-untyped-def]
    """States [32, K] after each of `count` tokens, from the state before them; `size` floats apart; w is [count, K].

    Tokens are the outer loop, with w, b and k of 16 keys in registers. That is 1.5 times as fast as rows that stay in
    registers over all tokens, because the stores of the latter are strided.
    """
    for t in range(count):
        after = states + 4 * t * size
        before = source if t == 0 else after - 4 * size
        for i in range(0, K, TILE):
            w0, w1 = load(w, t * K + i), load(w, t * K + i + SIMD_WIDTH)
            b0, b1 = load(b, t * token_k + i), load(b, t * token_k + i + SIMD_WIDTH)
            k0, k1 = load(k, t * token_k + i), load(k, t * token_k + i + SIMD_WIDTH)
            for row in range(ROWS):
                removed_v, v_v = spread(removed, t * token_v + row), spread(v, t * token_v + row)
                at = row * K + i
                store(after, at, fused(v_v, k0, fused(removed_v, b0, times(load(before, at), w0))))
                at += SIMD_WIDTH
                store(after, at, fused(v_v, k1, fused(removed_v, b1, times(load(before, at), w1))))


@njit(nogil=True)
def _step_back(  # type: ignore[no-untyped-def]
    K, S, D, w, a, dremoved, dlog_w, da, r, k, b, dy, v, removed, dr, dk, db, dv, sums, zeros, sofar_after, sofar
):
    """One step back for 32 rows: from S_{t+1} to S_t. w, a, dremoved belong to token t+1, the other inputs to token t.

    D [32, K]: gradient of S_{t+1}; becomes that of S_t, with the part from y_t. sums [2, 32, 8] is scratch. All
    addresses point at this token, head and first row. sofar: whether earlier rows have added their parts of the sums
    over rows to dr, dk and db (0: not); sofar_after: the same for dlog_w and da.
    """
    for i in range(0, K, SIMD_WIDTH):
        w_i, a_i, r_i, k_i, b_i = load(w, i), load(a, i), load(r, i), load(k, i), load(b, i)
        dw_i, da_i, dr_i, dk_i, db_i = zero(), zero(), zero(), zero(), zero()
        begun = sums if i > 0 else zeros
        for row in range(ROWS):
            s, d = load(S, row * K + i), load(D, row * K + i)
            dremoved_v, dy_v = spread(dremoved, row), spread(dy, row)
            dw_i, da_i, dr_i = fused(s, d, dw_i), fused(s, dremoved_v, da_i), fused(s, dy_v, dr_i)
            d = fused(dy_v, r_i, fused(dremoved_v, a_i, times(d, w_i)))
            store(D, row * K + i, d)
            dk_i, db_i = fused(d, spread(v, row), dk_i), fused(d, spread(removed, row), db_i)
            store(sums, row * SIMD_WIDTH, fused(d, k_i, load(begun, row * SIMD_WIDTH)))
            store(sums, (ROWS + row) * SIMD_WIDTH, fused(d, b_i, load(begun, (ROWS + row) * SIMD_WIDTH)))
        store(dlog_w, i, fused(dw_i, w_i, load(dlog_w if sofar_after else zeros, i)))
        store(da, i, plus(da_i, load(da if sofar_after else zeros, i)))
        store(dr, i, plus(dr_i, load(dr if sofar else zeros, i)))
        store(dk, i, plus(dk_i, load(dk if sofar else zeros, i)))
        store(db, i, plus(db_i, load(db if sofar else zeros, i)))
    for row in range(0, ROWS, SIMD_WIDTH):
        store(dv, row, row_sums(sums, row * SIMD_WIDTH))
        store(dremoved, row, row_sums(sums, (ROWS + row) * SIMD_WIDTH))


@loop
def scan_back(  # type: ignore[no-untyped-def]
    first, stride, items, heads, K, V, spacing, starts,
    r, log_w, k, v, a, b, state, removed, checkpoints, dy, dlast,
    dr, dlog_w, dk, dv, da, db, dstate,
    D, S, states, w, dremoved, sums, zeros, ones, unused,
):  # fmt: skip
    """The adjoint of `scan` over the same items: for each block, from the last on, recompute the states and step back.

    state, dlast and dstate are 0 where they are absent.
    Scratch: D, S [V, K]; states [C, 32 K + 48]; w [C + 1, K]; dremoved [V]; sums [2, 32, 8]; unused [max(K, V)].
    zeros [max(512, K, V)] and ones [K] are constants.
    """
    size = ROWS * K + SPARE
    for item in range(first, items, stride):
        document = item // heads
        head = item - document * heads
        begin, end = integer(starts, document), integer(starts, document + 1)
        if dlast == 0:
            fill(zeros, D, 0, K * V)
        else:
            copy(dlast, item * K * V, D, 0, K * V)
        fill(zeros, dremoved, 0, V)
        blocks = (end - begin + spacing - 1) // spacing
        for block in range(blocks - 1, -1, -1):
            start = begin + block * spacing
            stop = min(start + spacing, end)
            if block > 0:
                number = begin // spacing + block - 1
                _from_tiles(checkpoints, (number * heads + head) * K * V, S, 0, K, V)
            elif state == 0:
                fill(zeros, S, 0, K * V)
            else:
                copy(state, item * K * V, S, 0, K * V)
            for t in range(start, min(stop + 1, end)):
                for i in range(0, K, SIMD_WIDTH):
                    store(w, (t - start) * K + i, exponential(load(log_w, (t * heads + head) * K + i)))
            for tile in range(0, V, ROWS):
                at_k, at_v = 4 * (start * heads + head) * K, 4 * ((start * heads + head) * V + tile)
                _recompute(
                    S + 4 * tile * K, states, size, stop - start, K, w,
                    b + at_k, k + at_k, v + at_v, removed + at_v, heads * K, heads * V,
                )  # fmt: skip
                for t in range(stop - 1, start - 1, -1):
                    at_k, at_v = 4 * (t * heads + head) * K, 4 * ((t * heads + head) * V + tile)
                    at_next = at_k + 4 * heads * K
                    follows = t + 1 < end
                    if tile == 0:  # prefetch of the block before
                        for x in (r, log_w, k, a, b, dr, dlog_w, dk, da, db):
                            prefetch_span(x + at_k, -spacing * heads * K, K)
                        for x in (v, removed, dy, dv):
                            prefetch_span(x + at_v, -spacing * heads * V, V)
                    _step_back(
                        K, states + 4 * (t - start) * size, D + 4 * tile * K,
                        w + 4 * (t + 1 - start) * K if follows else ones,
                        a + at_next if follows else zeros,
                        dremoved + 4 * tile,
                        dlog_w + at_next if follows else unused,
                        da + at_next if follows else unused,
                        r + at_k, k + at_k, b + at_k, dy + at_v, v + at_v, removed + at_v,
                        dr + at_k, dk + at_k, db + at_k, dv + at_v,
                        sums, zeros, follows and tile > 0, tile > 0,
                    )  # fmt: skip
                if block == 0:  # the step back from the document's first token, to none, which has no sums
                    at_k = 4 * (begin * heads + head) * K
                    _step_back(
                        K, S + 4 * tile * K, D + 4 * tile * K,
                        w, a + at_k, dremoved + 4 * tile, dlog_w + at_k, da + at_k,
                        zeros, zeros, zeros, zeros, zeros, zeros, unused, unused, unused, unused,
                        sums, zeros, tile > 0, begin > end,
                    )  # fmt: skip
        if dstate != 0:
            copy(D, 0, dstate, item * K * V, K * V)
