"""RWKV-7 within a chunk, in Triton: the chunk's affine map of the state, and the gradients of its inputs.

C tokens a chunk, K key width, V value width. With g the inclusive cumulative log decay, m its middle, G its total:
    r~ = r e^(g - m), a~ = a e^(g - log_w - m), k~ = k e^(m - g), b~ = b e^(m - g)           [C, K], operands
    A_qk, A_qb = tril(r~ k~^T), tril(r~ b~^T);  A_ak, A_ab = the same of a~, below the diagonal  [C, C]
    T = (I - A_ab)^-1
and with h = S^T [K, V] the state at the chunk's start
    h' = e^G h + R h + Q,  R = e^(G - m) b~^T T a~ e^m,  Q = e^(G - m) (k~^T v + b~^T T A_ak v)
    y = P h + Y,           P = (r~ + A_qb T a~) e^m,     Y = A_qk v + A_qb T A_ak v
So only h' = e^G h + R h + Q is sequential (triton_scan.py). e^G is not part of R but float32, because it is the large
part of the map.

Operands are bfloat16 or float32 (the dtype of the stored maps). Exponents cover half a chunk from the middle. Both
dtypes hold |log_w| C / 2 < 80, which leaves a factor e^8 for the values. RWKV-7 has |log_w| < 0.6066: 20 at C = 64.

No dot takes the transpose of a dot's result. No wgmma of Hopper takes the transpose of a value computed in registers,
because Triton 3.4 to 3.7.0 miscompiled that (flash-linear-attention, issue 640; benchmarks/aot_ir.py finds such
products). To avoid it, the map has two warps, which do not use wgmma, or tiles of fewer than 64 rows, and the gradients
of keys are computed as transposes, from tiles that are loaded as transposes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from cdrmix.kernels.common.chunks import span, sums, sums_t
from cdrmix.kernels.common.triton_helpers import dot, dot_add, narrow


@triton.jit
def load_tokens(tensor, rows, columns, stride, inside):
    """A [C, D] tile of a [tokens, H, D] tensor in float32; zero after the document's end."""
    return tl.load(tensor + rows[:, None] * stride + columns[None, :], mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_tokens(tensor, rows, columns, stride, inside, x):
    """Stores what load_tokens loads, in the tensor's dtype."""
    x = narrow(x, tensor.dtype.element_ty)
    tl.store(tensor + rows[:, None] * stride + columns[None, :], x, mask=inside[:, None])


@triton.jit
def store_tokens_t(tensor, rows, columns, stride, inside, x):
    """Stores the transpose of x [D, C] as store_tokens does."""
    x = narrow(x, tensor.dtype.element_ty)
    tl.store(tensor + columns[:, None] + rows[None, :] * stride, x, mask=inside[None, :])


@triton.jit
def decays(log_w, rows, keys, stride, inside, C: tl.constexpr, operand: tl.constexpr, SUMS: tl.constexpr):
    """log_w [C, K] of the chunk in float32, and its inclusive sums from the middle, g - m.

    Sums over tokens are products with a matrix of 0, 1 and -1; a scan over rows takes 5 times the instructions.
    """
    w = load_tokens(log_w, rows, keys, stride, inside)
    before, middle = rows[None, :] <= rows[:, None], rows[None, :] < C // 2
    return w, sums(tl.where(before & ~middle, 1.0, tl.where(~before & middle, -1.0, 0.0)), w, operand, SUMS)


@triton.jit
def middle_sums_t(w, rows, C: tl.constexpr, operand: tl.constexpr, SUMS: tl.constexpr):
    """The transposes [K, C] of the results of `decays`."""
    before, middle = rows[:, None] <= rows[None, :], rows[:, None] < C // 2
    return sums_t(w, tl.where(before & ~middle, 1.0, tl.where(~before & middle, -1.0, 0.0)), operand, SUMS)


@triton.jit
def unit_lower_inverse(A, C: tl.constexpr, operand: tl.constexpr, PRECISION: tl.constexpr):
    """(I - A)^-1 of strictly lower triangular A [C, C], float32, by doubling the size of inverted diagonal blocks.

    With inverted blocks X and Y, and A_yx below and left of them, the next inverse is [[X, 0], [Y A_yx X, Y]]. For all
    blocks of a size at once it is T + T L T, with L the blocks A_yx: 2 (log2 C - 1) products. Neumann series of blocks
    of 16 would take as many, with terms that cancel up to a factor binomial(15, 7) = 6435.
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
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The maps of one chunk and head: R [K, K], Q [K, V], P [C, K], Y [C, V], T [C, C]; edges [2, K] = e^m, e^(G - m).

    KEYS: computes T, edges, R and P. VALUES: computes Q and Y; without KEYS it reads T.
    """
    slot, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start, end = span(table, slot, length, per_row, C)
    if start < 0:
        return
    operand: tl.constexpr = R.dtype.element_ty
    rows = tl.arange(0, C)
    inside = start + rows < end
    stride, stride_v = heads * K, heads * V
    token, token_v = (start * heads + head) * K, (start * heads + head) * V
    chunk = slot.to(tl.int64) * heads + head

    A_ab = tl.zeros([C, C], tl.float32)
    A_qb = tl.zeros([C, C], tl.float32)
    A_ak = tl.zeros([C, C], tl.float32)
    A_qk = tl.zeros([C, C], tl.float32)
    for first in tl.static_range(0, K, BLOCK_K):
        keys = first + tl.arange(0, BLOCK_K)
        w, g = decays(log_w + token, rows, keys, stride, inside, C, operand, SUMS)
        aq = narrow(load_tokens(a + token, rows, keys, stride, inside) * tl.exp(g - w), operand)
        rq = narrow(load_tokens(r + token, rows, keys, stride, inside) * tl.exp(g), operand)
        enter = tl.exp(tl.sum(tl.where(rows[:, None] < C // 2, w, 0.0), 0))
        leave = tl.exp(tl.sum(tl.where(rows[:, None] < C // 2, 0.0, w), 0))
        away = tl.exp(-g)
        bk_t = tl.trans(narrow(load_tokens(b + token, rows, keys, stride, inside) * away, operand))
        A_qb = dot_add(rq, bk_t, A_qb, PRECISION)
        if KEYS:
            tl.store(edges + chunk * 2 * K + keys, enter)
            tl.store(edges + chunk * 2 * K + K + keys, leave)
            A_ab = dot_add(aq, bk_t, A_ab, PRECISION)
        if VALUES:
            kk_t = tl.trans(narrow(load_tokens(k + token, rows, keys, stride, inside) * away, operand))
            A_ak = dot_add(aq, kk_t, A_ak, PRECISION)
            A_qk = dot_add(rq, kk_t, A_qk, PRECISION)
    A_qb = narrow(tl.where(rows[:, None] >= rows[None, :], A_qb, 0.0), operand)
    if VALUES:
        A_ak = narrow(tl.where(rows[:, None] > rows[None, :], A_ak, 0.0), operand)
        A_qk = narrow(tl.where(rows[:, None] >= rows[None, :], A_qk, 0.0), operand)
    squares = chunk * C * C + rows[:, None] * C + rows[None, :]

    # From here on inputs are read again if a block does not hold all of K.
    if KEYS:
        A_ab = tl.where(rows[:, None] > rows[None, :], A_ab, 0.0)
        inverse = narrow(unit_lower_inverse(A_ab, C, operand, PRECISION), operand)
        if save_T != 0:
            tl.store(T + squares, inverse)
        for first in range(0, K, BLOCK_K):
            keys = first + tl.arange(0, BLOCK_K)
            if BLOCK_K != K:
                w, g = decays(log_w + token, rows, keys, stride, inside, C, operand, SUMS)
                enter = tl.exp(tl.sum(tl.where(rows[:, None] < C // 2, w, 0.0), 0))
                aq = narrow(load_tokens(a + token, rows, keys, stride, inside) * tl.exp(g - w), operand)
                rq = narrow(load_tokens(r + token, rows, keys, stride, inside) * tl.exp(g), operand)
            W = narrow(dot(inverse, aq, PRECISION), operand)
            P_tile = dot_add(A_qb, W, rq.to(tl.float32), PRECISION) * enter[None, :]
            tl.store(P + chunk * C * K + rows[:, None] * K + keys[None, :], narrow(P_tile, operand))
            for second in range(0, K, BLOCK_K):
                others = second + tl.arange(0, BLOCK_K)
                if BLOCK_K != K:
                    w, g = decays(log_w + token, rows, others, stride, inside, C, operand, SUMS)
                    leave = tl.exp(tl.sum(tl.where(rows[:, None] < C // 2, 0.0, w), 0))
                    bk_t = load_tokens(b + token, rows, others, stride, inside) * tl.exp(-g)
                    bk_t = tl.trans(narrow(bk_t, operand))
                R_tile = dot(bk_t, W, PRECISION) * leave[:, None] * enter[None, :]
                tl.store(R + chunk * K * K + others[:, None] * K + keys[None, :], narrow(R_tile, operand))
    else:
        inverse = tl.load(T + squares)
    if VALUES:
        for first in range(0, V, BLOCK_V):
            values = first + tl.arange(0, BLOCK_V)
            v_tile = narrow(load_tokens(v + token_v, rows, values, stride_v, inside), operand)
            U = narrow(dot(inverse, narrow(dot(A_ak, v_tile, PRECISION), operand), PRECISION), operand)
            Y_tile = dot_add(A_qb, U, dot(A_qk, v_tile, PRECISION), PRECISION)
            store_tokens(Y + token_v, rows, values, stride_v, inside, Y_tile)
            for second in range(0, K, BLOCK_K):
                keys = second + tl.arange(0, BLOCK_K)
                if BLOCK_K != K:
                    w, g = decays(log_w + token, rows, keys, stride, inside, C, operand, SUMS)
                    leave = tl.exp(tl.sum(tl.where(rows[:, None] < C // 2, 0.0, w), 0))
                    away = tl.exp(-g)
                    bk_t = tl.trans(narrow(load_tokens(b + token, rows, keys, stride, inside) * away, operand))
                    kk_t = tl.trans(narrow(load_tokens(k + token, rows, keys, stride, inside) * away, operand))
                Q_tile = dot_add(bk_t, U, dot(kk_t, v_tile, PRECISION), PRECISION) * leave[:, None]
                tl.store(Q + chunk * K * V + keys[:, None] * V + values[None, :], narrow(Q_tile, operand))
