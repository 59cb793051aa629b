"""The float32 weights that ZeRO keeps for a model whose own weights are bf16: gathered for checkpoints, and loaded.

The optimizer updates them in its partitions, and ZeRO rounds them to the model's weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cdrmix.training.partitions import Partitions


class MasterWeights:
    """The float32 weights of the parameters that are trained, in the partitions of DeepSpeed's ZeRO optimizer.

    The partitions may be in main memory. device: where parameters are gathered, one at a time.
    """

    def __init__(self, partitions: Partitions, device: torch.device) -> None:
        self._partitions, self._device = partitions, device

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._partitions

    @property
    def flat(self) -> list[Tensor]:
        """This process's partitions."""
        return self._partitions.flat

    def restore(self, parameters: Iterable[Tensor], before: Iterable[Tensor]) -> None:
        """Gives the float32 weights the digits that they had before DeepSpeed made them from rounded ones.

        before: the data of the parameters. What was bf16 or partitioned already has no more digits.
        """
        for parameter, weight in zip(parameters, before, strict=True):
            if parameter in self and weight.dtype == torch.float32 and weight.numel() > 0:
                self.load(parameter, weight, self.flat)

    def whole(self, parameter: Tensor, flat: Sequence[Tensor]) -> Tensor:
        """A parameter's float32 elements from all processes, on the device and in its shape. All ranks call.

        flat: `self.flat`, or tensors of their shapes, such as their moving averages.
        """
        slices = self._partitions[parameter]
        whole = torch.empty(slices.shape, device=self._device)
        rank, size = dist.get_rank(slices.group), dist.get_world_size(slices.group)
        for owner, first, end in slices.ranges:
            part = whole.view(-1)[first:end]
            if owner == rank:
                part.copy_(flat[slices.number].detach()[slices.start : slices.start + end - first])
            if size > 1:
                dist.broadcast(part, group=slices.group, group_src=owner)
        return whole

    def load(self, parameter: Tensor, whole: Tensor, flat: Sequence[Tensor]) -> None:
        """Copies this process's elements of a whole parameter to `flat`, which is as in `whole`."""
        slices = self._partitions[parameter]
        first, end = slices.mine
        flat[slices.number].detach()[slices.start : slices.start + end - first].copy_(whole.reshape(-1)[first:end])
