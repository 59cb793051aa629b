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
def sums(signs, x, operand: tl.constexpr, SUMS: tl.constexpr):
    """signs @ x for signs of 0, 1 and -1, to 16 bits beside bfloat16 operands (two products), else to 22 or more."""
    if operand == tl.bfloat16:
        high = narrow(x, operand)
        low = narrow(x - high.to(tl.float32), operand)
        signs = signs.to(operand)
        total = dot_add(signs, high, dot(signs, low, SUMS), SUMS)
    else:
        total = dot(signs, x, SUMS)
    return total


@triton.jit
def decays(log_w, rows, keys, stride, inside, C: tl.constexpr, operand: tl.constexpr, SUMS: tl.constexpr):
    """log_w [C, K] in float32 of the chunk that log_w points to, and its inclusive sums g - m from the middle.

    Sums over tokens are products with a matrix of 0, 1 and -1: a scan over rows costs 5 times the instructions.
    """
    w = load_tokens(log_w, rows, keys, stride, inside)
    before, middle = rows[None, :] <= rows[:, None], rows[None, :] < C // 2
    return w, sums(tl.where(before & ~middle, 1.0, tl.where(~before & middle, -1.0, 0.0)), w, operand, SUMS)


@triton.jit
def unit_lower_inverse(A, C: tl.constexpr, operand: tl.constexpr, PRECISION: tl.constexpr):
    """(I - A)^-1 of strictly lower triangular A [C, C], float32, by doubling the size of inverted diagonal blocks.

    With X and Y inverted and A_yx below and left of them, [[X, 0], [Y A_yx X, Y]] is the next inverse, which for all
    blocks of a size at once is T + T L T with L the A_yx alone: 2 (log2 C - 1) products. Neumann series of 16-blocks
    would take as many, with powers that cancel up to binomial(15, 7) = 6435 times.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    T = tl.where(i // 2 == j // 2, A, 0.0) + tl.where(i == j, 1.0, 0.0)
    for level in tl.static_range(1, 6):
        if (2 << level) <= C:
            L = tl.where(((i >> level) != (j >> level)) & ((i >> (level + 1)) == (j >> (level + 1))), A, 0.0)
            T_operand = narrow(T, operand)
            right = narrow(dot(narrow(L, operand), T_operand, PRECISION), operand)
            T = dot_add(T_operand, right, T, PRECISION)
    return T


@triton.jit(do_not_specialize=["length", "per_row", "heads", "save_T"])
def wkv7_chunk_map(
    r, log_w, k, v, a, b, table, R, Q, P, Y, T, edges, length, per_row, heads, save_T,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, VALUES: tl.constexpr,
    PRECISION: tl.constexpr, SUMS: tl.constexpr,
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

    w, g = decays(log_w + token, rows, keys, stride, inside, C, operand, SUMS)
    enter = tl.exp(tl.sum(tl.where(rows[:, None] < C // 2, w, 0.0), 0))
    leave = tl.exp(tl.sum(tl.where(rows[:, None] < C // 2, 0.0, w), 0))
    tl.store(edges + chunk * 2 * K + keys, enter)
    tl.store(edges + chunk * 2 * K + K + keys, leave)
    aq = narrow(load_tokens(a + token, rows, keys, stride, inside) * tl.exp(g - w), operand)
    rq = narrow(load_tokens(r + token, rows, keys, stride, inside) * tl.exp(g), operand)
    away = tl.exp(-g)
    bk = narrow(load_tokens(b + token, rows, keys, stride, inside) * away, operand)
    if VALUES:
        kk = narrow(load_tokens(k + token, rows, keys, stride, inside) * away, operand)
    inclusive, exclusive = rows[:, None] >= rows[None, :], rows[:, None] > rows[None, :]

    A_ab = tl.where(exclusive, dot(aq, tl.trans(bk), PRECISION), 0.0)
    inverse = narrow(unit_lower_inverse(A_ab, C, operand, PRECISION), operand)
    squares = rows[:, None] * C + rows[None, :]
    if save_T != 0:
        tl.store(T + chunk * C * C + squares, inverse)
    A_qb = narrow(tl.where(inclusive, dot(rq, tl.trans(bk), PRECISION), 0.0), operand)
    W = narrow(dot(inverse, aq, PRECISION), operand)
    P_tile = dot_add(A_qb, W, rq.to(tl.float32), PRECISION) * enter[None, :]
    tl.store(P + chunk * C * K + rows[:, None] * K + keys[None, :], narrow(P_tile, operand))
    R_tile = dot(tl.trans(bk), W, PRECISION) * leave[:, None] * enter[None, :]
    tl.store(R + chunk * K * K + keys[:, None] * K + keys[None, :], narrow(R_tile, operand))

    if VALUES:
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
    dy, r, log_w, k, v, a, b, table, h, dh, T, edges, U, Z, dr, dlog_w, dk, dv, da, db, length, per_row, heads,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_READ: tl.constexpr, BLOCK_WRITE: tl.constexpr,
    VALUES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
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
    blocks: tl.constexpr = 1 if VALUES else K // BLOCK_WRITE
    slot, head = tl.program_id(0) // blocks // heads, tl.program_id(0) // blocks % heads
    start, end = span(table, slot, length, per_row, C)
    if start < 0:
        return
    operand: tl.constexpr = h.dtype.element_ty
    rows, values = tl.arange(0, C), tl.arange(0, V)
    inside = start + rows < end
    stride, stride_v = heads * K, heads * V
    token, token_v = (start * heads + head) * K, (start * heads + head) * V
    chunk = slot.to(tl.int64) * heads + head
    transposed = values[:, None] + rows[None, :] * stride_v

    if VALUES:
        A_qk = tl.zeros([C, C], tl.float32)
        A_qb = tl.zeros([C, C], tl.float32)
        A_ak = tl.zeros([C, C], tl.float32)
        U_tile = tl.zeros([C, V], tl.float32)
        Z_t = tl.zeros([V, C], tl.float32)
        dv_t = tl.zeros([V, C], tl.float32)
        for first in range(0, K, BLOCK_READ):
            keys = first + tl.arange(0, BLOCK_READ)
            square = chunk * K * V + keys[:, None] * V + values[None, :]
            enter, leave = tl.load(edges + chunk * 2 * K + keys), tl.load(edges + chunk * 2 * K + K + keys)
            w, g = decays(log_w + token, rows, keys, stride, inside, C, operand, SUMS)
            aq = load_tokens(a + token, rows, keys, stride, inside) * tl.exp(g - w)
            U_tile = dot_add(narrow(aq * enter[None, :], operand), tl.load(h + square), U_tile, PRECISION)
            aq = narrow(aq, operand)
            rq = narrow(load_tokens(r + token, rows, keys, stride, inside) * tl.exp(g), operand)
            dh_t = tl.trans(tl.load(dh + square))
            away = tl.exp(-g)
            x = load_tokens(k + token, rows, keys, stride, inside) * away
            dv_t = dot_add(dh_t, tl.trans(narrow(x * leave[None, :], operand)), dv_t, PRECISION)
            x = narrow(x, operand)
            A_ak = dot_add(aq, tl.trans(x), A_ak, PRECISION)
            A_qk = dot_add(rq, tl.trans(x), A_qk, PRECISION)
            x = load_tokens(b + token, rows, keys, stride, inside) * away
            Z_t = dot_add(dh_t, tl.trans(narrow(x * leave[None, :], operand)), Z_t, PRECISION)
            A_qb = dot_add(rq, tl.trans(narrow(x, operand)), A_qb, PRECISION)

        inverse = tl.load(T + chunk * C * C + rows[:, None] * C + rows[None, :])
        v_tile = narrow(load_tokens(v + token_v, rows, values, stride_v, inside), operand)
        dy_t = tl.trans(narrow(load_tokens(dy + token_v, rows, values, stride_v, inside), operand))
        below = narrow(tl.where(rows[:, None] > rows[None, :], A_ak, 0.0), operand)
        U_tile = narrow(dot_add(below, v_tile, U_tile, PRECISION), operand)
        U_tile = narrow(dot(inverse, U_tile, PRECISION), operand)
        Z_t = dot_add(dy_t, narrow(tl.where(rows[:, None] >= rows[None, :], A_qb, 0.0), operand), Z_t, PRECISION)
        Z_t = narrow(dot(narrow(Z_t, operand), inverse, PRECISION), operand)
        dv_t = dot_add(dy_t, narrow(tl.where(rows[:, None] >= rows[None, :], A_qk, 0.0), operand), dv_t, PRECISION)
        dv_t = dot_add(Z_t, below, dv_t, PRECISION)
        tl.store(dv + token_v + transposed, narrow(dv_t, dv.dtype.element_ty), mask=inside[None, :])
        if not KEYS:
            store_tokens(U + token_v, rows, values, stride_v, inside, U_tile.to(tl.float32))
            tl.store(Z + token_v + transposed, Z_t, mask=inside[None, :])
    else:
        v_tile = narrow(load_tokens(v + token_v, rows, values, stride_v, inside), operand)
        dy_t = tl.trans(narrow(load_tokens(dy + token_v, rows, values, stride_v, inside), operand))
        U_tile = tl.load(U + token_v + rows[:, None] * stride_v + values[None, :], mask=inside[:, None], other=0.0)
        Z_t = tl.load(Z + token_v + transposed, mask=inside[None, :], other=0.0)

    if KEYS:
        inclusive_t, exclusive_t = rows[:, None] <= rows[None, :], rows[:, None] < rows[None, :]
        dA_qk = narrow(tl.where(inclusive_t, dot(v_tile, dy_t, PRECISION), 0.0), operand)
        dA_qb = narrow(tl.where(inclusive_t, dot(U_tile, dy_t, PRECISION), 0.0), operand)
        dA_ak = narrow(tl.where(exclusive_t, dot(v_tile, Z_t, PRECISION), 0.0), operand)
        dA_ab = narrow(tl.where(exclusive_t, dot(U_tile, Z_t, PRECISION), 0.0), operand)
        # The inputs are read again, at places that the compiler cannot know to be the same: else it keeps addresses,
        # decays and constant matrices in registers from one use to the next.
        zero = (heads < 0).to(tl.int32)
        for block in tl.static_range(0, K if VALUES else BLOCK_WRITE, BLOCK_WRITE):
            rows, start, chunk = rows + zero, start + zero, chunk + zero
            token, inside = (start * heads + head) * K, start + rows < end
            first = block if VALUES else tl.program_id(0) % blocks * BLOCK_WRITE
            keys = first + tl.arange(0, BLOCK_WRITE)
            square = chunk * K * V + keys[:, None] * V + values[None, :]
            enter, leave = tl.load(edges + chunk * 2 * K + keys), tl.load(edges + chunk * 2 * K + K + keys)
            w, g = decays(log_w + token, rows, keys, stride, inside, C, operand, SUMS)
            away = tl.exp(-g)
            kk = narrow(load_tokens(k + token, rows, keys, stride, inside) * away, operand)
            bk = narrow(load_tokens(b + token, rows, keys, stride, inside) * away, operand)
            h_tile = tl.load(h + square)
            dh_tile = tl.load(dh + square)
            dw = (tl.sum(h_tile.to(tl.float32) * dh_tile.to(tl.float32), 1) * enter * leave)[None, :]

            dx_t = dot(h_tile, Z_t, PRECISION) * enter[:, None]
            dx_t = dot_add(tl.trans(bk), dA_ab, dot_add(tl.trans(kk), dA_ak, dx_t, PRECISION), PRECISION)
            decay = tl.exp(g - w)
            aq = narrow(load_tokens(a + token, rows, keys, stride, inside) * decay, operand)
            dx = tl.trans(dx_t)  # to be stored: no dot follows
            store_tokens(da + token, rows, keys, stride, inside, dx * decay)
            later = dx * aq.to(tl.float32)
            dw = dw - later  # a_t reads before w_t

            dx_t = dot(h_tile, dy_t, PRECISION) * enter[:, None]
            dx_t = dot_add(tl.trans(bk), dA_qb, dot_add(tl.trans(kk), dA_qk, dx_t, PRECISION), PRECISION)
            decay = tl.exp(g)
            rq = narrow(load_tokens(r + token, rows, keys, stride, inside) * decay, operand)
            dx = tl.trans(dx_t)
            store_tokens(dr + token, rows, keys, stride, inside, dx * decay)
            later += dx * rq.to(tl.float32)

            dx = dot_add(dA_ak, aq, dot(dA_qk, rq, PRECISION), PRECISION)
            leaving = dot(v_tile, tl.trans(dh_tile), PRECISION) * leave[None, :]
            store_tokens(dk + token, rows, keys, stride, inside, (dx + leaving) * away)
            later -= dx * kk.to(tl.float32)
            before = leaving * kk.to(tl.float32)

            dx = dot_add(dA_ab, aq, dot(dA_qb, rq, PRECISION), PRECISION)
            leaving = dot(U_tile, tl.trans(dh_tile), PRECISION) * leave[None, :]
            store_tokens(db + token, rows, keys, stride, inside, (dx + leaving) * away)
            later -= dx * bk.to(tl.float32)
            before += leaving * bk.to(tl.float32)

            dw += sums(tl.where(rows[:, None] <= rows[None, :], 1.0, 0.0), later, operand, SUMS)
            dw += sums(tl.where(rows[:, None] > rows[None, :], 1.0, 0.0), before, operand, SUMS)
            store_tokens(dlog_w + token, rows, keys, stride, inside, dw)
