"""Chunks of documents for Triton kernels: the table of chunks, and what kernels read from it.

A document is a row, or a span of the B * T tokens that cu_seqlens [N + 1] gives. A new chunk starts at each document,
so a document has the same bits packed or alone. Chunks are numbered by slots. The number of slots follows from shapes
alone, so some slots may hold no chunk.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdrmix.kernels.common.triton_helpers import dot, dot_add, narrow

_KEPT = "_cdrmix_chunk_tables"  # attribute of a cu_seqlens tensor that holds its tables


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the products' operands: bfloat16 for bfloat16, else float32."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def slot_count(B: int, T: int, N: int, C: int, *, packed: bool) -> int:
    """The largest possible number of chunks, from shapes alone."""
    return B * T // C + N if packed else B * -(-T // C)


def chunk_table(cu_seqlens: Tensor, slots: int, C: int) -> Tensor:
    """The first token and the document's end of every slot: int64 [slots, 2]; an unused slot has -1 first.

    cu_seqlens: the tensor that the operator was given. The table is stored on it, so the layers of a batch share it.
    """
    return _kept(cu_seqlens, ("table", slots, C), lambda: _make_table(cu_seqlens.long(), slots, C))


def long_starts(cu_seqlens: Tensor) -> Tensor:
    """The document starts as int64, the dtype that kernels read."""
    if cu_seqlens.dtype == torch.int64:
        return cu_seqlens
    return _kept(cu_seqlens, ("long",), cu_seqlens.long)


def slot_documents(cu_seqlens: Tensor, slots: int, C: int) -> Tensor:
    """The document of every slot, used or not: int64 [slots]. An empty document has a slot too."""

    return _kept(cu_seqlens, ("documents", slots, C), lambda: _members(cu_seqlens.long(), slots, C)[1])


def _kept(cu_seqlens: Tensor, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
    """The result of `make`, stored on the tensor of document starts until the tensor is changed or freed."""
    if cu_seqlens.is_inference():  # inference tensors have no version that would show a change
        return make()
    kept: dict[tuple[object, ...], Tensor]
    version, kept = getattr(cu_seqlens, _KEPT, (-1, {}))
    if version != cu_seqlens._version:
        kept = {}
        setattr(cu_seqlens, _KEPT, (cu_seqlens._version, kept))
    if key not in kept:
        kept[key] = make()
    return kept[key]


def _make_table(cu_seqlens: Tensor, slots: int, C: int) -> Tensor:
    """The table of `chunk_table`, computed on the device. The slots of document n begin at cu_seqlens[n] // C + n.

    Each document has enough slots, because floor(x + y) - floor(x) + 1 >= ceil(y). The first slots increase with n, and
    need no sum over the documents before.
    """
    first, document = _members(cu_seqlens, slots, C)
    slot = torch.arange(slots, device=cu_seqlens.device)
    start = cu_seqlens[document] + (slot - first[document]) * C
    end = cu_seqlens[1:][document]
    return torch.stack([torch.where(start < end, start, -1), end], 1)


def _members(cu_seqlens: Tensor, slots: int, C: int) -> tuple[Tensor, Tensor]:
    """The first slot of every document, and the document of every slot."""
    starts = cu_seqlens[:-1]
    first = starts // C + torch.arange(len(starts), device=cu_seqlens.device)
    slot = torch.arange(slots, device=cu_seqlens.device)
    return first, torch.searchsorted(first, slot, right=True) - 1


@triton.jit
def span(table, slot, length, per_row, C: tl.constexpr):
    """The first token of a slot's chunk and the end of its document; the first token is negative in an unused slot.

    per_row: chunks a row, where every row is one document of `length` tokens; 0 where `table` [slots, 2] is read.
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
def document_span(cu_seqlens, document, length, C: tl.constexpr, per_row):
    """The first token, the end and the first slot of a document; see `_make_table`."""
    if per_row == 0:
        start = tl.load(cu_seqlens + document).to(tl.int64)
        end = tl.load(cu_seqlens + document + 1).to(tl.int64)
        slot = start // C + document
    else:
        start = document.to(tl.int64) * length
        end = start + length
        slot = document.to(tl.int64) * per_row
    return start, end, slot


@triton.jit
def sums(signs, x, operand: tl.constexpr, SUMS: tl.constexpr):
    """signs @ x for signs of 0, 1 and -1.

    With bfloat16 operands a bfloat16 x is exact in one product, and a float32 x is split into two products, which keep
    16 bits. With wider operands at least 22 bits are kept of an x of any dtype.
    """
    if operand == tl.bfloat16 and x.dtype == tl.bfloat16:
        total = dot(signs.to(operand), x, SUMS)
    elif operand == tl.bfloat16:
        high = narrow(x, operand)
        low = narrow(x - high.to(tl.float32), operand)
        signs = signs.to(operand)
        total = dot_add(signs, high, dot(signs, low, SUMS), SUMS)
    else:
        total = dot(signs, x.to(tl.float32), SUMS)
    return total


@triton.jit
def sums_t(x, signs, operand: tl.constexpr, SUMS: tl.constexpr):
    """x @ signs, the transpose of `sums`: sums_t(x^T, signs^T) = sums(signs, x)^T."""
    if operand == tl.bfloat16 and x.dtype == tl.bfloat16:
        total = dot(x, signs.to(operand), SUMS)
    elif operand == tl.bfloat16:
        high = narrow(x, operand)
        low = narrow(x - high.to(tl.float32), operand)
        signs = signs.to(operand)
        total = dot_add(high, signs, dot(low, signs, SUMS), SUMS)
    else:
        total = dot(x.to(tl.float32), signs, SUMS)
    return total
