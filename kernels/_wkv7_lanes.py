"""The RWKV-7 recurrence's loops for one CPU thread, compiled by numba with explicit 8-lane float32 vectors.

Vectors are explicit because LLVM does not find this register blocking by itself: accumulators that numba keeps in
arrays stay in memory. Everything is passed as an address and counted in floats; the caller keeps the tensors alive.
The intrinsics and the loops share a file because numba's disk cache watches the file of the compiled function alone.

Shapes: K key width (a multiple of 16), V value width (a multiple of 32), H heads, C tokens a block.
A document and head is one item; its state S [V, K] lives in L1 in tiles:
    forward   [V / 16, K, 16], value lanes: both dot products S a and S r are sums over K, which stay in registers
    backward  [V, K], key lanes: dr, dlog_w, dk, da, db are sums over V, which stay in registers
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 8  # one AVX register, two of NEON's
TILE = 2 * LANES  # value lanes of a forward tile: 2 registers each of S a, S r, v and the next S a
ROWS = 32  # value rows of a backward tile: its dS and the block's states stay in L1 and L2
LINE = 16  # floats of a cache line
SPARE = 48  # floats after each of a block's states: a power of two apart, they would share few sets of the L1 cache

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)


class _Lanes(types.Type):
    """Numba's name for 8 float32 in one register."""

    def __init__(self) -> None:
        super().__init__(name="float32x8")


_lanes = _Lanes()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _pointer(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    element = builder.gep(builder.inttoptr(base, _FLOAT.as_pointer()), [index])
    return builder.bitcast(element, kind.as_pointer())


def _constant(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def _shuffle(builder: Any, x: Any, y: Any, indices: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), indices))


def _splat(builder: Any, scalar: Any) -> Any:
    vector = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return _shuffle(builder, vector, vector, [0] * LANES)


def _fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, in one rounding where the machine has the instruction."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{LANES}f32"
    )
    return builder.call(function, [x, y, z])


def _load8(builder: Any, base: Any, index: Any) -> Any:
    return builder.load(_pointer(builder, base, index, _VECTOR), align=4)


def _store8(builder: Any, base: Any, index: Any, x: Any) -> None:
    builder.store(x, _pointer(builder, base, index, _VECTOR), align=4)


@intrinsic
def load(_context: Any, base: Any, index: Any) -> Any:
    """Floats [index, index + 8) from an address."""
    return _lanes(types.int64, types.int64), lambda context, builder, signature, at: _load8(builder, *at)


@intrinsic
def store(_context: Any, base: Any, index: Any, x: Any) -> Any:
    """Floats [index, index + 8) from an address become x."""

    def generate(context: Any, builder: Any, signature: Any, at: Any) -> Any:
        _store8(builder, *at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, _lanes), generate


@intrinsic
def prefetch(_context: Any, base: Any, index: Any) -> Any:
    """Ask for the cache line of the float at index; the address may be anything."""

    def generate(context: Any, builder: Any, signature: Any, at: Any) -> Any:
        base, index = at
        pointer = _pointer(builder, base, index, ir.IntType(8))
        flags = [ir.Constant(ir.IntType(32), flag) for flag in (0, 3, 1)]  # to read, into the nearest cache, data
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, *[flag.type for flag in flags]])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0"), [pointer, *flags])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def spread(_context: Any, base: Any, index: Any) -> Any:
    """The float at index in every lane."""

    def generate(context: Any, builder: Any, signature: Any, at: Any) -> Any:
        base, index = at
        return _splat(builder, builder.load(_pointer(builder, base, index, _FLOAT), align=4))

    return _lanes(types.int64, types.int64), generate


@intrinsic
def integer(_context: Any, base: Any, index: Any) -> Any:
    """The int64 at index."""

    def generate(context: Any, builder: Any, signature: Any, at: Any) -> Any:
        base, index = at
        return builder.load(builder.gep(builder.inttoptr(base, index.type.as_pointer()), [index]))

    return types.int64(types.int64, types.int64), generate


@intrinsic
def zero(_context: Any) -> Any:
    return _lanes(), lambda context, builder, signature, none: _constant(0.0)


@intrinsic
def times(_context: Any, x: Any, y: Any) -> Any:
    return _lanes(_lanes, _lanes), lambda context, builder, signature, xy: builder.fmul(*xy)


@intrinsic
def plus(_context: Any, x: Any, y: Any) -> Any:
    return _lanes(_lanes, _lanes), lambda context, builder, signature, xy: builder.fadd(*xy)


