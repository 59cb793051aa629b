"""Ownership of whole parameters: each process updates some of those that several hold, and sends them to the others.

So the optimizer's state is sharded as in ZeRO-1, but no parameter is divided: Muon needs whole matrices. Gradients are
summed in every process, as without ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from cdrmix.training.distributed import DistributedContext
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
                if parameter.numel() >= SMALL:
                    self._owner[parameter] = owner = load.index(min(load))
                    self._group[parameter] = group
                    load[owner] += parameter.numel()

    def mine(self, parameter: Tensor) -> bool:
        """Whether this process updates the parameter, alone or as every process does."""
        return parameter not in self._owner or self._owner[parameter] == dist.get_rank(self._group[parameter])

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

    def from_owner(self, parameter: Tensor, value: Tensor | None) -> Tensor:
        """The owner's value of the shape and dtype of the parameter, in every process that holds the parameter."""
        if parameter not in self._owner:
            assert value is not None
            return value
        received = torch.empty_like(parameter) if value is None else value.detach().contiguous()
        dist.broadcast(received, group=self._group[parameter], group_src=self._owner[parameter])
        return received


def slots(
    world: DistributedContext,
    optimizer: torch.optim.Optimizer,
    optimized: Mapping[str, Tensor],
    owners: Owners | None,
) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Name, key, parameter and value of all of the optimizer's state of `optimized`. All processes call.

    owners: a value of the parameter's size comes from the parameter's owner; None: each process has its own state.
    """
    mine = {name: optimizer.state.get(parameter, {}) for name, parameter in optimized.items()}
    if owners is None:
        for name, parameter in optimized.items():
            for key, value in mine[name].items():
                yield name, key, parameter, value
        return
    # Of another process's state this one has neither the keys nor the step counts.
    counts = {
        name: {key: None if value.dim() else value.item() for key, value in own.items()} for name, own in mine.items()
    }
    everyone = world.gather(counts)
    for name, parameter in optimized.items():
        known = next((found[name] for found in everyone if found[name]), {})
        for key, count in known.items():
            value = torch.tensor(count) if count is not None else owners.from_owner(parameter, mine[name].get(key))
            yield name, key, parameter, value


def _buckets(parameters: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    for parameter in parameters:
        if bucket and sum(each.numel() for each in bucket) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
