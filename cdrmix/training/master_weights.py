"""The float32 weights that ZeRO keeps for a model whose own weights are bf16: gathered for checkpoints, and loaded.

The optimizer updates them, and ZeRO rounds them to the model's weights. A process has one flat tensor for each group of
the optimizer: its partition of all parameters of the group. Here a parameter is found in the partitions again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class _Slices:
    """The elements of a parameter in the partitions of a group of processes.

    group: the processes. number: of the flat tensor. start: in this process's flat tensor. ranges: (rank in the group,
    first and end element of the flattened parameter), in the order of the elements. shape: of the parameter.
    """

    group: dist.ProcessGroup
    number: int
    start: int
    ranges: tuple[tuple[int, int, int], ...]
    shape: torch.Size


class MasterWeights:
    """The float32 weights of the parameters that are trained, in the partitions of DeepSpeed's ZeRO optimizer.

    zero: at stage 1 and 2 its DeepSpeedZeroOptimizer, at stage 3 its DeepSpeedZeroOptimizer_Stage3. flat: this
    process's partitions, which may be in main memory. device: where parameters are gathered, one at a time.
    """

    def __init__(self, zero: Any, stage: int, device: torch.device) -> None:
        self._device = device
        self.flat: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
        )
        self._slices: dict[Tensor, _Slices] = {}
        if stage == 3:
            for number, parameters in enumerate(zero.fp16_groups):
                start = 0
                for parameter in parameters:
                    size = parameter.partition_numel()
                    group = parameter.ds_process_group
                    ranges = _ranges(0, parameter.ds_numel, size, dist.get_world_size(group))
                    self._slices[parameter] = _Slices(group, number, start, ranges, parameter.ds_shape)
                    start += size
            return
        for number, parameters in enumerate(zero.round_robin_bit16_groups):
            part, group = int(zero.partition_size[number]), zero.real_dp_process_group[number]
            rank, size = dist.get_rank(group), dist.get_world_size(group)
            for parameter, offset in zip(parameters, zero.round_robin_bit16_offsets[number], strict=True):
                ranges = _ranges(offset, parameter.numel(), part, size)
                start = max(0, offset - rank * part)
                self._slices[parameter] = _Slices(group, number, start, ranges, parameter.shape)

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._slices

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
        slices = self._slices[parameter]
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
        slices = self._slices[parameter]
        rank = dist.get_rank(slices.group)
        for owner, first, end in slices.ranges:
            if owner == rank:
                mine = flat[slices.number].detach()[slices.start : slices.start + end - first]
                mine.copy_(whole.reshape(-1)[first:end])


def _ranges(offset: int, elements: int, part: int, processes: int) -> tuple[tuple[int, int, int], ...]:
    """Owner, first and end element of each piece of a parameter that begins at `offset` of the partitions."""
    found = []
    for rank in range(processes):
        first, end = max(0, rank * part - offset), min(elements, (rank + 1) * part - offset)
        if first < end:
            found.append((rank, first, end))
    return tuple(found)
