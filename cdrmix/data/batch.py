"""A batch: rows of packed documents as tensors.

This module needs only PyTorch, so that an engine runs without the packages that make batches (tokenizers, numba).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents. B rows, T positions a row.

    ids_BT, targets_BT: int64. weights_BT: float32, the loss weight of each target: 1 or the weight of the shards.
    Padding has the weight 0 and the target 0. cu_seqlens_N: int32, document starts in the flattened B * T positions,
    from 0 to B * T. Every row starts a document, and so does the padding of a row. step: number of the batch.
    token_count: sum of the weights of the global batch over all ranks and micro-batches; 1 if the sum is 0.
    domains: bool [B] by domain, the rows of the domain; only in the evaluation of text of several domains.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    cu_seqlens_N: Tensor
    step: int
    token_count: float
    domains: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Batch:
        """The batch with its tensors on a device. Tensors that are already there are not copied."""
        return dataclasses.replace(
            self,
            ids_BT=self.ids_BT.to(device, non_blocking=True),
            targets_BT=self.targets_BT.to(device, non_blocking=True),
            weights_BT=self.weights_BT.to(device, non_blocking=True),
            cu_seqlens_N=self.cu_seqlens_N.to(device, non_blocking=True),
            domains={name: rows_B.to(device, non_blocking=True) for name, rows_B in self.domains.items()},
        )

    def pinned(self) -> Batch:
        """The batch in page-locked memory, from which copies to a GPU are asynchronous."""
        return dataclasses.replace(
            self,
            ids_BT=self.ids_BT.pin_memory(),
            targets_BT=self.targets_BT.pin_memory(),
            weights_BT=self.weights_BT.pin_memory(),
            cu_seqlens_N=self.cu_seqlens_N.pin_memory(),
        )
