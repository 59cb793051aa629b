"""Ownership of whole parameters: each process updates some of those that several hold, and sends them to the others.

So the optimizer's state is sharded as in ZeRO-1, but no parameter is divided: Muon needs whole matrices. Gradients are
summed in every process, as without ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from cdrmix.training.reduction import ReplicatedParameters

SMALL = 1 << 14  # elements; every process updates smaller parameters, because a message takes longer
BUCKET = 1 << 24  # elements of one message


class Owners:
    """The owner of each parameter among the processes that hold it.

    held: the parameters that all processes of a group hold. A parameter's owner is the process with the fewest elements
    so far, the largest parameter first; of equal ones the lowest rank.
    """

    def __init__(self, held: Iterable[ReplicatedParameters]) -> None:
        self._owner: dict[Tensor, int] = {}  # rank in the group
        self._group: dict[Tensor, dist.ProcessGroup] = {}
        self._held = [(each.group, list(each.parameters)) for each in held]
        for group, parameters in self._held:
            load = [0] * dist.get_world_size(group)
            for parameter in sorted(parameters, key=lambda each: -each.numel()):
                self._group[parameter] = group
                if parameter.numel() >= SMALL:
                    self._owner[parameter] = owner = load.index(min(load))
                    load[owner] += parameter.numel()

    def mine(self, parameter: Tensor) -> bool:
        """Whether this process updates the parameter, alone or as every process does."""
        return parameter not in self._owner or self._owner[parameter] == dist.get_rank(self._group[parameter])

    def saves(self, parameter: Tensor) -> bool:
        """Whether this process writes the parameter's state to checkpoints: its owner, or the first that has it."""
        return self._owner.get(parameter, 0) == dist.get_rank(self._group[parameter])

    @torch.no_grad()
    def exchange(self) -> None:
        """Sends the updated parameters of this process to the others, and receives theirs. All processes call."""
        for group, parameters in self._held:
            for owner in range(dist.get_world_size(group)):
                owned = [each for each in parameters if self._owner.get(each) == owner]
                for bucket in _buckets(owned):
                    message = torch.cat([each.detach().reshape(-1) for each in bucket])
                    dist.broadcast(message, group=group, group_src=owner)
                    if owner != dist.get_rank(group):
                        parts = message.split([each.numel() for each in bucket])
                        torch._foreach_copy_([each.detach().view(-1) for each in bucket], list(parts))


def _buckets(parameters: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    for parameter in parameters:
        if bucket and sum(each.numel() for each in bucket) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
