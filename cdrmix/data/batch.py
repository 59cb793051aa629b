"""A batch: rows of packed documents as tensors.

This module needs only PyTorch, so that an engine runs without the packages that make batches (tokenizers, numba).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor


class PartCount(NamedTuple):
    """A part of the loss in a global batch.

    name, number: of the part. tokens: of the part; where loss weights in the shards are not 1, their sum. factor: what
    these weights were multiplied by.
    """

    name: str
    number: int
    tokens: float
    factor: float


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents. B rows, T positions a row.

    ids_BT, targets_BT: int64. weights_BT: float32, the loss weight of each target: 1 or the weight of the shards, times
    the factor of its part.
    The filling of a row has the weight 0 and the target 0; but a token may have the weight 0 too. cu_seqlens_N: int32,
    document starts in the flattened B * T positions, from 0 to B * T. Every row starts a document, and so does the
    filling of a row. step: number of the batch.
    token_count: sum of the weights of the shards over the global batch, all ranks and micro-batches; 1 if it is 0.
    domains: bool [B] by domain, the rows of the domain; only in the evaluation of text of several domains.
    parts_BT: uint8, the part of the loss of each target; None: all next_token. parts: those with tokens in the global
    batch and a weight above 0, with data.objectives.weights; empty without.
    tokens_N: int64, the places of the tokens in the flattened positions of the targets, rising; the other positions are
        filling, which belongs to no document. None: there is none.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    cu_seqlens_N: Tensor
    step: int
    token_count: float
    domains: dict[str, Tensor] = field(default_factory=dict)
    parts_BT: Tensor | None = None
    parts: tuple[PartCount, ...] = ()
    tokens_N: Tensor | None = None

    ON_CPU: ClassVar[frozenset[str]] = frozenset()  # tensors that stay there

    @property
    def documents(self) -> tuple[Tensor, Tensor | None]:
        """What a loss model must know of the documents: their starts, and which positions are tokens."""
        return self.cu_seqlens_N, self.tokens_N

    def of_slice(self, rank: int, size: int) -> Batch:
        """The batch of one of `size` processes that share the tokens of each row: ids and documents of whole rows; the
        targets, their weights and their parts of slice `rank`, [B, T / size]."""
        if size == 1:
            return self
        tokens_N = self.tokens_N
        if tokens_N is not None:
            whole, width = self.ids_BT.shape[1], self.ids_BT.shape[1] // size
            tokens_N = tokens_N[tokens_N % whole // width == rank]
            tokens_N = tokens_N // whole * width + tokens_N % width
        return dataclasses.replace(
            self,
            targets_BT=self.targets_BT.chunk(size, 1)[rank].contiguous(),
            weights_BT=self.weights_BT.chunk(size, 1)[rank].contiguous(),
            parts_BT=None if self.parts_BT is None else self.parts_BT.chunk(size, 1)[rank].contiguous(),
            tokens_N=tokens_N,
        )

    def to(self, device: torch.device) -> Self:
        """The batch with its tensors on a device, except ON_CPU. Tensors that are already there are not copied."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Self:
        """The batch in page-locked memory, from which copies to a GPU are asynchronous."""
        return self._moved(Tensor.pin_memory)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = {name: move(value) for name, value in tensors.items() if name not in self.ON_CPU}
        return dataclasses.replace(self, **moved, domains={name: move(rows_B) for name, rows_B in self.domains.items()})

    def part_weights(self, numbers: Sequence[int]) -> Tensor:
        """float32 [P, B, T]: for each of these parts the weights of its own targets, 0 elsewhere."""
        if self.parts_BT is None:
            return torch.stack([self.weights_BT * (number == 0) for number in numbers])
        chosen = torch.tensor(numbers, dtype=self.parts_BT.dtype, device=self.parts_BT.device)
        return (self.parts_BT == chosen[:, None, None]) * self.weights_BT
