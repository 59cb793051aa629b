"""RWKV-7 within a chunk, in Triton: the chunk's affine map of the state, and the gradients of its inputs.

C tokens a chunk, K key width, V value width. With g the inclusive cumulative log decay, m its middle, G its total:
    r~ = r e^(g - m), a~ = a e^(g - log_w - m), k~ = k e^(m - g), b~ = b e^(m - g)           [C, K], operands
    A_qk, A_qb = tril(r~ k~^T), tril(r~ b~^T);  A_ak, A_ab = the same of a~, below the diagonal  [C, C]
    T = (I - A_ab)^-1
and with h = S^T [K, V] the state at the chunk's start
    h' = e^G h + R h + Q,  R = e^(G - m) b~^T T a~ e^m,  Q = e^(G - m) (k~^T v + b~^T T A_ak v)
    y = P h + Y,           P = (r~ + A_qb T a~) e^m,     Y = A_qk v + A_qb T A_ak v
so that only h' = e^G h + R h + Q is sequential (wkv7_scan.py). e^G stays outside R, in float32: it is the large part.

Operands are bfloat16 or float32 (the stored maps' dtype). Exponents are within half a chunk of the middle: both hold
|log_w| C / 2 < 80, which leaves e^8 for the values themselves. RWKV-7 has |log_w| < 0.6066: 20 at C = 64.

No dot takes the transpose of a dot's result, which Triton 3.4 to 3.7.0 miscompiled on Hopper
(flash-linear-attention, issue 640): transposed operands are loaded or element-wise, and the backward pass works with
U, Z^T and dA^T, which come out of their products as the next ones take them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from cdrmix.kernels._common import dot, dot_add, narrow


@triton.jit
def span(table, slot, length, per_row, C: tl.constexpr):
    """A chunk's first token and its document's end; the first is negative where the slot is unused.

    per_row: chunks a row, where every row is one document of `length` tokens; 0 where `table` [slots, 2] says.
    """
    if per_row == 0:
        start = tl.load(table + slot.to(tl.int64) * 2)
        end = tl.load(table + slot.to(tl.int64) * 2 + 1)
    else:
        row = (slot // per_row).to(tl.int64) * length
        start = row + slot % per_row * C
        end = row + length
    return start, end


@triton.jit
def load_tokens(tensor, rows, columns, stride, inside):
    """A [C, D] tile of a [tokens, H, D] tensor in float32; zero after the document's end."""
    return tl.load(tensor + rows[:, None] * stride + columns[None, :], mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_tokens(tensor, rows, columns, stride, inside, x):
    """The inverse of load_tokens, in the tensor's own dtype."""
    x = narrow(x, tensor.dtype.element_ty)
    tl.store(tensor + rows[:, None] * stride + columns[None, :], x, mask=inside[:, None])


@triton.jit
def unit_lower_inverse(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I - A)^-1 of strictly lower triangular A [C, C], float32, by doubling the size of inverted diagonal blocks.

    With X and Y inverted and A_yx below and left of them, [[X, 0], [Y A_yx X, Y]] is the next inverse, which for all
    blocks of a size at once is T + T L T with L the A_yx alone. 2 (log2 C - 1) products; 16-blocks as Neumann series
    take as many, and their powers cancel up to binomial(15, 7) = 6435 times.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    T = tl.where(i // 2 == j // 2, A, 0.0) + tl.where(i == j, 1.0, 0.0)
    for level in tl.static_range(1, 6):
        if (2 << level) <= C:
            L = tl.where(((i >> level) != (j >> level)) & ((i >> (level + 1)) == (j >> (level + 1))), A, 0.0)
            T = dot_add(T, dot(L, T, PRECISION), T, PRECISION)
    return T


@triton.jit(do_not_specialize=["length", "per_row", "heads", "save_T"])
def wkv7_chunk_map(
    r, log_w, k, v, a, b, table, R, Q, P, Y, T, gamma, length, per_row, heads, save_T,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, VALUES: tl.constexpr,
    PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """The maps of one chunk and head: R [K, K], Q [K, V], P [C, K], Y [C, V], T [C, C], gamma = e^G [K].

    VALUES: whether Q and Y are wanted; the backward pass makes the others again.
    """
    slot, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start, end = span(table, slot, length, per_row, C)
    if start < 0:
        return
    operand: tl.constexpr = R.dtype.element_ty
    rows, keys = tl.arange(0, C), tl.arange(0, K)
    inside = start + rows < end
    stride = heads * K
    token = (start * heads + head) * K
    chunk = slot.to(tl.int64) * heads + head

    w = load_tokens(log_w + token, rows, keys, stride, inside)
    g = tl.cumsum(w, 0)
    middle = tl.sum(tl.where(rows[:, None] == C // 2 - 1, g, 0.0), 0)
    total = tl.sum(tl.where(rows[:, None] == C - 1, g, 0.0), 0)
    g -= middle[None, :]
    tl.store(gamma + chunk * K + keys, tl.exp(total))
    aq = narrow(load_tokens(a + token, rows, keys, stride, inside) * tl.exp(g - w), operand)
    rq = narrow(load_tokens(r + token, rows, keys, stride, inside) * tl.exp(g), operand)
    away = tl.exp(-g)
    bk = narrow(load_tokens(b + token, rows, keys, stride, inside) * away, operand)
    inclusive, exclusive = rows[:, None] >= rows[None, :], rows[:, None] > rows[None, :]

    A_ab = tl.where(exclusive, dot(aq, tl.trans(bk), PRECISION), 0.0)
    inverse = narrow(unit_lower_inverse(A_ab, C, INVERSE), operand)
    squares = rows[:, None] * C + rows[None, :]
    if save_T != 0:
        tl.store(T + chunk * C * C + squares, inverse)
    A_qb = narrow(tl.where(inclusive, dot(rq, tl.trans(bk), PRECISION), 0.0), operand)
    W = narrow(dot(inverse, aq, PRECISION), operand)
    enter, leave = tl.exp(middle), tl.exp(total - middle)
    P_tile = dot_add(A_qb, W, rq.to(tl.float32), PRECISION) * enter[None, :]
    tl.store(P + chunk * C * K + rows[:, None] * K + keys[None, :], narrow(P_tile, operand))
    R_tile = dot(tl.trans(bk), W, PRECISION) * leave[:, None] * enter[None, :]
    tl.store(R + chunk * K * K + keys[:, None] * K + keys[None, :], narrow(R_tile, operand))

    if VALUES:
        kk = narrow(load_tokens(k + token, rows, keys, stride, inside) * away, operand)
        A_qk = narrow(tl.where(inclusive, dot(rq, tl.trans(kk), PRECISION), 0.0), operand)
        A_ak = narrow(tl.where(exclusive, dot(aq, tl.trans(kk), PRECISION), 0.0), operand)
        for first in range(0, V, BLOCK_V):
            values = first + tl.arange(0, BLOCK_V)
            v_tile = narrow(load_tokens(v + (start * heads + head) * V, rows, values, heads * V, inside), operand)
            U = narrow(dot(inverse, narrow(dot(A_ak, v_tile, PRECISION), operand), PRECISION), operand)
            Y_tile = dot_add(A_qb, U, dot(A_qk, v_tile, PRECISION), PRECISION)
            store_tokens(Y + (start * heads + head) * V, rows, values, heads * V, inside, Y_tile)
            Q_tile = dot_add(tl.trans(bk), U, dot(tl.trans(kk), v_tile, PRECISION), PRECISION) * leave[:, None]
            tl.store(Q + chunk * K * V + keys[:, None] * V + values[None, :], narrow(Q_tile, operand))


@triton.jit(do_not_specialize=["length", "per_row", "heads"])
def wkv7_chunk_gradients(
    dy, r, log_w, k, v, a, b, table, h, dh, T, dr, dlog_w, dk, dv, da, db, length, per_row, heads,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of one chunk's and head's inputs.

    dy: [tokens, H, V]; h, dh: [K, V] a chunk, the state at its start and the gradient of the state at its end.
    With ^ for e^m h and e^(G - m) dh:
        U = T (a~ h^ + A_ak v)                 Z = T^T (A_qb^T dy + b~ dh^)
        dv = A_qk^T dy + A_ak^T Z + k~ dh^
        dA_qk, dA_qb, dA_ak, dA_ab = dy v^T, dy U^T, Z v^T, Z U^T, masked as the A are
        dr~ = dA_qk k~ + dA_qb b~ + dy h^^T    da~ = dA_ak k~ + dA_ab b~ + Z h^^T
        dk~ = dA_qk^T r~ + dA_ak^T a~ + v dh^^T  db~ = dA_qb^T r~ + dA_ab^T a~ + U dh^^T
    A query counts with +g in its exponent, a key with -g, and where it leaves the chunk with G - g, which is summed
    over the tokens before and not as a total minus the tokens after: it would cancel where the decay is strong. The
    log decay's gradient multiplies by the operands as the dots had them, rounded, or the cancelling halves differ.
    """
    slot, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start, end = span(table, slot, length, per_row, C)
    if start < 0:
        return
    operand: tl.constexpr = h.dtype.element_ty
    rows, keys = tl.arange(0, C), tl.arange(0, K)
    inside = start + rows < end
    stride = heads * K
    token = (start * heads + head) * K
    token_v = (start * heads + head) * V
    chunk = slot.to(tl.int64) * heads + head

    w = load_tokens(log_w + token, rows, keys, stride, inside)
    g = tl.cumsum(w, 0)
    middle = tl.sum(tl.where(rows[:, None] == C // 2 - 1, g, 0.0), 0)
    total = tl.sum(tl.where(rows[:, None] == C - 1, g, 0.0), 0)
    g -= middle[None, :]
    enter, leave = tl.exp(middle), tl.exp(total - middle)
    aq = narrow(load_tokens(a + token, rows, keys, stride, inside) * tl.exp(g - w), operand)
    rq = narrow(load_tokens(r + token, rows, keys, stride, inside) * tl.exp(g), operand)
    away = tl.exp(-g)
    kk = narrow(load_tokens(k + token, rows, keys, stride, inside) * away, operand)
    bk = narrow(load_tokens(b + token, rows, keys, stride, inside) * away, operand)
    inverse = tl.load(T + chunk * C * C + rows[:, None] * C + rows[None, :])
    inclusive, exclusive = rows[:, None] >= rows[None, :], rows[:, None] > rows[None, :]
    A_qk = narrow(tl.where(inclusive, dot(rq, tl.trans(kk), PRECISION), 0.0), operand)
    A_qb = narrow(tl.where(inclusive, dot(rq, tl.trans(bk), PRECISION), 0.0), operand)
    A_ak = narrow(tl.where(exclusive, dot(aq, tl.trans(kk), PRECISION), 0.0), operand)
    inclusive_t, exclusive_t = rows[:, None] <= rows[None, :], rows[:, None] < rows[None, :]

    drq_t = tl.zeros([K, C], tl.float32)
    daq_t = tl.zeros([K, C], tl.float32)
    dkk = tl.zeros([C, K], tl.float32)
    dbk = tl.zeros([C, K], tl.float32)
    dk_leaving = tl.zeros([C, K], tl.float32)
    db_leaving = tl.zeros([C, K], tl.float32)
    through = tl.zeros([K], tl.float32)
    for first in range(0, V, BLOCK_V):
        values = first + tl.arange(0, BLOCK_V)
        square = chunk * K * V + keys[:, None] * V + values[None, :]
        v_tile = narrow(load_tokens(v + token_v, rows, values, heads * V, inside), operand)
        dy_tile = narrow(load_tokens(dy + token_v, rows, values, heads * V, inside), operand)
        h_tile = tl.load(h + square).to(tl.float32)
        dh_tile = tl.load(dh + square).to(tl.float32)
        through += tl.sum(h_tile * dh_tile, 1)
        h_tile = narrow(h_tile * enter[:, None], operand)
        dh_tile = narrow(dh_tile * leave[:, None], operand)
        reads = dot_add(aq, h_tile, dot(A_ak, v_tile, PRECISION), PRECISION)
        U = narrow(dot(inverse, narrow(reads, operand), PRECISION), operand)
        dU_t = dot_add(tl.trans(dh_tile), tl.trans(bk), dot(tl.trans(dy_tile), A_qb, PRECISION), PRECISION)
        Z_t = narrow(dot(narrow(dU_t, operand), inverse, PRECISION), operand)

        dv_t = dot_add(tl.trans(dh_tile), tl.trans(kk), dot(tl.trans(dy_tile), A_qk, PRECISION), PRECISION)
        dv_t = dot_add(Z_t, A_ak, dv_t, PRECISION)
        tl.store(
            dv + token_v + values[:, None] + rows[None, :] * (heads * V),
            narrow(dv_t, dv.dtype.element_ty),
            mask=inside[None, :],
        )
        dA_t = narrow(tl.where(inclusive_t, dot(v_tile, tl.trans(dy_tile), PRECISION), 0.0), operand)  # qk
        drq_t = dot_add(tl.trans(kk), dA_t, drq_t, PRECISION)
        dkk = dot_add(dA_t, rq, dkk, PRECISION)
        dA_t = narrow(tl.where(inclusive_t, dot(U, tl.trans(dy_tile), PRECISION), 0.0), operand)  # qb
        drq_t = dot_add(tl.trans(bk), dA_t, drq_t, PRECISION)
        dbk = dot_add(dA_t, rq, dbk, PRECISION)
        drq_t = dot_add(h_tile, tl.trans(dy_tile), drq_t, PRECISION)
        dA_t = narrow(tl.where(exclusive_t, dot(v_tile, Z_t, PRECISION), 0.0), operand)  # ak
        daq_t = dot_add(tl.trans(kk), dA_t, daq_t, PRECISION)
        dkk = dot_add(dA_t, aq, dkk, PRECISION)
        dA_t = narrow(tl.where(exclusive_t, dot(U, Z_t, PRECISION), 0.0), operand)  # ab
        daq_t = dot_add(tl.trans(bk), dA_t, daq_t, PRECISION)
        dbk = dot_add(dA_t, aq, dbk, PRECISION)
        daq_t = dot_add(h_tile, Z_t, daq_t, PRECISION)
        dk_leaving = dot_add(v_tile, tl.trans(dh_tile), dk_leaving, PRECISION)
        db_leaving = dot_add(U, tl.trans(dh_tile), db_leaving, PRECISION)

    drq, daq = tl.trans(drq_t), tl.trans(daq_t)  # to be stored: no dot follows
    store_tokens(dr + token, rows, keys, stride, inside, drq * tl.exp(g))
    store_tokens(da + token, rows, keys, stride, inside, daq * tl.exp(g - w))
    store_tokens(dk + token, rows, keys, stride, inside, (dkk + dk_leaving) * away)
    store_tokens(db + token, rows, keys, stride, inside, (dbk + db_leaving) * away)
    read_a = daq * aq.to(tl.float32)
    kk32, bk32 = kk.to(tl.float32), bk.to(tl.float32)
    later = drq * rq.to(tl.float32) + read_a - dkk * kk32 - dbk * bk32
    leaving = dk_leaving * kk32 + db_leaving * bk32
    dw = tl.cumsum(later, 0, reverse=True) - read_a  # a_t reads before w_t
    dw += tl.cumsum(leaving, 0) - leaving
    dw += (through * tl.exp(total))[None, :]
    store_tokens(dlog_w + token, rows, keys, stride, inside, dw)
