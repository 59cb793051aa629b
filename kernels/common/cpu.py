"""What the CPU's kernels over documents share: addresses, document starts, and memory to work in."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def address(x: Tensor | None) -> int:
    """Where a tensor lies; 0 where there is none."""
    return 0 if x is None else x.data_ptr()


def documents(cu_seqlens: Tensor | None, batch: int, length: int) -> Tensor:
    """int64 [N + 1]: where documents start over the flattened tokens."""
    if cu_seqlens is None:
        return torch.arange(0, (batch + 1) * length, length)
    return cu_seqlens.long().contiguous()


class Scratch:
    """Memory that a thread works in: arrays of the given numbers of floats, each on a line of the cache of its own.

    Not a tensor: in deterministic mode PyTorch fills every empty tensor, and with threads that no fork survives.
    """

    def __init__(self, parts: int, sizes: list[int]) -> None:
        self.offsets, end = [], 0
        for size in sizes:
            self.offsets.append(end)
            end += 4 * size
            end += -end % 64
        self.stride = end
        self.memory = np.empty(parts * end + 64, np.uint8)

    def of(self, part: int) -> list[int]:
        """The arrays' addresses."""
        start = self.memory.ctypes.data
        start += -start % 64 + part * self.stride
        return [start + offset for offset in self.offsets]


def check(*tensors: Tensor | None) -> None:
    """Asserts what loops over addresses take for granted."""
    for x in tensors:
        assert x is None or (x.dtype == torch.float32 and x.is_contiguous() and x.device.type == "cpu")
