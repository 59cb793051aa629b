"""Tensor parallelism in training: the groups of processes, and whole tensors from the processes' shares.

With train.tensor_parallel = S, ranks 0 .. S - 1 divide every layer, the next S ranks do the same for other rows, and so
on. Ranks r, r + S, ... hold the same shares and sum their gradients; with a pipeline those of the same stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdrmix.config.schema import Config
from cdrmix.model.tensor_parallel import Cut, Divisible, TensorGroup
from cdrmix.training.groups import Copies, copies_of, neighbours, new_group, world_of


@dataclass(frozen=True)
class TensorGroups(TensorGroup, Copies):
    """The ranks with the other shares, and `copies`, those with the same ones.

    The modules of a divided model have an instance. DeepSpeed takes it as `mpu`, and calls the methods get_*, whose
    names are Megatron's.
    """

    copies: dist.ProcessGroup

    @classmethod
    def make(cls, config: Config) -> TensorGroups | None:
        """New groups of train.tensor_parallel; None where it is 1. Every process calls."""
        size, stages = config.train.tensor_parallel, config.train.pipeline_parallel
        if size == 1:
            return None
        world = world_of("tensor_parallel", size, size * stages)
        group, copies = new_group(neighbours(world, size)), new_group(copies_of(world, size, stages))
        return cls(group, dist.get_rank(group), size, copies)

    @classmethod
    def of(cls, model: nn.Module) -> TensorGroups | None:
        """The groups of a model that was divided; None: it was not."""
        tensors = (each.tensor for each in model.modules() if isinstance(each, Divisible))
        return next((each for each in tensors if isinstance(each, cls)), None)

    def gather(self, mine: Tensor, cut: Cut, owner: int = 0) -> Tensor | None:
        """The whole tensor in one rank; None in the others. owner: one of the first S ranks. All ranks call."""
        if dist.get_rank(self.copies) > 0:
            return None  # only the first copy of each share sends
        shares = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == owner else None
        dist.gather(mine.contiguous(), shares, group=self.group, group_dst=owner)
        return None if shares is None else cut.whole(shares)

    def scatter(self, mine: Tensor, cut: Cut, whole: Tensor | None) -> None:
        """Fills `mine` with this rank's share of rank 0's `whole`. All ranks call."""
        if dist.get_rank(self.copies) == 0:
            shares = None
            if whole is not None:
                whole = whole.to(mine.device, mine.dtype)
                shares = [cut.share(whole, rank, self.size).contiguous() for rank in range(self.size)]
            dist.scatter(mine, shares, group=self.group, group_src=0)
        dist.broadcast(mine, group=self.copies, group_src=0)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def get_model_parallel_rank(self) -> int:
        return self.rank

    def get_model_parallel_world_size(self) -> int:
        return self.size
