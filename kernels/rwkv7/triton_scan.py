"""RWKV-7 over the chunks of a document, in Triton: the states forward, their gradients in reverse, and one token.

The scan is h' = e^G h + R h + Q and y = P h + Y, with the maps of triton_chunk.py: one dependent product a chunk. A
program handles one document, one head and BLOCK_V columns of the state, which are independent of each other. In a long
document it handles one group of chunks, from the state that triton_groups.py computed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from cdrmix.kernels.common.chunks import document_span
from cdrmix.kernels.common.triton_helpers import dot, dot_add, narrow


@triton.jit
def load_state(state, corner, keys, values, wanted, K: tl.constexpr):
    """A [K, BLOCK_V] tile of a [V, K] state; zeros unless wanted."""
    return tl.load(state + corner + values[None, :] * K + keys[:, None], mask=(keys[:, None] >= 0) & wanted, other=0.0)


@triton.jit
def store_state(state, corner, keys, values, wanted, x, K: tl.constexpr):
    tl.store(state + corner + values[None, :] * K + keys[:, None], x, mask=(keys[:, None] >= 0) & wanted)


@triton.jit
def load_decay(edges, chunk, keys, K: tl.constexpr):
    """e^G [K, 1]."""
    keys += chunk * 2 * K
    return (tl.load(edges + keys) * tl.load(edges + keys + K))[:, None]


@triton.jit
def scan_part(cu_seqlens, members, item, length, per_row, group, limit, C: tl.constexpr):
    """The document; first token, document's end, first chunk's slot; chunks before, and chunks; whether in groups.

    These describe what a program scans. group: 0, then items are documents; else chunks of a group, then items are
    slots of groups, numbered as the slots of chunks are (`chunk_table`), and `members` has the document of each where
    packed. Documents of more than `limit` chunks are in groups. The first slot of another document has all its chunks.
    With -1 chunks there is nothing to do.
    """
    per = tl.maximum(group, 1)
    if per_row == 0:
        document = tl.load(members + item, mask=group > 0, other=item.to(tl.int64))
        start, end, slot = document_span(cu_seqlens, document, length, C, per_row)
        first_item = start // (per * C) + document
    else:
        slots = tl.where(group > 0, (per_row + per - 1) // per, 1)
        document = (item // slots).to(tl.int64)
        start, end, slot = document_span(cu_seqlens, document, length, C, per_row)
        first_item = document * slots
    chunks = ((end - start + C - 1) // C).to(tl.int32)
    before = ((item - first_item) * group).to(tl.int32)
    grouped = (group > 0) & (chunks > limit)
    some = tl.where(before < chunks, tl.minimum(chunks - before, group), -1)
    count = tl.where(grouped, some, tl.where(before == 0, chunks, -1))
    return document, start + before.to(tl.int64) * C, end, slot + before, before, count, grouped


@triton.jit
def first_state(
    state, carried, document, item, heads, head, keys, values, wanted, grouped, K: tl.constexpr, V: tl.constexpr
):
    """The [K, BLOCK_V] tile that a scan starts from: the document's, or the group's in `carried` [slots, H, V, K]."""
    own = load_state(state, (document * heads + head) * V * K, keys, values, wanted & (grouped == 0), K)
    inner = load_state(carried, (item.to(tl.int64) * heads + head) * V * K, keys, values, grouped, K)
    return tl.where(grouped, inner, own)


@triton.jit(do_not_specialize=["length", "per_row", "heads", "group", "limit", "has_state", "save_h", "want_last"])
def wkv7_state_forward(
    R, Q, P, Y, edges, state, cu_seqlens, h, y, last, members, carried, length, per_row, heads, group, limit,
    has_state, save_h, want_last,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y [tokens, H, V], the states h [K, V] at the chunks' starts, and the last state [H, V, K].

    BLOCK_K is K, or K / 2: then the state is in two tiles, whose products fit the registers.
    Y and y may be the same memory: a program reads its own columns before it writes them.
    """
    block, pair = tl.program_id(0) % (V // BLOCK_V), tl.program_id(0) // (V // BLOCK_V)
    head, item = pair % heads, pair // heads
    document, start, end, slot, _, count, grouped = scan_part(
        cu_seqlens, members, item, length, per_row, group, limit, C
    )
    if count < 0:
        return
    operand: tl.constexpr = R.dtype.element_ty
    rows, keys, values = tl.arange(0, C), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    wanted = has_state != 0
    upper = first_state(state, carried, document, item, heads, head, keys, values, wanted, grouped, K, V)
    if BLOCK_K != K:
        keys_low = keys + BLOCK_K
        lower = first_state(state, carried, document, item, heads, head, keys_low, values, wanted, grouped, K, V)
    chunk = slot * heads + head
    square, across = keys[:, None] * V + values[None, :], rows[:, None] * K + keys[None, :]
    for i in range(count):
        inside = (start + i * C + rows < end)[:, None]
        here = ((start + i * C) * heads + head) * V + rows[:, None] * (heads * V) + values[None, :]
        maps = R + chunk * K * K + keys[:, None] * K + keys[None, :]
        state_at, map_at = chunk * K * V + square, chunk * C * K + across
        if BLOCK_K == K:
            Q_tile = tl.load(Q + state_at).to(tl.float32)
            y_tile = tl.load(Y + here, mask=inside, other=0.0).to(tl.float32)
            decay = load_decay(edges, chunk, keys, K)
            R_tile = tl.load(maps)
            P_tile = tl.load(P + map_at)
            h_tile = narrow(upper, operand)
            if save_h != 0:
                tl.store(h + state_at, h_tile)
            y_tile = dot_add(P_tile, h_tile, y_tile, PRECISION)
            upper = upper * decay + dot_add(R_tile, h_tile, Q_tile, PRECISION)
        else:
            h_tile, low_tile = narrow(upper, operand), narrow(lower, operand)
            if save_h != 0:
                tl.store(h + state_at, h_tile)
                tl.store(h + BLOCK_K * V + state_at, low_tile)
            y_tile = tl.load(Y + here, mask=inside, other=0.0).to(tl.float32)
            y_tile = dot_add(tl.load(P + map_at), h_tile, y_tile, PRECISION)
            y_tile = dot_add(tl.load(P + BLOCK_K + map_at), low_tile, y_tile, PRECISION)
            upper = upper * load_decay(edges, chunk, keys, K) + tl.load(Q + state_at).to(tl.float32)
            upper = dot_add(tl.load(maps), h_tile, upper, PRECISION)
            upper = dot_add(tl.load(maps + BLOCK_K), low_tile, upper, PRECISION)
            lower = lower * load_decay(edges, chunk, keys + BLOCK_K, K)
            lower += tl.load(Q + BLOCK_K * V + state_at).to(tl.float32)
            lower = dot_add(tl.load(maps + BLOCK_K * K), h_tile, lower, PRECISION)
            lower = dot_add(tl.load(maps + BLOCK_K * K + BLOCK_K), low_tile, lower, PRECISION)
        tl.store(y + here, narrow(y_tile, y.dtype.element_ty), mask=inside)
        chunk += heads
    corner, wanted = (document * heads + head) * V * K, (want_last != 0) & (start + count * C >= end)
    store_state(last, corner, keys, values, wanted, upper, K)
    if BLOCK_K != K:
        store_state(last, corner, keys + BLOCK_K, values, wanted, lower, K)


@triton.jit(do_not_specialize=["length", "per_row", "heads", "group", "limit", "has_dlast", "has_state"])
def wkv7_state_backward(
    R, P, edges, dy, dlast, cu_seqlens, dh, dstate, members, carried, length, per_row, heads, group, limit,
    has_dlast, has_state,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dh [K, V]: the gradient of the state at each chunk's end; dstate [H, V, K]: that of the document's first state.

    dh of the chunk before is e^G dh + R^T dh + P^T dy. BLOCK_K as in the forward pass.
    """
    block, pair = tl.program_id(0) % (V // BLOCK_V), tl.program_id(0) // (V // BLOCK_V)
    head, item = pair % heads, pair // heads
    document, start, end, slot, before, count, grouped = scan_part(
        cu_seqlens, members, item, length, per_row, group, limit, C
    )
    if count < 0:
        return
    operand: tl.constexpr = R.dtype.element_ty
    rows, keys, values = tl.arange(0, C), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    wanted = has_dlast != 0
    upper = first_state(dlast, carried, document, item, heads, head, keys, values, wanted, grouped, K, V)
    if BLOCK_K != K:
        keys_low = keys + BLOCK_K
        lower = first_state(dlast, carried, document, item, heads, head, keys_low, values, wanted, grouped, K, V)
    chunk = (slot + count - 1) * heads + head
    square, across = keys[:, None] * V + values[None, :], keys[:, None] + rows[None, :] * K
    for i in range(count):
        first = start + (count - 1 - i) * C
        here = (first * heads + head) * V + rows[:, None] * (heads * V) + values[None, :]
        maps = R + chunk * K * K + keys[:, None] + keys[None, :] * K
        dy_tile = tl.load(dy + here, mask=(first + rows < end)[:, None], other=0.0)
        dy_tile = narrow(dy_tile.to(tl.float32), operand)
        decay = load_decay(edges, chunk, keys, K)
        R_t = tl.load(maps)
        P_t = tl.load(P + chunk * C * K + across)
        dh_tile = narrow(upper, operand)
        tl.store(dh + chunk * K * V + square, dh_tile)
        upper = dot_add(R_t, dh_tile, dot(P_t, dy_tile, PRECISION), PRECISION) + upper * decay
        if BLOCK_K != K:
            low_tile = narrow(lower, operand)
            tl.store(dh + chunk * K * V + BLOCK_K * V + square, low_tile)
            upper = dot_add(tl.load(maps + BLOCK_K * K), low_tile, upper, PRECISION)
            lower = lower * load_decay(edges, chunk, keys + BLOCK_K, K)
            lower = dot_add(tl.load(P + chunk * C * K + BLOCK_K + across), dy_tile, lower, PRECISION)
            lower = dot_add(tl.load(maps + BLOCK_K), dh_tile, lower, PRECISION)
            lower = dot_add(tl.load(maps + BLOCK_K * K + BLOCK_K), low_tile, lower, PRECISION)
        chunk -= heads
    corner, wanted = (document * heads + head) * V * K, (has_state != 0) & (before == 0)
    store_state(dstate, corner, keys, values, wanted, upper, K)
    if BLOCK_K != K:
        store_state(dstate, corner, keys + BLOCK_K, values, wanted, lower, K)


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