@intrinsic
def fused(_context: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z."""
    return _lanes(_lanes, _lanes, _lanes), lambda context, builder, signature, xyz: _fused(builder, *xyz)


@intrinsic
def exponential(_context: Any, x: Any) -> Any:
    """e^x to 2 units in the last place: 2^n times a polynomial on |f| <= ln(2) / 2; e^-87 below -87.

    Ours, so that its bits do not depend on where in a tensor an element stands. The C library's has one lane.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (x,) = arguments
        for bound, beyond in ((-87.0, "<"), (88.0, ">")):  # NaN compares false and stays
            x = builder.select(builder.fcmp_ordered(beyond, x, _constant(bound)), _constant(bound), x)
        shift = _constant(1.5 * 2**23)  # adding it rounds to an integer, in the low bits
        shifted = _fused(builder, x, _constant(1.4426950408889634), shift)
        n = builder.fsub(shifted, shift)
        f = _fused(builder, n, _constant(-0.693359375), x)  # ln 2 in two parts, n times the first is exact
        f = _fused(builder, n, _constant(2.12194440e-4), f)
        p = _constant(1 / 5040)
        for divisor in (720, 120, 24, 6, 2, 1, 1):  # Taylor: the first term left out is f^8 / 8! < 6e-9
            p = _fused(builder, p, f, _constant(1 / divisor))
        integers = ir.VectorType(ir.IntType(32), LANES)
        exponent = builder.shl(builder.bitcast(shifted, integers), ir.Constant(integers, [23] * LANES))
        power = builder.add(exponent, ir.Constant(integers, [127 << 23] * LANES))
        return builder.fmul(p, builder.bitcast(power, _VECTOR))

    return _lanes(_lanes), generate


@intrinsic
def row_sums(_context: Any, base: Any, index: Any) -> Any:
    """The sums of 8 rows of 8 floats, by halving: 14 shuffles and 7 additions."""

    def generate(context: Any, builder: Any, signature: Any, at: Any) -> Any:
        base, index = at
        rows = [_load8(builder, base, builder.add(index, index.type(8 * i))) for i in range(8)]
        for _ in range(2):
            rows = [
                builder.fadd(
                    _shuffle(builder, x, y, [0, 2, 8, 10, 4, 6, 12, 14]),
                    _shuffle(builder, x, y, [1, 3, 9, 11, 5, 7, 13, 15]),
                )
                for x, y in zip(rows[::2], rows[1::2], strict=True)
            ]
        low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
        return builder.fadd(_shuffle(builder, rows[0], rows[1], low), _shuffle(builder, rows[0], rows[1], high))

    return _lanes(types.int64, types.int64), generate


@intrinsic
def transpose(_context: Any, source: Any, at: Any, stride: Any, target: Any, to: Any, step: Any) -> Any:
    """An 8 x 8 block, rows `stride` floats apart, into one with rows `step` floats apart."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, at, stride, target, to, step = arguments
        rows = [_load8(builder, source, builder.add(at, builder.mul(stride, at.type(i)))) for i in range(8)]
        for distance in (4, 2, 1):  # swap the off-diagonal blocks of 4, then of 2, then of 1
            for i in range(8):
                if i & distance:
                    continue
                x, y = rows[i], rows[i + distance]
                low = [lane if not lane & distance else 8 + lane - distance for lane in range(8)]
                high = [lane + distance if not lane & distance else 8 + lane for lane in range(8)]
                rows[i], rows[i + distance] = _shuffle(builder, x, y, low), _shuffle(builder, x, y, high)
        for i, row in enumerate(rows):
            _store8(builder, target, builder.add(to, builder.mul(step, to.type(i))), row)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _compiled(function: Callable[..., None]) -> Any:
    """Compiled on first use and kept on disk; where no folder can be written, compiled in every process."""
    try:
        return njit(function, nogil=True, cache=True)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return njit(function, nogil=True)


@njit(nogil=True)
def _copy(source, at, target, to, count):  # type: ignore[no-untyped-def]
    """`count` floats, a multiple of 8."""
    for i in range(0, count, LANES):
        store(target, to + i, load(source, at + i))


@njit(nogil=True)
def _fill(source, target, to, count):  # type: ignore[no-untyped-def]
    """`count` floats, a multiple of 8, all equal to the first of `source`."""
    for i in range(0, count, LANES):
        store(target, to + i, spread(source, 0))


@njit(nogil=True)
def _prefetch(address, at, count):  # type: ignore[no-untyped-def]
    for i in range(0, count, LINE):
        prefetch(address, at + i)


@njit(nogil=True)
def _to_tiles(rows, at, tiles, to, K, V):  # type: ignore[no-untyped-def]
    """[V, K] to [V / 16, K, 16]."""
    for v in range(0, V, LANES):
        for k in range(0, K, LANES):
            transpose(rows, at + v * K + k, K, tiles, to + v // TILE * TILE * K + k * TILE + v % TILE, TILE)


@njit(nogil=True)
def _from_tiles(tiles, at, rows, to, K, V):  # type: ignore[no-untyped-def]
    """[V / 16, K, 16] to [V, K]."""
    for v in range(0, V, LANES):
        for k in range(0, K, LANES):
            transpose(tiles, at + v // TILE * TILE * K + k * TILE + v % TILE, TILE, rows, to + v * K + k, K)


@_compiled
def scan(  # type: ignore[no-untyped-def]
    first, stride, items, heads, K, V, spacing, starts,
    r, log_w, k, v, a, b, state, y, removed, last, checkpoints,
    S, w, constants,
):  # fmt: skip
    """Items first, first + stride, ...: y [tokens, H, V], removed (S_{t-1} a_t) [tokens, H, V], last [N, H, V, K].

    starts: int64 [N + 1] as an address. state, removed, last and checkpoints are 0 where there are none.
    checkpoints [tokens // C, H, V / 16, K, 16]: the states before each block of C tokens but a document's first;
    a document that starts at token s keeps its from number s // C on.
    Scratch: S [V, K]; w [C, K]. constants: 0, then 1.
    """
    token = heads * K
    for item in range(first, items, stride):
        document = item // heads
        head = item - document * heads
        begin, end = integer(starts, document), integer(starts, document + 1)
        if state == 0:
            _fill(constants, S, 0, K * V)
        else:
            _to_tiles(state, item * K * V, S, 0, K, V)
        for block in range(begin, end, spacing):
            stop = min(block + spacing, end)
            if checkpoints != 0 and block > begin:
                number = begin // spacing + (block - begin) // spacing - 1
                _copy(S, 0, checkpoints, (number * heads + head) * K * V, K * V)
            for t in range(block, stop):
                for i in range(0, K, LANES):
                    store(w, (t - block) * K + i, exponential(load(log_w, t * token + head * K + i)))
            for tile in range(0, V, TILE):
                base = tile * K
                here = block * token + head * K
                removed0, removed1 = zero(), zero()
                for i in range(K):
                    a_i = spread(a, here + i)
                    removed0 = fused(load(S, base + i * TILE), a_i, removed0)
                    removed1 = fused(load(S, base + i * TILE + LANES), a_i, removed1)
                for t in range(block, stop):
                    here = t * token + head * K
                    after = here + token if t + 1 < stop else here  # the block's last token reads for nobody
                    decay = (t - block) * K
                    value_token = (t * heads + head) * V
                    if tile == 0:  # the next block's: a token lies H K floats after its predecessor
                        for x in (r, log_w, k, a, b):
                            _prefetch(x, here + spacing * token, K)
                        for x in (v, y, removed if removed != 0 else y):
                            _prefetch(x, value_token + spacing * heads * V, V)
                    value = value_token + tile
                    if removed != 0:
                        store(removed, value, removed0)
                        store(removed, value + LANES, removed1)
                    v0, v1 = load(v, value), load(v, value + LANES)
                    y0, y1, next0, next1 = zero(), zero(), zero(), zero()
                    for i in range(K):
                        w_i, b_i, k_i = spread(w, decay + i), spread(b, here + i), spread(k, here + i)
                        r_i, a_i = spread(r, here + i), spread(a, after + i)
                        at = base + i * TILE
                        s0 = fused(v0, k_i, fused(removed0, b_i, times(load(S, at), w_i)))
                        s1 = fused(v1, k_i, fused(removed1, b_i, times(load(S, at + LANES), w_i)))
                        store(S, at, s0)
                        store(S, at + LANES, s1)
                        y0, y1 = fused(s0, r_i, y0), fused(s1, r_i, y1)
                        next0, next1 = fused(s0, a_i, next0), fused(s1, a_i, next1)
                    store(y, value, y0)
                    store(y, value + LANES, y1)
                    removed0, removed1 = next0, next1
        if last != 0:
            _from_tiles(S, 0, last, item * K * V, K, V)


@njit(nogil=True)
def _recompute(source, states, size, count, K, w, b, k, v, removed, token_k, token_v):  # type: ignore[no-untyped-def]
    """States [32, K], `size` floats apart, after each of `count` tokens from the one before them; w is [count, K].

    A token after the other, 16 key lanes' w, b, k in registers: 1.5 times as fast as rows that stay in registers
    through the tokens, whose stores are strided.
    """
    for t in range(count):
        after = states + 4 * t * size
        before = source if t == 0 else after - 4 * size
        for i in range(0, K, TILE):
            w0, w1 = load(w, t * K + i), load(w, t * K + i + LANES)
            b0, b1 = load(b, t * token_k + i), load(b, t * token_k + i + LANES)
            k0, k1 = load(k, t * token_k + i), load(k, t * token_k + i + LANES)
            for row in range(ROWS):
                removed_v, v_v = spread(removed, t * token_v + row), spread(v, t * token_v + row)
                at = row * K + i
                store(after, at, fused(v_v, k0, fused(removed_v, b0, times(load(before, at), w0))))
                at += LANES
                store(after, at, fused(v_v, k1, fused(removed_v, b1, times(load(before, at), w1))))


@njit(nogil=True)
def _step_back(  # type: ignore[no-untyped-def]
    K, S, D, w, a, dremoved, dlog_w, da, r, k, b, dy, v, removed, dr, dk, db, dv, sums, zeros, sofar_after, sofar
):
    """One token back on 32 rows: leave token t+1 (w, a, dremoved) and enter token t (the others) at S_t.

    D [32, K]: gradient of S_{t+1}, becomes that of S_t, its use by y_t included. sums [2, 32, 8] is scratch.
    All addresses point at this token, head and first row; sofar: whether earlier rows have left their part of the
    sums over rows in dr, dk, db already (0: not), sofar_after the same of dlog_w and da.
    """
    for i in range(0, K, LANES):
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
            store(sums, row * LANES, fused(d, k_i, load(begun, row * LANES)))
            store(sums, (ROWS + row) * LANES, fused(d, b_i, load(begun, (ROWS + row) * LANES)))
        store(dlog_w, i, fused(dw_i, w_i, load(dlog_w if sofar_after else zeros, i)))
        store(da, i, plus(da_i, load(da if sofar_after else zeros, i)))
        store(dr, i, plus(dr_i, load(dr if sofar else zeros, i)))
        store(dk, i, plus(dk_i, load(dk if sofar else zeros, i)))
        store(db, i, plus(db_i, load(db if sofar else zeros, i)))
    for row in range(0, ROWS, LANES):
        store(dv, row, row_sums(sums, row * LANES))
        store(dremoved, row, row_sums(sums, (ROWS + row) * LANES))


@_compiled
def scan_back(  # type: ignore[no-untyped-def]
    first, stride, items, heads, K, V, spacing, starts,
    r, log_w, k, v, a, b, state, removed, checkpoints, dy, dlast,
    dr, dlog_w, dk, dv, da, db, dstate,
    D, S, states, w, dremoved, sums, zeros, ones, unused,
):  # fmt: skip
    """The adjoint of `scan` over the same items, block by block from the end: recompute the states, walk back.

    state, dlast and dstate are 0 where there are none.
    Scratch: D, S [V, K]; states [C, 32 K + 48]; w [C + 1, K]; dremoved [V]; sums [2, 32, 8]; unused [max(K, V)].
    zeros [max(512, K, V)] and ones [K] are constants.
    """
    size = ROWS * K + SPARE
    for item in range(first, items, stride):
        document = item // heads
        head = item - document * heads
        begin, end = integer(starts, document), integer(starts, document + 1)
        if dlast == 0:
            _fill(zeros, D, 0, K * V)
        else:
            _copy(dlast, item * K * V, D, 0, K * V)
        _fill(zeros, dremoved, 0, V)
        blocks = (end - begin + spacing - 1) // spacing
        for block in range(blocks - 1, -1, -1):
            start = begin + block * spacing
            stop = min(start + spacing, end)
            if block > 0:
                number = begin // spacing + block - 1
                _from_tiles(checkpoints, (number * heads + head) * K * V, S, 0, K, V)
            elif state == 0:
                _fill(zeros, S, 0, K * V)
            else:
                _copy(state, item * K * V, S, 0, K * V)
            for t in range(start, min(stop + 1, end)):
                for i in range(0, K, LANES):
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
                    if tile == 0:  # the block before
                        for x in (r, log_w, k, a, b, dr, dlog_w, dk, da, db):
                            _prefetch(x + at_k, -spacing * heads * K, K)
                        for x in (v, removed, dy, dv):
                            _prefetch(x + at_v, -spacing * heads * V, V)
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
                if block == 0:  # leave the document's first token, enter none, for which nothing is summed
                    at_k = 4 * (begin * heads + head) * K
                    _step_back(
                        K, S + 4 * tile * K, D + 4 * tile * K,
                        w, a + at_k, dremoved + 4 * tile, dlog_w + at_k, da + at_k,
                        zeros, zeros, zeros, zeros, zeros, zeros, unused, unused, unused, unused,
                        sums, zeros, tile > 0, begin > end,
                    )  # fmt: skip
        if dstate != 0:
            _copy(D, 0, dstate, item * K * V, K * V)
