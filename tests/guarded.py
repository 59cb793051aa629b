"""Memory between guards, to find kernels that write beside their results or read what nobody has written."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

GUARD = 256  # bytes
UNCHANGED = 77


@contextlib.contextmanager
def guarded(unwritten: float = math.nan) -> Iterator[list[Tensor]]:
    """Within it, torch.empty and torch.empty_like give memory between two guards, which must be unchanged at the end.

    unwritten: what floating-point tensors have before they are written. Yields the memory of each, without its guards.
    """
    found: list[tuple[Tensor, int]] = []
    insides: list[Tensor] = []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count, guard = math.prod(shape), GUARD // dtype.itemsize
        whole = torch.full((count + 2 * guard,), UNCHANGED, dtype=dtype)
        inside = whole[guard : guard + count]
        if dtype.is_floating_point:
            inside.fill_(unwritten)
        found.append((whole, guard))
        insides.append(inside)
        return inside.view(shape)

    def empty(*shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
        return allocate(torch.Size(shape if isinstance(shape[0], int) else shape[0]), dtype)

    def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return allocate(tuple(x.shape), dtype or x.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch, "empty_like", empty_like)
        yield insides
    for whole, guard in found:
        assert (whole[:guard] == UNCHANGED).all()
        assert (whole[len(whole) - guard :] == UNCHANGED).all()
