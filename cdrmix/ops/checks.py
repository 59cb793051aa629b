"""Checks of arguments that several operators share."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from cdrmix.ops.backend import debugging

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_cu_seqlens(op: str, cu_seqlens: Tensor | None, name: str, like: Tensor) -> None:
    """Raises ValueError for a wrong shape, dtype or device; like: the argument called `name`."""
    if cu_seqlens is None:
        return
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op}: cu_seqlens must be int32 or int64 [N + 1]; found {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != like.device:
        raise ValueError(f"{op}: cu_seqlens is on {cu_seqlens.device}, but {name} is on {like.device}")


def check_document_starts(op: str, cu_seqlens: Tensor | None, batch: int, length: int) -> None:
    """Raises ValueError for bad document starts, on a CPU always and on a GPU with CDRMIX_DEBUG."""
    if cu_seqlens is None or (cu_seqlens.device.type != "cpu" and not debugging()):
        return
    starts, total = cu_seqlens.tolist(), batch * length
    if starts[0] != 0 or starts[-1] != total:
        raise ValueError(
            f"{op}: cu_seqlens must begin with 0 and end with B * T = {total}; found {starts[0]} ... {starts[-1]}"
        )
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        if end < start:
            raise ValueError(f"{op}: cu_seqlens must not decrease; found {start} then {end} at position {i + 1}")
    missing = sorted(set(range(0, total, length)) - set(starts))
    if missing:
        where = f"multiples of T = {length}; {missing[0]} is not there"
        raise ValueError(f"{op}: cu_seqlens must hold every row's start, {where}")


def state_dtype(like: Tensor) -> torch.dtype:
    """The dtype of a recurrent state: float32, or float64 for float64."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32
