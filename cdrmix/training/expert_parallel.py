"""Expert parallelism on DeepSpeed's process groups: the layers it knows as such, and experts made whole and shared out.

With train.expert_parallel = S and W processes, ranks 0 .. S - 1 hold every expert once, the next S ranks again, and so
on: S ranks exchange rows, and the W / S ranks that hold the same experts add up their gradients. As read in DeepSpeed
0.19 and held against plain PyTorch in the tests:
- It trains expert parameters that differ by rank, under every ZeRO stage, only below an AutoEPMoELayer; of that class
  it asks a name, sizes and `set_deepspeed_parallelism`. So our layer gets that class as a second base.
- A parameter with `allreduce = False` is reduced over the group that `group_name` names; ZeRO-1 and 2 find them by
  optimizer group ("moe" and "name"), ZeRO-3 by `ds_zero_placement_family`.
- It divides those gradients by the number of all processes, as the others, so that Engine.backward undoes both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cdrmix.config.schema import Config, Model
from cdrmix.model.feed_forward.expert_parallel import ExpertGroup, ExpertParallelFeedForward
from cdrmix.model.feed_forward.moe import EXPERT_PARAMETERS, MoeFeedForward


@dataclass(frozen=True)
class ExpertGroups:
    """The groups of this process: those with the other experts, and its copies, which hold the same ones."""

    name: str
    experts: ExpertGroup
    copies: dist.ProcessGroup

    def whole(self, mine: Tensor) -> Tensor | None:
        """All experts' rows of a tensor of which `mine` are this rank's: in rank 0; None in the others. All call."""
        size, rank = self.experts.size, self.experts.rank
        if dist.get_rank(self.copies) > 0:
            return None  # the first copy of each expert answers
        whole = mine.new_empty(size * len(mine), *mine.shape[1:]) if rank == 0 else None
        parts = None if whole is None else list(whole.chunk(size))
        dist.gather(mine.contiguous(), parts, group=self.experts.group, group_dst=0)
        return whole

    def shard(self, mine: Tensor, whole: Tensor | None) -> None:
        """Fills `mine` with this rank's experts of rank 0's `whole`. All call."""
        if dist.get_rank(self.copies) == 0:
            parts = None if whole is None else list(whole.to(mine.device, mine.dtype).chunk(self.experts.size))
            dist.scatter(mine, parts, group=self.experts.group, group_src=0)
        dist.broadcast(mine, group=self.copies, group_src=0)


def expert_groups(config: Config) -> ExpertGroups | None:
    """The groups of train.expert_parallel, made at the first call; None where it is 1. Every process calls."""
    size = config.train.expert_parallel
    if size == 1:
        return None
    from deepspeed.utils import groups  # after parallel.join has settled the accelerator

    name = f"ep_size_{size}"  # DeepSpeed's own
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(size)
    group = groups._get_expert_parallel_group(name)
    copies = groups._get_expert_data_parallel_group(name)
    return ExpertGroups(name, ExpertGroup(group, dist.get_rank(group), size), copies)


def expert_layer(config: Config) -> Callable[[Model], MoeFeedForward]:
    """What makes the mixtures of experts of a model: whole ones, or with train.expert_parallel this rank's share."""
    groups = expert_groups(config)
    if groups is None:
        return MoeFeedForward
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    known: Any = type("KnownExpertParallelFeedForward", (ExpertParallelFeedForward, AutoEPMoELayer), {})

    def make(model: Model) -> MoeFeedForward:
        layer: Any = ExpertParallelFeedForward(model, groups.experts)
        for name in EXPERT_PARAMETERS:
            parameter = getattr(layer, name)
            parameter.allreduce = False
            parameter.group_name = parameter.ds_zero_partition_group_name = groups.name
            parameter.ds_zero_placement_family = "autoep_expert"
        layer.ep_size, layer.ep_group_name, layer.folding_group_handles = groups.experts.size, groups.name, None
        layer.num_experts = model.feed_forward.experts
        layer.num_local_experts = layer.num_experts // layer.ep_size
        # Not called as a constructor: AutoEPMoELayer's would convert a layer of a transformers model.
        layer.__class__ = known
        made: MoeFeedForward = layer
        return made

    return make


def is_shared_out(parameter: Tensor) -> bool:
    """Whether a parameter holds this rank's share of the experts."""
    return not getattr(parameter, "allreduce", True)


def total_norm(gradients: list[tuple[Tensor, bool]], groups: ExpertGroups | None) -> Tensor:
    """The norm of all gradients, every expert's counted once: the same in every rank. A scalar, float32.

    gradients: each with whether it is of shared out experts. Squares are summed in float64: in float32 and one after
    another, as PyTorch sums them on a CPU, the norm of half a million elements is off by 4e-6, and of more by 1e-4.
    """
    squares = _sum_of_squares([gradient for gradient, shared in gradients if not shared])
    if groups is not None:
        experts = _sum_of_squares([gradient for gradient, shared in gradients if shared])
        dist.all_reduce(experts, group=groups.experts.group)
        squares = squares + experts
    return squares.sqrt().float()


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """A scalar in float64, summed in an order that the number of threads does not change.

    Each row's squares are summed in float32, the rows' in float64; all in float64 takes a CPU ten times as long. A GPU
    sums a tensor as a tree, which is as exact, and all tensors in one launch.
    """
    if tensors[0].device.type == "cuda":
        norms = torch.stack(torch._foreach_norm(tensors))
    else:
        norms = torch.cat([torch.linalg.vector_norm(tensor, dim=-1).reshape(-1) for tensor in tensors])
    return torch.linalg.vector_norm(norms, dtype=torch.float64).square()
