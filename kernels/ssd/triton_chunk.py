"""The SSD scan in Triton: the states from chunk to chunk, forward and in reverse, and the outputs of each chunk.

C tokens a chunk, G groups, H heads, K key width, V value width, h = S^T [K, V] the state at a chunk's start. With l the
log decays, r_i is their sum from the chunk's start to the read of token i (with its own, or without if exclusive), w_j
their sum to the write of token j (with its own), and G their sum over the chunk:
    E_ij = e^(r_i - w_j) for j <= i (j < i if exclusive), else 0;   A = q k^T * E
    y = e^r q h + A v                    h' = e^G h + k^T (e^(G - w) v)
and backward, with dh the gradient of the state at the chunk's end:
    dv = A^T dy + e^(G - w) k dh         dh of the chunk before = e^G dh + q^T (e^r dy)
    dq = P k + (e^r dy) h^T              dk = P^T q + (e^(G - w) v) dh^T            P = dy v^T * E, summed over heads
    dl_t = sum of (dy v^T * A)_ij over i >= t > j (i > t > j if exclusive) + sum over its i of dy_i . e^r_i (q h)_i
           + sum over j < t of v_j . e^(G - w_j) (k dh)_j + e^G <h, dh>
No term of dl is the difference of two sums, which would cancel where the decay is strong.

Widths are processed by blocks, the last one masked. No dot takes the transpose of a dot's result (see
kernels/rwkv7/triton_chunk.py): A^T and P^T are computed as the next products take them. dq is computed, and stored, as
its transpose.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from cdrmix.kernels.common.chunks import document_span, span, sums
from cdrmix.kernels.common.triton_helpers import dot_add, narrow

LOWEST = tl.constexpr(-104.0)  # least log decay: its exponential is 0 in float32, and a sum of 64 stays below 2^13
FAR = tl.constexpr(-1e4)  # its exponential is 0
STEP = tl.constexpr(2.0**-10)


@triton.jit
def load_tile(tensor, rows, columns, stride, inside, WIDTH: tl.constexpr):
    """A [C, D] tile of a [tokens, heads, WIDTH] tensor in float32; zero after the document's end and the width."""
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    return tl.load(tensor + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_transposed(tensor, rows, columns, stride, inside, WIDTH: tl.constexpr):
    """The transpose [D, C] of the tile of load_tile."""
    mask = (columns < WIDTH)[:, None] & inside[None, :]
    return tl.load(tensor + columns[:, None] + rows[None, :] * stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_decays(log_decay, rows, stride, inside, EXCLUSIVE: tl.constexpr):
    """Sums r and w [C] of a chunk's log decays, and G [1], each in two parts: multiples of 2^-10, and the rest.

    The sums of the first part, below 2^13, are exact, and so are their differences. So exponents have errors of 2^-24
    however strong the decays before them are. A single sum of 64 log decays of -1.6 would have errors of 4e-6.
    """
    x = tl.load(log_decay + rows * stride, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(x < LOWEST, LOWEST, x)  # NaN stays NaN
    coarse = tl.floor(x / STEP + 0.5) * STEP
    fine = x - coarse
    w_coarse, w_fine = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    r_coarse, r_fine = w_coarse, w_fine
    if EXCLUSIVE:
        r_coarse, r_fine = w_coarse - coarse, w_fine - fine
    return r_coarse, r_fine, w_coarse, w_fine, tl.sum(coarse, 0), tl.sum(fine, 0)


@triton.jit
def weights_transposed(r_coarse, r_fine, w_coarse, w_fine, C: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """E^T [C of j, C of i]."""
    j, i = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    exponent = (r_coarse[None, :] - w_coarse[:, None]) + (r_fine[None, :] - w_fine[:, None])
    reads = (j < i) if EXCLUSIVE else (j <= i)
    return tl.exp(tl.where(reads, exponent, FAR))


@triton.jit
def load_state(state, corner, keys, values, wanted, K: tl.constexpr, V: tl.constexpr):
    """A [BLOCK_K, BLOCK_V] tile of a [V, K] state; zeros unless wanted."""
    mask = (keys < K)[:, None] & (values < V)[None, :] & wanted
    return tl.load(state + corner + values[None, :] * K + keys[:, None], mask=mask, other=0.0)


@triton.jit
def store_state(state, corner, keys, values, wanted, x, K: tl.constexpr, V: tl.constexpr):
    mask = (keys < K)[:, None] & (values < V)[None, :] & wanted
    tl.store(state + corner + values[None, :] * K + keys[:, None], x, mask=mask)


@triton.jit(do_not_specialize=["length", "per_row", "heads", "groups", "has_state", "want_last"])
def ssd_scan_states(
    k, v, log_decay, state, cu_seqlens, h, last, length, per_row, heads, groups, has_state, want_last,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """h [slots, H, K, V], the states at the chunks' starts, and the last states [N, H, V, K].

    A program handles one document and head, and a tile of the state; tiles are independent of each other.
    """
    blocks: tl.constexpr = tl.cdiv(V, BLOCK_V) * tl.cdiv(K, BLOCK_K)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, document = pair % heads, pair // heads
    start, end, slot = document_span(cu_seqlens, document, length, C, per_row)
    operand: tl.constexpr = h.dtype.element_ty
    rows = tl.arange(0, C)
    keys = block // tl.cdiv(V, BLOCK_V) * BLOCK_K + tl.arange(0, BLOCK_K)
    values = block % tl.cdiv(V, BLOCK_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    group = head // (heads // groups)
    corner = pair.to(tl.int64) * V * K
    S = load_state(state, corner, keys, values, has_state != 0, K, V)
    whole = (keys < K)[:, None] & (values < V)[None, :]
    square = keys[:, None] * V + values[None, :]
    count = ((end - start + C - 1) // C).to(tl.int32)
    chunk = slot * heads + head
    for i in range(count):
        first = start + i * C
        inside = first + rows < end
        tl.store(h + chunk * K * V + square, narrow(S, operand), mask=whole)
        _, _, w_coarse, w_fine, coarse, fine = load_decays(log_decay + first * heads + head, rows, heads, inside, False)
        leaving = tl.exp((coarse - w_coarse) + (fine - w_fine))
        k_t = narrow(load_transposed(k + (first * groups + group) * K, rows, keys, groups * K, inside, K), operand)
        v_tile = load_tile(v + (first * heads + head) * V, rows, values, heads * V, inside, V)
        S = dot_add(k_t, narrow(v_tile * leaving[:, None], operand), S * tl.exp(coarse + fine), PRECISION)
        chunk += heads
    store_state(last, corner, keys, values, want_last != 0, S, K, V)


@triton.jit(do_not_specialize=["length", "per_row", "heads", "groups"])
def ssd_scan_read(
    q, k, v, log_decay, table, h, y, length, per_row, heads, groups,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    EXCLUSIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y [C, BLOCK_V] of one chunk, head and block of V."""
    blocks: tl.constexpr = tl.cdiv(V, BLOCK_V)
    block, chunk_head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    slot, head = chunk_head // heads, chunk_head % heads
    start, end = span(table, slot, length, per_row, C)
    if start < 0:
        return
    operand: tl.constexpr = h.dtype.element_ty
    rows, values = tl.arange(0, C), block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = start + rows < end
    token, token_v = (start * groups + head // (heads // groups)) * K, (start * heads + head) * V
    chunk = slot.to(tl.int64) * heads + head

    A = tl.zeros([C, C], tl.float32)
    y_tile = tl.zeros([C, BLOCK_V], tl.float32)
    for first in range(0, K, BLOCK_K):
        keys = first + tl.arange(0, BLOCK_K)
        q_tile = narrow(load_tile(q + token, rows, keys, groups * K, inside, K), operand)
        k_t = narrow(load_transposed(k + token, rows, keys, groups * K, inside, K), operand)
        A = dot_add(q_tile, k_t, A, PRECISION)
        mask = (keys < K)[:, None] & (values < V)[None, :]
        h_tile = tl.load(h + chunk * K * V + keys[:, None] * V + values[None, :], mask=mask, other=0.0)
        y_tile = dot_add(q_tile, h_tile, y_tile, PRECISION)
    r_coarse, r_fine, w_coarse, w_fine, _, _ = load_decays(
        log_decay + start * heads + head, rows, heads, inside, EXCLUSIVE
    )
    i, j = rows[:, None], rows[None, :]
    exponent = (r_coarse[:, None] - w_coarse[None, :]) + (r_fine[:, None] - w_fine[None, :])
    A *= tl.exp(tl.where((j < i) if EXCLUSIVE else (j <= i), exponent, FAR))
    v_tile = narrow(load_tile(v + token_v, rows, values, heads * V, inside, V), operand)
    y_tile = dot_add(narrow(A, operand), v_tile, y_tile * tl.exp(r_coarse + r_fine)[:, None], PRECISION)
    mask = inside[:, None] & (values < V)[None, :]
    tl.store(y + token_v + i * heads * V + values[None, :], narrow(y_tile, y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["length", "per_row", "heads", "groups", "has_dlast", "has_state"])
def ssd_scan_states_back(
    q, dy, log_decay, dlast, cu_seqlens, dh, dstate, length, per_row, heads, groups, has_dlast, has_state,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    EXCLUSIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dh [slots, H, K, V], the gradients of the states at the chunks' ends, and dstate [N, H, V, K]."""
    blocks: tl.constexpr = tl.cdiv(V, BLOCK_V) * tl.cdiv(K, BLOCK_K)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, document = pair % heads, pair // heads
    start, end, slot = document_span(cu_seqlens, document, length, C, per_row)
    operand: tl.constexpr = dh.dtype.element_ty
    rows = tl.arange(0, C)
    keys = block // tl.cdiv(V, BLOCK_V) * BLOCK_K + tl.arange(0, BLOCK_K)
    values = block % tl.cdiv(V, BLOCK_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    group = head // (heads // groups)
    corner = pair.to(tl.int64) * V * K
    D = load_state(dlast, corner, keys, values, has_dlast != 0, K, V)
    whole = (keys < K)[:, None] & (values < V)[None, :]
    square = keys[:, None] * V + values[None, :]
    count = ((end - start + C - 1) // C).to(tl.int32)
    chunk = (slot + count - 1) * heads + head
    for i in range(count):
        first = start + (count - 1 - i) * C
        inside = first + rows < end
        tl.store(dh + chunk * K * V + square, narrow(D, operand), mask=whole)
        r_coarse, r_fine, _, _, coarse, fine = load_decays(
            log_decay + first * heads + head, rows, heads, inside, EXCLUSIVE
        )
        q_t = narrow(load_transposed(q + (first * groups + group) * K, rows, keys, groups * K, inside, K), operand)
        dy_tile = load_tile(dy + (first * heads + head) * V, rows, values, heads * V, inside, V)
        dy_tile = narrow(dy_tile * tl.exp(r_coarse + r_fine)[:, None], operand)
        D = dot_add(q_t, dy_tile, D * tl.exp(coarse + fine), PRECISION)
        chunk -= heads
    store_state(dstate, corner, keys, values, has_state != 0, D, K, V)


@triton.jit(do_not_specialize=["length", "per_row", "heads", "groups"])
def ssd_scan_gradient_values(
    dy, q, k, v, log_decay, table, h, dh, dv, dlog_decay, length, per_row, heads, groups,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    EXCLUSIVE: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """dv [C, V] and dlog_decay [C] of one chunk and head, in loops over blocks of K and V."""
    slot, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start, end = span(table, slot, length, per_row, C)
    if start < 0:
        return
    operand: tl.constexpr = h.dtype.element_ty
    rows = tl.arange(0, C)
    inside = start + rows < end
    token, token_v = (start * groups + head // (heads // groups)) * K, (start * heads + head) * V
    chunk = slot.to(tl.int64) * heads + head

    A_t = tl.zeros([C, C], tl.float32)
    for first in range(0, K, BLOCK_K):
        keys = first + tl.arange(0, BLOCK_K)
        k_tile = narrow(load_tile(k + token, rows, keys, groups * K, inside, K), operand)
        q_t = narrow(load_transposed(q + token, rows, keys, groups * K, inside, K), operand)
        A_t = dot_add(k_tile, q_t, A_t, PRECISION)
    r_coarse, r_fine, w_coarse, w_fine, coarse, fine = load_decays(
        log_decay + start * heads + head, rows, heads, inside, EXCLUSIVE
    )
    A_t = narrow(A_t * weights_transposed(r_coarse, r_fine, w_coarse, w_fine, C, EXCLUSIVE), operand)
    entering, leaving = tl.exp(r_coarse + r_fine), tl.exp((coarse - w_coarse) + (fine - w_fine))

    dA_t = tl.zeros([C, C], tl.float32)
    read = tl.zeros([C], tl.float32)
    written = tl.zeros([C], tl.float32)
    through = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, V, BLOCK_V):
        values = first + tl.arange(0, BLOCK_V)
        dv_tile = tl.zeros([C, BLOCK_V], tl.float32)
        y_tile = tl.zeros([C, BLOCK_V], tl.float32)
        for second in range(0, K, BLOCK_K):
            keys = second + tl.arange(0, BLOCK_K)
            square = chunk * K * V + keys[:, None] * V + values[None, :]
            mask = (keys < K)[:, None] & (values < V)[None, :]
            h_tile = tl.load(h + square, mask=mask, other=0.0)
            dh_tile = tl.load(dh + square, mask=mask, other=0.0)
            through += tl.sum(h_tile.to(tl.float32) * dh_tile.to(tl.float32), 0)
            k_tile = narrow(load_tile(k + token, rows, keys, groups * K, inside, K), operand)
            dv_tile = dot_add(k_tile, dh_tile, dv_tile, PRECISION)
            q_tile = narrow(load_tile(q + token, rows, keys, groups * K, inside, K), operand)
            y_tile = dot_add(q_tile, h_tile, y_tile, PRECISION)
        v_tile = narrow(load_tile(v + token_v, rows, values, heads * V, inside, V), operand)
        dv_tile *= leaving[:, None]
        written += tl.sum(dv_tile * v_tile.to(tl.float32), 1)
        dy_tile = narrow(load_tile(dy + token_v, rows, values, heads * V, inside, V), operand)
        read += tl.sum(y_tile * dy_tile.to(tl.float32), 1)
        dv_tile = dot_add(A_t, dy_tile, dv_tile, PRECISION)
        mask = inside[:, None] & (values < V)[None, :]
        tl.store(
            dv + token_v + rows[:, None] * heads * V + values[None, :],
            narrow(dv_tile, dv.dtype.element_ty),
            mask=mask,
        )
        dy_t = narrow(load_transposed(dy + token_v, rows, values, heads * V, inside, V), operand)
        dA_t = dot_add(v_tile, dy_t, dA_t, PRECISION)

    # The gradient of the exponents is dA * A.
    t, other = rows[:, None], rows[None, :]
    # The sum over j < t, [C of t, C of i].
    pairs = sums(tl.where(other < t, 1.0, 0.0), dA_t * A_t.to(tl.float32), operand, SUMS)
    pairs += (read * entering)[None, :]
    total = tl.sum(tl.where(other > t, pairs, 0.0) if EXCLUSIVE else tl.where(other >= t, pairs, 0.0), 1)
    total += tl.sum(tl.where(other < t, written[None, :], 0.0), 1) + tl.sum(through, 0) * tl.exp(coarse + fine)
    tl.store(dlog_decay + (start + rows) * heads + head, narrow(total, dlog_decay.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "per_row", "heads", "groups"])
def ssd_scan_gradient_keys(
    dy, q, k, v, log_decay, table, h, dh, dq, dk, length, per_row, heads, groups,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    EXCLUSIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk [C, BLOCK_K] of one chunk, group and block of K, in a loop over the group's heads."""
    blocks: tl.constexpr = tl.cdiv(K, BLOCK_K)
    block, chunk_group = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    slot, group = chunk_group // groups, chunk_group % groups
    start, end = span(table, slot, length, per_row, C)
    if start < 0:
        return
    operand: tl.constexpr = h.dtype.element_ty
    rows, keys = tl.arange(0, C), block * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = start + rows < end
    token, per_group = (start * groups + group) * K, heads // groups

    P_t = tl.zeros([C, C], tl.float32)
    dq_t = tl.zeros([BLOCK_K, C], tl.float32)
    dk_tile = tl.zeros([C, BLOCK_K], tl.float32)
    for member in range(per_group):
        head = group * per_group + member
        token_v = (start * heads + head) * V
        chunk = slot.to(tl.int64) * heads + head
        r_coarse, r_fine, w_coarse, w_fine, coarse, fine = load_decays(
            log_decay + start * heads + head, rows, heads, inside, EXCLUSIVE
        )
        entering, leaving = tl.exp(r_coarse + r_fine), tl.exp((coarse - w_coarse) + (fine - w_fine))
        of_head = tl.zeros([C, C], tl.float32)
        for first in range(0, V, BLOCK_V):
            values = first + tl.arange(0, BLOCK_V)
            v_tile = load_tile(v + token_v, rows, values, heads * V, inside, V)
            dy_t = load_transposed(dy + token_v, rows, values, heads * V, inside, V)
            of_head = dot_add(narrow(v_tile, operand), narrow(dy_t, operand), of_head, PRECISION)
            square = chunk * K * V + keys[:, None] * V + values[None, :]
            mask = (keys < K)[:, None] & (values < V)[None, :]
            h_tile = tl.load(h + square, mask=mask, other=0.0)
            dq_t = dot_add(h_tile, narrow(dy_t * entering[None, :], operand), dq_t, PRECISION)
            turned = chunk * K * V + keys[None, :] * V + values[:, None]
            mask = (keys < K)[None, :] & (values < V)[:, None]
            dh_t = tl.load(dh + turned, mask=mask, other=0.0)
            dk_tile = dot_add(narrow(v_tile * leaving[:, None], operand), dh_t, dk_tile, PRECISION)
        P_t += of_head * weights_transposed(r_coarse, r_fine, w_coarse, w_fine, C, EXCLUSIVE)
    P_op = narrow(P_t, operand)
    k_t = narrow(load_transposed(k + token, rows, keys, groups * K, inside, K), operand)
    dq_t = dot_add(k_t, P_op, dq_t, PRECISION)
    mask = (keys < K)[:, None] & inside[None, :]
    here = token + keys[:, None] + rows[None, :] * groups * K
    tl.store(dq + here, narrow(dq_t, dq.dtype.element_ty), mask=mask)
    q_tile = narrow(load_tile(q + token, rows, keys, groups * K, inside, K), operand)
    dk_tile = dot_add(P_op, q_tile, dk_tile, PRECISION)
    mask = inside[:, None] & (keys < K)[None, :]
    tl.store(dk + token + rows[:, None] * groups * K + keys[None, :], narrow(dk_tile, dk.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["heads", "groups"])
def ssd_scan_token(
    q, k, v, log_decay, state, y, new, heads, groups,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EXCLUSIVE: tl.constexpr,
):  # fmt: skip
    """One token of one row, head and block of values: state [V, K] -> y [V], new [V, K]. BLOCK_K covers K."""
    blocks: tl.constexpr = tl.cdiv(V, BLOCK_V)
    block, pair = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    keys, values = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key, has_value = keys < K, values < V
    token = (pair // heads * groups + pair % heads // (heads // groups)) * K + keys
    corner = pair * V * K + values[:, None] * K + keys[None, :]
    whole = has_value[:, None] & has_key[None, :]
    S = tl.load(state + corner, mask=whole, other=0.0)
    read = tl.load(q + token, mask=has_key, other=0.0).to(tl.float32)
    key = tl.load(k + token, mask=has_key, other=0.0).to(tl.float32)
    value = tl.load(v + pair * V + values, mask=has_value, other=0.0).to(tl.float32)
    after = S * tl.exp(tl.load(log_decay + pair).to(tl.float32)) + value[:, None] * key[None, :]
    out = tl.sum((S if EXCLUSIVE else after) * read[None, :], 1)
    tl.store(new + corner, after, mask=whole)
    tl.store(y + pair * V + values, narrow(out, y.dtype.element_ty), mask=has_value)
