"""RWKV-7 within a chunk, in Triton, backward: gradients of a chunk's inputs from those of its outputs and states.

h, dh [K, V]: the state at the chunk's start, and the gradient of the state at its end. Other names are those of
triton_chunk.py. With h^ for e^m h and dh^ for e^(G - m) dh:
    U = T (a~ h^ + A_ak v)                           Z = T^T (A_qb^T dy + b~ dh^)
    dv = A_qk^T dy + A_ak^T Z + k~ dh^
    dA_qk, dA_qb, dA_ak, dA_ab = dy v^T, dy U^T, Z v^T, Z U^T, masked as the A are
    dr~ = dA_qk k~ + dA_qb b~ + dy h^^T              da~ = dA_ak k~ + dA_ab b~ + Z h^^T
    dk~ = dA_qk^T r~ + dA_ak^T a~ + v dh^^T          db~ = dA_qb^T r~ + dA_ab^T a~ + U dh^^T
One kernel computes U, Z and dv, whose columns are independent of each other. Another kernel computes the rest, by
columns of K and transposed ([K, C], see triton_chunk.py), so that the first operands of its products are as they were
loaded or computed.

A query has +g in the exponent of its decay, a key -g, and a key that leaves the chunk G - g. The part of the latter is
summed over the tokens before, not as a total minus the tokens after, which would cancel where the decay is strong. The
gradient of log_w uses the operands as the dots had them, rounded; otherwise the parts that cancel would differ.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from cdrmix.kernels.common.chunks import span, sums_t
from cdrmix.kernels.common.triton_helpers import dot, dot_add, narrow
from cdrmix.kernels.rwkv7.triton_chunk import decays, load_tokens, middle_sums_t, store_tokens, store_tokens_t


@triton.jit
def operand_of(x, inside, operand: tl.constexpr):
    """Loaded tokens [C, D] as operands, zero after the document's end.

    The loads are masked already. The selection is for speed: without it Triton waits for each load that goes to shared
    memory unchanged, one after the other; with it, adjacent loads are waited for together.
    """
    if operand == tl.bfloat16:
        x = tl.where(inside[:, None], x, 0.0)
    return narrow(x.to(tl.float32), operand)


@triton.jit(do_not_specialize=["length", "per_row", "heads"])
def wkv7_chunk_gradient_values(
    dy, r, log_w, k, v, a, b, table, h, dh, T, edges, U, Z, dv, length, per_row, heads,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """U, Z and dv [C, BLOCK_V] of one chunk, head and block of V."""
    block, chunk_head = tl.program_id(0) % (V // BLOCK_V), tl.program_id(0) // (V // BLOCK_V)
    slot, head = chunk_head // heads, chunk_head % heads
    start, end = span(table, slot, length, per_row, C)
    if start < 0:
        return
    operand: tl.constexpr = h.dtype.element_ty
    rows, values = tl.arange(0, C), block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = start + rows < end
    stride, stride_v = heads * K, heads * V
    token, token_v = (start * heads + head) * K, (start * heads + head) * V
    chunk = slot.to(tl.int64) * heads + head

    A_qk = tl.zeros([C, C], tl.float32)
    A_qb = tl.zeros([C, C], tl.float32)
    A_ak = tl.zeros([C, C], tl.float32)
    reads = tl.zeros([C, BLOCK_V], tl.float32)
    dU_t = tl.zeros([BLOCK_V, C], tl.float32)
    dv_t = tl.zeros([BLOCK_V, C], tl.float32)
    for first in range(0, K, BLOCK_K):
        keys = first + tl.arange(0, BLOCK_K)
        square = chunk * K * V + keys[:, None] * V + values[None, :]
        w, g = decays(log_w + token, rows, keys, stride, inside, C, operand, SUMS)
        aq = load_tokens(a + token, rows, keys, stride, inside) * tl.exp(g - w)
        entering = narrow(aq * tl.load(edges + chunk * 2 * K + keys)[None, :], operand)
        reads = dot_add(entering, tl.load(h + square), reads, PRECISION)
        aq = narrow(aq, operand)
        rq = narrow(load_tokens(r + token, rows, keys, stride, inside) * tl.exp(g), operand)
        away = tl.exp(-g)
        leave = tl.load(edges + chunk * 2 * K + K + keys)[None, :]
        dh_t = tl.trans(tl.load(dh + square))
        x = load_tokens(k + token, rows, keys, stride, inside) * away
        dv_t = dot_add(dh_t, tl.trans(narrow(x * leave, operand)), dv_t, PRECISION)
        x = tl.trans(narrow(x, operand))
        A_ak = dot_add(aq, x, A_ak, PRECISION)
        A_qk = dot_add(rq, x, A_qk, PRECISION)
        x = load_tokens(b + token, rows, keys, stride, inside) * away
        dU_t = dot_add(dh_t, tl.trans(narrow(x * leave, operand)), dU_t, PRECISION)
        A_qb = dot_add(rq, tl.trans(narrow(x, operand)), A_qb, PRECISION)

    inverse = tl.load(T + chunk * C * C + rows[:, None] * C + rows[None, :])
    v_tile = narrow(load_tokens(v + token_v, rows, values, stride_v, inside), operand)
    below = narrow(tl.where(rows[:, None] > rows[None, :], A_ak, 0.0), operand)
    reads = narrow(dot_add(below, v_tile, reads, PRECISION), operand)
    store_tokens(U + token_v, rows, values, stride_v, inside, dot(inverse, reads, PRECISION))
    dy_t = tl.trans(narrow(load_tokens(dy + token_v, rows, values, stride_v, inside), operand))
    dU_t = dot_add(dy_t, narrow(tl.where(rows[:, None] >= rows[None, :], A_qb, 0.0), operand), dU_t, PRECISION)
    Z_t = narrow(dot(narrow(dU_t, operand), inverse, PRECISION), operand)
    transposed = token_v + values[:, None] + rows[None, :] * stride_v
    tl.store(Z + transposed, Z_t, mask=inside[None, :])
    dv_t = dot_add(dy_t, narrow(tl.where(rows[:, None] >= rows[None, :], A_qk, 0.0), operand), dv_t, PRECISION)
    dv_t = dot_add(Z_t, below, dv_t, PRECISION)
    tl.store(dv + transposed, narrow(dv_t, dv.dtype.element_ty), mask=inside[None, :])


@triton.jit(do_not_specialize=["length", "per_row", "heads"])
def wkv7_chunk_gradient_keys(
    dy, r, log_w, k, v, a, b, table, h, dh, edges, U, Z, dr, dlog_w, dk, da, db, length, per_row, heads,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """dr, dlog_w, dk, da and db [C, BLOCK_K] of one chunk, head and block of K, in a loop over blocks of V."""
    block, chunk_head = tl.program_id(0) % (K // BLOCK_K), tl.program_id(0) // (K // BLOCK_K)
    slot, head = chunk_head // heads, chunk_head % heads
    start, end = span(table, slot, length, per_row, C)
    if start < 0:
        return
    operand: tl.constexpr = h.dtype.element_ty
    rows, keys = tl.arange(0, C), block * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = start + rows < end
    stride, stride_v = heads * K, heads * V
    token, token_v = (start * heads + head) * K, (start * heads + head) * V
    chunk = slot.to(tl.int64) * heads + head
    here_t, inside_t = rows[None, :] * stride + keys[:, None], inside[None, :]

    dA_qk = tl.zeros([C, C], tl.float32)
    dA_qb = tl.zeros([C, C], tl.float32)
    dA_ak = tl.zeros([C, C], tl.float32)
    dA_ab = tl.zeros([C, C], tl.float32)
    dA_qk_t = tl.zeros([C, C], tl.float32)
    dA_qb_t = tl.zeros([C, C], tl.float32)
    dA_ak_t = tl.zeros([C, C], tl.float32)
    dA_ab_t = tl.zeros([C, C], tl.float32)
    for first in range(0, V, BLOCK_V):
        values = first + tl.arange(0, BLOCK_V)
        here = rows[:, None] * stride_v + values[None, :]
        dy_tile = tl.load(dy + token_v + here, mask=inside[:, None], other=0.0)
        v_tile = tl.load(v + token_v + here, mask=inside[:, None], other=0.0)
        U_tile = tl.load(U + token_v + here, mask=inside[:, None], other=0.0)
        Z_tile = tl.load(Z + token_v + here, mask=inside[:, None], other=0.0)
        dy_tile, v_tile = operand_of(dy_tile, inside, operand), operand_of(v_tile, inside, operand)
        U_tile, Z_tile = operand_of(U_tile, inside, operand), operand_of(Z_tile, inside, operand)
        x = tl.trans(dy_tile)
        dA_qk_t = dot_add(v_tile, x, dA_qk_t, PRECISION)
        dA_qb_t = dot_add(U_tile, x, dA_qb_t, PRECISION)
        x = tl.trans(Z_tile)
        dA_ak_t = dot_add(v_tile, x, dA_ak_t, PRECISION)
        dA_ab_t = dot_add(U_tile, x, dA_ab_t, PRECISION)
        x = tl.trans(v_tile)
        dA_qk = dot_add(dy_tile, x, dA_qk, PRECISION)
        dA_ak = dot_add(Z_tile, x, dA_ak, PRECISION)
        x = tl.trans(U_tile)
        dA_qb = dot_add(dy_tile, x, dA_qb, PRECISION)
        dA_ab = dot_add(Z_tile, x, dA_ab, PRECISION)
    upper, strict = rows[:, None] <= rows[None, :], rows[:, None] < rows[None, :]
    dA_qk_t = narrow(tl.where(upper, dA_qk_t, 0.0), operand)
    dA_qb_t = narrow(tl.where(upper, dA_qb_t, 0.0), operand)
    dA_ak_t = narrow(tl.where(strict, dA_ak_t, 0.0), operand)
    dA_ab_t = narrow(tl.where(strict, dA_ab_t, 0.0), operand)
    dA_qk = narrow(tl.where(strict, 0.0, dA_qk), operand)
    dA_qb = narrow(tl.where(strict, 0.0, dA_qb), operand)
    dA_ak = narrow(tl.where(upper, 0.0, dA_ak), operand)
    dA_ab = narrow(tl.where(upper, 0.0, dA_ab), operand)

    if operand == tl.bfloat16:  # loaded together, before they are needed; float32 would not fit the registers
        w_raw = tl.load(log_w + token + here_t, mask=inside_t, other=0.0)
        k_raw = tl.load(k + token + here_t, mask=inside_t, other=0.0)
        b_raw = tl.load(b + token + here_t, mask=inside_t, other=0.0)
        a_raw = tl.load(a + token + here_t, mask=inside_t, other=0.0)
        r_raw = tl.load(r + token + here_t, mask=inside_t, other=0.0)

    # The second loop over V: if it is a single block, the compiler reads it only once.
    dr_t = tl.zeros([BLOCK_K, C], tl.float32)
    da_t = tl.zeros([BLOCK_K, C], tl.float32)
    dk_leaving = tl.zeros([BLOCK_K, C], tl.float32)
    db_leaving = tl.zeros([BLOCK_K, C], tl.float32)
    through = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, V, BLOCK_V):
        values = first + tl.arange(0, BLOCK_V)
        here = rows[:, None] * stride_v + values[None, :]
        square = chunk * K * V + keys[:, None] * V + values[None, :]
        h_tile, dh_tile = tl.load(h + square), tl.load(dh + square)
        through += tl.sum(h_tile.to(tl.float32) * dh_tile.to(tl.float32), 1)
        x = tl.load(dy + token_v + here, mask=inside[:, None], other=0.0)
        x = tl.trans(operand_of(x, inside, operand))
        dr_t = dot_add(h_tile, x, dr_t, PRECISION)
        x = tl.load(Z + token_v + here, mask=inside[:, None], other=0.0)
        x = tl.trans(operand_of(x, inside, operand))
        da_t = dot_add(h_tile, x, da_t, PRECISION)
        x = tl.load(v + token_v + here, mask=inside[:, None], other=0.0)
        x = tl.trans(operand_of(x, inside, operand))
        dk_leaving = dot_add(dh_tile, x, dk_leaving, PRECISION)
        x = tl.load(U + token_v + here, mask=inside[:, None], other=0.0)
        x = tl.trans(operand_of(x, inside, operand))
        db_leaving = dot_add(dh_tile, x, db_leaving, PRECISION)

    enter = tl.load(edges + chunk * 2 * K + keys)[:, None]
    leave = tl.load(edges + chunk * 2 * K + K + keys)[:, None]
    if operand == tl.bfloat16:
        w_raw = tl.where(inside_t, w_raw, 0.0)  # see operand_of
    else:
        w_raw = tl.load(log_w + token + here_t, mask=inside_t, other=0.0)
    w = w_raw.to(tl.float32)
    g = middle_sums_t(w_raw, rows, C, operand, SUMS)
    away = tl.exp(-g)
    if operand != tl.bfloat16:
        k_raw = tl.load(k + token + here_t, mask=inside_t, other=0.0)
    kk = narrow(k_raw.to(tl.float32) * away, operand)
    if operand != tl.bfloat16:
        b_raw = tl.load(b + token + here_t, mask=inside_t, other=0.0)
    bk = narrow(b_raw.to(tl.float32) * away, operand)
    dr_t = dot_add(kk, dA_qk_t, dr_t * enter, PRECISION)
    dr_t = dot_add(bk, dA_qb_t, dr_t, PRECISION)
    da_t = dot_add(kk, dA_ak_t, da_t * enter, PRECISION)
    da_t = dot_add(bk, dA_ab_t, da_t, PRECISION)
    decay = tl.exp(g - w)
    if operand != tl.bfloat16:
        a_raw = tl.load(a + token + here_t, mask=inside_t, other=0.0)
    aq = narrow(a_raw.to(tl.float32) * decay, operand)
    store_tokens_t(da + token, rows, keys, stride, inside, da_t * decay)
    later = da_t * aq.to(tl.float32)
    dw = through[:, None] * enter * leave - later  # a_t reads the state before w_t is applied
    decay = tl.exp(g)
    if operand != tl.bfloat16:
        r_raw = tl.load(r + token + here_t, mask=inside_t, other=0.0)
    rq = narrow(r_raw.to(tl.float32) * decay, operand)
    store_tokens_t(dr + token, rows, keys, stride, inside, dr_t * decay)
    later += dr_t * rq.to(tl.float32)

    x = dot_add(aq, dA_ak, dot(rq, dA_qk, PRECISION), PRECISION)
    dk_leaving *= leave
    store_tokens_t(dk + token, rows, keys, stride, inside, (x + dk_leaving) * away)
    later -= x * kk.to(tl.float32)
    before = dk_leaving * kk.to(tl.float32)
    x = dot_add(aq, dA_ab, dot(rq, dA_qb, PRECISION), PRECISION)
    db_leaving *= leave
    store_tokens_t(db + token, rows, keys, stride, inside, (x + db_leaving) * away)
    later -= x * bk.to(tl.float32)
    before += db_leaving * bk.to(tl.float32)
    dw += sums_t(later, tl.where(rows[:, None] >= rows[None, :], 1.0, 0.0), operand, SUMS)
    dw += sums_t(before, tl.where(rows[:, None] < rows[None, :], 1.0, 0.0), operand, SUMS)
    store_tokens_t(dlog_w + token, rows, keys, stride, inside, dw)
