"""Copies of a training's state in main memory, which a checkpoint is written from while the training goes on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Keep = Callable[[str, Tensor], Tensor]  # (name, tensor) -> the same values on the CPU


def on_cpu(name: str, tensor: Tensor) -> Tensor:
    """The tensor on the CPU, which may be the tensor itself."""
    return tensor.detach().cpu().contiguous()


class HostCopies:
    """Copies by name, whose memory is used again for the next checkpoint. For a GPU it is pinned.

    The kernel clears new memory first: 1.5 GB took 2.2 s at first, and 0.21 s again (benchmarks/LOG.md).
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def of(self, what: str) -> Keep:
        """Copies the tensors of one file; other files may have the same names."""

        def keep(name: str, tensor: Tensor) -> Tensor:
            key = f"{what} {name}"
            copy = self._copies.get(key)
            if copy is None or copy.shape != tensor.shape:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._copies[key] = copy
            return copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)

        return keep

    def wait(self) -> None:
        """Waits for the copies from a GPU."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
