"""New groups of processes, and which ranks have the same part of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from cdrmix.errors import ConfigError
from cdrmix.training.distributed import TIMEOUT


class Copies:
    """What DeepSpeed asks an `mpu` of the ranks that sum their gradients. The names of the methods are Megatron's.

    copies: the ranks with the same part of a model, and other rows.
    """

    copies: dist.ProcessGroup

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.copies

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.copies)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.copies)


def new_group(lists: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """A new group for each list of ranks: this process's. Every process calls with the same lists, which have each rank
    once. Nothing may keep a group but the model: see distributed._leave."""
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in lists], timeout=TIMEOUT)
    assert group is not None
    return group


def neighbours(world: int, size: int) -> list[range]:
    """The ranks in groups of `size` consecutive ones."""
    return [range(first, first + size) for first in range(0, world, size)]


def copies_of(world: int, shares: int, stages: int) -> list[range]:
    """The ranks with the same share of the weights, for each share of each stage of a pipeline."""
    return [stage[share::shares] for stage in neighbours(world, world // stages) for share in range(shares)]


def world_of(key: str, size: int, together: int) -> int:
    """The number of processes. Raises ConfigError unless it is a multiple of `together`, which train.KEY=SIZE needs."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % together:
        raise ConfigError(f"train.{key}: {size} needs a multiple of as many processes (--nproc)")
    return world
