"""RWKV-7 over the chunks of a document, in Triton: the states forward, their gradients in reverse, and one token.

The scan has h' = e^G h + R h + Q and y = P h + Y, with the maps of wkv7_chunk.py: one dependent product a chunk.
A program has one document, one head and BLOCK_V columns of the state, which do not depend on each other.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from cdrmix.kernels._common import dot, dot_add, narrow


@triton.jit
def document_span(cu_seqlens, document, length, C: tl.constexpr, per_row):
    """A document's first token, end, and first chunk slot; see `wkv7.chunk_table`."""
    if per_row == 0:
        start = tl.load(cu_seqlens + document).to(tl.int64)
        end = tl.load(cu_seqlens + document + 1).to(tl.int64)
        slot = start // C + document
    else:
        start = document.to(tl.int64) * length
        end = start + length
        slot = document.to(tl.int64) * per_row
    return start, end, slot


@triton.jit(do_not_specialize=["length", "per_row", "heads", "has_state", "save_h", "want_last"])
def wkv7_state_forward(
    R, Q, P, Y, edges, state, cu_seqlens, h, y, last, length, per_row, heads, has_state, save_h, want_last,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y [tokens, H, V], the states h [K, V] at the chunks' starts, and the last state [H, V, K].

    Y and y may be the same memory: a program reads its own columns before it writes them.
    """
    block = tl.program_id(0) % (V // BLOCK_V)
    head = tl.program_id(0) // (V // BLOCK_V) % heads
    document = tl.program_id(0) // (V // BLOCK_V) // heads
    start, end, slot = document_span(cu_seqlens, document, length, C, per_row)
    operand: tl.constexpr = R.dtype.element_ty
    rows, keys, values = tl.arange(0, C), tl.arange(0, K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    corner = (document.to(tl.int64) * heads + head) * V * K + values[None, :] * K + keys[:, None]
    state_tile = tl.load(state + corner, mask=(has_state != 0) & (values[None, :] < V), other=0.0)
    count = ((end - start + C - 1) // C).to(tl.int32)
    chunk = slot * heads + head
    square = keys[:, None] * V + values[None, :]
    for i in range(count):
        inside = (start + i * C + rows < end)[:, None]
        here = ((start + i * C) * heads + head) * V + rows[:, None] * (heads * V) + values[None, :]
        Q_tile = tl.load(Q + chunk * K * V + square).to(tl.float32)
        Y_tile = tl.load(Y + here, mask=inside, other=0.0).to(tl.float32)
        decay = tl.load(edges + chunk * 2 * K + keys) * tl.load(edges + chunk * 2 * K + K + keys)
        R_tile = tl.load(R + chunk * K * K + keys[:, None] * K + keys[None, :])
        P_tile = tl.load(P + chunk * C * K + rows[:, None] * K + keys[None, :])
        h_tile = narrow(state_tile, operand)
        if save_h != 0:
            tl.store(h + chunk * K * V + square, h_tile)
        y_tile = dot_add(P_tile, h_tile, Y_tile, PRECISION)
        tl.store(y + here, narrow(y_tile, y.dtype.element_ty), mask=inside)
        state_tile = state_tile * decay[:, None] + dot_add(R_tile, h_tile, Q_tile, PRECISION)
        chunk += heads
    tl.store(last + corner, state_tile, mask=(want_last != 0) & (values[None, :] < V))


@triton.jit(do_not_specialize=["length", "per_row", "heads", "has_dlast", "has_state"])
def wkv7_state_backward(
    R, P, edges, dy, dlast, cu_seqlens, dh, dstate, length, per_row, heads, has_dlast, has_state,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dh [K, V]: the gradient of the state at each chunk's end, and dstate [H, V, K], of the document's first."""
    block = tl.program_id(0) % (V // BLOCK_V)
    head = tl.program_id(0) // (V // BLOCK_V) % heads
    document = tl.program_id(0) // (V // BLOCK_V) // heads
    start, end, slot = document_span(cu_seqlens, document, length, C, per_row)
    operand: tl.constexpr = R.dtype.element_ty
    rows, keys, values = tl.arange(0, C), tl.arange(0, K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    corner = (document.to(tl.int64) * heads + head) * V * K + values[None, :] * K + keys[:, None]
    grad = tl.load(dlast + corner, mask=(has_dlast != 0) & (values[None, :] < V), other=0.0)
    count = ((end - start + C - 1) // C).to(tl.int32)
    chunk = (slot + count - 1) * heads + head
    square = keys[:, None] * V + values[None, :]
    for i in range(count):
        first = start + (count - 1 - i) * C
        here = (first * heads + head) * V + rows[:, None] * (heads * V) + values[None, :]
        dy_tile = narrow(tl.load(dy + here, mask=(first + rows < end)[:, None], other=0.0).to(tl.float32), operand)
        decay = tl.load(edges + chunk * 2 * K + keys) * tl.load(edges + chunk * 2 * K + K + keys)
        R_t = tl.load(R + chunk * K * K + keys[:, None] + keys[None, :] * K)
        P_t = tl.load(P + chunk * C * K + keys[:, None] + rows[None, :] * K)
        dh_tile = narrow(grad, operand)
        tl.store(dh + chunk * K * V + square, dh_tile)
        grad = dot_add(R_t, dh_tile, dot(P_t, dy_tile, PRECISION), PRECISION) + grad * decay[:, None]
        chunk -= heads
    tl.store(dstate + corner, grad, mask=(has_state != 0) & (values[None, :] < V))


@triton.jit
def wkv7_token(
    r, log_w, k, v, a, b, state, y, new, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One token of one row, head and block of values: state [V, K] -> y [V], new [V, K]."""
    block, head = tl.program_id(0) % (V // BLOCK_V), (tl.program_id(0) // (V // BLOCK_V)).to(tl.int64)
    keys, values = tl.arange(0, K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    corner = head * V * K + values[:, None] * K + keys[None, :]
    S = tl.load(state + corner)
    decay = tl.exp(tl.load(log_w + head * K + keys).to(tl.float32))
    removed = tl.sum(S * tl.load(a + head * K + keys).to(tl.float32)[None, :], 1)
    S = S * decay[None, :] + removed[:, None] * tl.load(b + head * K + keys).to(tl.float32)[None, :]
    S += tl.load(v + head * V + values).to(tl.float32)[:, None] * tl.load(k + head * K + keys).to(tl.float32)[None, :]
    out = tl.sum(S * tl.load(r + head * K + keys).to(tl.float32)[None, :], 1)
    tl.store(new + corner, S)
    tl.store(y + head * V + values, narrow(out, y.dtype.element_ty))
