"""How documents fall into chunks, for Triton kernels that go over them: the table, and what kernels read from it.

Chunks start anew at each document, so that a document has the same bits packed or alone. A document is a row, or what
cu_seqlens [N + 1] cuts out of the B * T tokens. A slot is a place for a chunk; there are as many as shapes alone tell.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdrmix.kernels.common.triton_helpers import dot, dot_add, narrow

_KEPT = "_cdrmix_chunk_tables"  # attribute of a tensor of document starts


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the products' operands: bfloat16 for bfloat16, else float32."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def slot_count(B: int, T: int, N: int, C: int, *, packed: bool) -> int:
    """Chunks at most: known from shapes alone."""
    return B * T // C + N if packed else B * -(-T // C)


def chunk_table(cu_seqlens: Tensor, slots: int, C: int) -> Tensor:
    """First token and document's end of every chunk slot: int64 [slots, 2], the first -1 where it is unused.

    cu_seqlens: as the operator was given them, so that the layers of a batch share the table.
    """
    return _kept(cu_seqlens, ("table", slots, C), lambda: _make_table(cu_seqlens.long(), slots, C))


def long_starts(cu_seqlens: Tensor) -> Tensor:
    """The document starts as int64, which kernels read."""
    if cu_seqlens.dtype == torch.int64:
        return cu_seqlens
    return _kept(cu_seqlens, ("long",), cu_seqlens.long)


def slot_documents(cu_seqlens: Tensor, slots: int, C: int) -> Tensor:
    """The document of every chunk slot, also where it is unused: int64 [slots]. An empty document has a slot too."""

    return _kept(cu_seqlens, ("documents", slots, C), lambda: _members(cu_seqlens.long(), slots, C)[1])


def _kept(cu_seqlens: Tensor, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
    """What `make` gives, made once: a tensor of document starts keeps it until it is changed or dropped."""
    if cu_seqlens.is_inference():  # such tensors have no version to notice a change by
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
    """Document n has its slots from cu_seqlens[n] // C + n on: there are enough, as floor(x + y) - floor(x) + 1 is at
    least ceil(y), they are increasing, and known without a sum over the documents before. Made on the device.
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
def document_span(cu_seqlens, document, length, C: tl.constexpr, per_row):
    """A document's first token, end, and first chunk slot; see `chunk_table`."""
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
    """signs @ x for signs of 0, 1 and -1, to 16 bits beside bfloat16 operands (two products), else to 22 or more.

    x in bfloat16 is exact in one product; otherwise it is float32.
    """
    if operand == tl.bfloat16 and x.dtype == tl.bfloat16:
        total = dot(signs.to(operand), x, SUMS)
    elif operand == tl.bfloat16:
        high = narrow(x, operand)
        low = narrow(x - high.to(tl.float32), operand)
        signs = signs.to(operand)
        total = dot_add(signs, high, dot(signs, low, SUMS), SUMS)
    else:
        total = dot(signs, x, SUMS)
    return total


@triton.jit
def sums_t(x, signs, operand: tl.constexpr, SUMS: tl.constexpr):
    """x @ signs: the transpose of `sums` of what x and signs are the transposes of."""
    if operand == tl.bfloat16 and x.dtype == tl.bfloat16:
        total = dot(x, signs.to(operand), SUMS)
    elif operand == tl.bfloat16:
        high = narrow(x, operand)
        low = narrow(x - high.to(tl.float32), operand)
        signs = signs.to(operand)
        total = dot_add(high, signs, dot(low, signs, SUMS), SUMS)
    else:
        total = dot(x, signs, SUMS)
    return total
