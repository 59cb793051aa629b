"""What data hands to a model: rows of packed documents as tensors.

It needs PyTorch alone, so that an engine runs where what makes batches of text (tokenizers, numba) is not installed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents. B rows, T positions a row.

    ids_BT, targets_BT: int64. weights_BT: float32, of each target 1 or the weight that the shards give it, 0 (and
    target 0) in a row's filling.
    cu_seqlens_N: int32, document starts in the flattened B * T positions, from 0 to B * T; every row starts one,
    and a row's filling is one. step: number of the batch. token_count: sum of the weights over the whole global
    batch, all ranks and micro-batches; 1 where that is 0.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    cu_seqlens_N: Tensor
    step: int
    token_count: float

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on a device; nothing is copied where they are there already."""
        return dataclasses.replace(
            self,
            ids_BT=self.ids_BT.to(device, non_blocking=True),
            targets_BT=self.targets_BT.to(device, non_blocking=True),
            weights_BT=self.weights_BT.to(device, non_blocking=True),
            cu_seqlens_N=self.cu_seqlens_N.to(device, non_blocking=True),
        )

    def pinned(self) -> Batch:
        """The same batch in page-locked memory, from which a copy to a GPU does not keep the host waiting."""
        return dataclasses.replace(
            self,
            ids_BT=self.ids_BT.pin_memory(),
            targets_BT=self.targets_BT.pin_memory(),
            weights_BT=self.weights_BT.pin_memory(),
            cu_seqlens_N=self.cu_seqlens_N.pin_memory(),
        )
