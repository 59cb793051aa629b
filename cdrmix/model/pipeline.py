"""Pipeline parallelism: the ranks of a pipeline each compute a range of the blocks of the same tokens.

The first stage has the embedding, the last one the final norm, the head and the loss. Between them go the residual
stream and the values of the first RWKV-7 block, which later ones read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdrmix.config.schema_model import Model

BEFORE_BLOCKS = ("embedding", "bigrams", "embedding_norm")


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline: its number, and how many there are."""

    rank: int
    size: int

    @property
    def first(self) -> bool:
        """Whether it reads the ids."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether it computes the loss."""
        return self.rank == self.size - 1

    def layers(self, count: int) -> range:
        """Its blocks, of so many. The numbers of blocks of two stages differ by at most one."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def has(self, name: str, config: Model) -> bool:
        """Whether it has a module or parameter of the language model. With tied tables the last stage has the embedding
        too, as its head."""
        part, *rest = name.split(".")
        if part == "blocks":
            return int(rest[0]) in self.layers(config.layers)
        if part == "embedding" and self.last and config.tie_embeddings:
            return True
        return self.first if part in BEFORE_BLOCKS else self.last


class Border(NamedTuple):
    """What one stage gives to the next: the residual stream [B, T, D], and the values of the first RWKV-7 block
    [B, T, D]; None where no such block is before, or none follows."""

    x: Tensor
    v_first: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """Those that there are."""
        return [self.x] if self.v_first is None else [self.x, self.v_first]


def carries_values(mixers: Sequence[str], before: int) -> bool:
    """Whether the values of the first RWKV-7 block go over the border before block `before`."""
    return "rwkv7" in mixers[:before] and "rwkv7" in mixers[before:]


def is_copy(parameter: Tensor) -> bool:
    """Whether a parameter is the last stage's copy of a tied table. It has a part of the table's gradient, and the
    table's bits after each update; no optimizer has it."""
    return getattr(parameter, "copy_of_table", False)


def is_elsewhere(parameter: Tensor) -> bool:
    """Whether another stage of the pipeline has a parameter."""
    return getattr(parameter, "elsewhere", False)


@torch.no_grad()
def leave(part: nn.Module) -> None:
    """Frees the tensors of a part of a model that another stage has. It keeps their names and shapes, on the device
    `meta`."""
    for module in part.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                empty.__dict__.update(parameter.__dict__, elsewhere=True)  # also how it is divided
                module._parameters[name] = empty
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="meta")
