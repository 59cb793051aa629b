"""RWKV-7 over the groups of a long document's chunks, in Triton: a scan whose steps are groups instead of chunks.

A chunk's map h' = (e^G + R) h + Q is affine, and so is the map of a group's chunks, h' = A h + B. The scan over the
group's chunks gives A from the unit matrix and B from zero. One program a group computes them, all groups in parallel.
Then one program a document steps from group to group and stores the state before each group. From these states the
programs of triton_scan.py go through the chunks of all groups in parallel. For n chunks in groups of g that is
g + n / g + g dependent products instead of n, for (K + V) / V times the products and a second read of R and Q.

The scan of the gradients, dh' = (e^G + R^T) dh + P^T dy, does the same from the last group to the first. A and B are
float32, and products over groups are float32 products, or three of TF32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from cdrmix.kernels.common.chunks import document_span
from cdrmix.kernels.common.triton_helpers import dot, dot_add, narrow
from cdrmix.kernels.rwkv7.triton_scan import load_decay, load_state, scan_part, store_state


@triton.jit(do_not_specialize=["length", "per_row", "heads", "group", "limit"])
def wkv7_group_forward(
    R, Q, edges, cu_seqlens, members, maps, length, per_row, heads, group, limit,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of a group's map [K, K + V], A then B; nothing for a document's last group."""
    blocks: tl.constexpr = (K + V) // BLOCK_V
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, item = pair % heads, pair // heads
    _, start, end, slot, _, count, grouped = scan_part(cu_seqlens, members, item, length, per_row, group, limit, C)
    if (count < 0) | (grouped == 0) | (start + count * C >= end):
        return
    operand: tl.constexpr = R.dtype.element_ty
    keys, columns = tl.arange(0, K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    of_B = block >= K // BLOCK_V
    state = tl.where(keys[:, None] == columns[None, :], 1.0, 0.0)
    chunk = slot * heads + head
    for _i in range(count):
        offset = keys[:, None] * V + (columns - K)[None, :]
        Q_tile = tl.load(Q + chunk * K * V + offset, mask=(keys[:, None] >= 0) & of_B, other=0.0).to(tl.float32)
        decay = load_decay(edges, chunk, keys, K)
        R_tile = tl.load(R + chunk * K * K + keys[:, None] * K + keys[None, :])
        state = state * decay + dot_add(R_tile, narrow(state, operand), Q_tile, PRECISION)
        chunk += heads
    tl.store(maps + pair.to(tl.int64) * K * (K + V) + keys[:, None] * (K + V) + columns[None, :], state)


@triton.jit(do_not_specialize=["length", "per_row", "heads", "group", "limit"])
def wkv7_group_backward(
    R, P, edges, dy, cu_seqlens, members, maps, length, per_row, heads, group, limit,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for the gradients: dh before a group from dh after it; nothing for a document's first group."""
    blocks: tl.constexpr = (K + V) // BLOCK_V
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, item = pair % heads, pair // heads
    _, start, end, slot, before, count, grouped = scan_part(cu_seqlens, members, item, length, per_row, group, limit, C)
    if (count < 0) | (grouped == 0) | (before == 0):
        return
    operand: tl.constexpr = R.dtype.element_ty
    rows, keys, columns = tl.arange(0, C), tl.arange(0, K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    of_B = block >= K // BLOCK_V
    state = tl.where(keys[:, None] == columns[None, :], 1.0, 0.0)
    chunk = (slot + count - 1) * heads + head
    for i in range(count):
        first = start + (count - 1 - i) * C
        here = (first * heads + head) * V + rows[:, None] * (heads * V) + (columns - K)[None, :]
        dy_tile = tl.load(dy + here, mask=(first + rows < end)[:, None] & of_B, other=0.0)
        dy_tile = narrow(dy_tile.to(tl.float32), operand)
        decay = load_decay(edges, chunk, keys, K)
        R_t = tl.load(R + chunk * K * K + keys[:, None] + keys[None, :] * K)
        P_t = tl.load(P + chunk * C * K + keys[:, None] + rows[None, :] * K)
        state = dot_add(R_t, narrow(state, operand), dot(P_t, dy_tile, PRECISION), PRECISION) + state * decay
        chunk -= heads
    tl.store(maps + pair.to(tl.int64) * K * (K + V) + keys[:, None] * (K + V) + columns[None, :], state)


@triton.jit(do_not_specialize=["length", "per_row", "heads", "group", "limit", "has_state", "reverse"])
def wkv7_group_scan(
    maps, state, cu_seqlens, carried, length, per_row, heads, group, limit, has_state, reverse,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before each group of a document, [slots, H, V, K]; reverse: from the last group to the first."""
    block, pair = tl.program_id(0) % (V // BLOCK_V), tl.program_id(0) // (V // BLOCK_V)
    head, document = pair % heads, pair // heads
    start, end, _ = document_span(cu_seqlens, document, length, C, per_row)
    chunks = ((end - start + C - 1) // C).to(tl.int32)
    if chunks <= limit:
        return
    item = start // (group * C) + document
    if per_row != 0:
        item = document.to(tl.int64) * ((per_row + group - 1) // group)
    groups = (chunks + group - 1) // group
    keys, values = tl.arange(0, K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = load_state(state, pair.to(tl.int64) * V * K, keys, values, has_state != 0, K)
    for i in range(groups - 1):
        slot = (item + tl.where(reverse != 0, groups - 1 - i, i)) * heads + head
        store_state(carried, slot * V * K, keys, values, True, tile, K)
        corner = maps + slot * K * (K + V) + keys[:, None] * (K + V)
        tile = dot_add(tl.load(corner + keys[None, :]), tile, tl.load(corner + K + values[None, :]), PRECISION)
    slot = (item + tl.where(reverse != 0, 0, groups - 1)) * heads + head
    store_state(carried, slot * V * K, keys, values, True, tile, K)
