"""Where the elements of a parameter are in the flat tensors of DeepSpeed's ZeRO optimizer.

A process has one flat tensor for each group of the optimizer: its partition of all parameters of the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Slices:
    """The elements of a parameter in the partitions of a group of processes.

    group: the processes. number: of the flat tensor. start: in this process's flat tensor. ranges: (rank in the group,
    first and end element of the flattened parameter), in the order of the elements. shape: of the parameter.
    """

    group: dist.ProcessGroup
    number: int
    start: int
    ranges: tuple[tuple[int, int, int], ...]
    shape: torch.Size

    @property
    def mine(self) -> tuple[int, int]:
        """First and end element of the flattened parameter that this process has; 0, 0: it has none."""
        rank = dist.get_rank(self.group)
        return next(((first, end) for owner, first, end in self.ranges if owner == rank), (0, 0))


class Partitions:
    """This process's flat float32 tensors, and the slices of each parameter that is trained.

    zero: at stage 1 and 2 the DeepSpeedZeroOptimizer, at stage 3 the DeepSpeedZeroOptimizer_Stage3.
    """

    def __init__(self, zero: Any, stage: int) -> None:
        self.flat: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
        )
        self._slices: dict[Tensor, Slices] = dict(_stage_3(zero) if stage == 3 else _stage_1_or_2(zero))

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._slices

    def __getitem__(self, parameter: Tensor) -> Slices:
        return self._slices[parameter]


def _stage_3(zero: Any) -> Iterator[tuple[Tensor, Slices]]:
    for number, parameters in enumerate(zero.fp16_groups):
        start = 0
        for parameter in parameters:
            size = parameter.partition_numel()
            group = parameter.ds_process_group
            ranges = _ranges(0, parameter.ds_numel, size, dist.get_world_size(group))
            yield parameter, Slices(group, number, start, ranges, parameter.ds_shape)
            start += size


def _stage_1_or_2(zero: Any) -> Iterator[tuple[Tensor, Slices]]:
    for number, parameters in enumerate(zero.round_robin_bit16_groups):
        part, group = int(zero.partition_size[number]), zero.real_dp_process_group[number]
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        for parameter, offset in zip(parameters, zero.round_robin_bit16_offsets[number], strict=True):
            ranges = _ranges(offset, parameter.numel(), part, size)
            yield parameter, Slices(group, number, max(0, offset - rank * part), ranges, parameter.shape)


def _ranges(offset: int, elements: int, part: int, processes: int) -> tuple[tuple[int, int, int], ...]:
    """Owner, first and end element of each piece of a parameter that begins at `offset` of the partitions."""
    found = []
    for rank in range(processes):
        first, end = max(0, rank * part - offset), min(elements, (rank + 1) * part - offset)
        if first < end:
            found.append((rank, first, end))
    return tuple(found)
