"""Expert parallelism on DeepSpeed's process groups: layers that DeepSpeed accepts, gathering and sharding of experts.

With train.expert_parallel = S and W processes, ranks 0 .. S - 1 hold every expert once, the next S ranks hold them
again, and so on. S ranks exchange rows. The W / S ranks that hold the same experts sum their gradients. With a pipeline
all this is within a stage. What DeepSpeed 0.19 does, read in its source and tested against plain PyTorch:
- It trains expert parameters that differ by rank, under every ZeRO stage, only in an AutoEPMoELayer. Of that class it
  reads a name, sizes and `set_deepspeed_parallelism`. Our layer therefore has that class as a second base.
- A parameter with `allreduce = False` is reduced over the group that `group_name` names. ZeRO-1 and 2 find these
  parameters by optimizer group ("moe" and "name"), ZeRO-3 by `ds_zero_placement_family`.
- It divides these gradients by the number of all processes, like all others. Engine.backward undoes both divisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.model.feed_forward.expert_parallel import ExpertGroup, ExpertParallelFeedForward
from cdrmix.model.feed_forward.moe import EXPERT_PARAMETERS, MoeFeedForward


@dataclass(frozen=True)
class ExpertGroups:
    """The groups of this process: `experts` has the ranks with the other experts, `copies` those with the same ones."""

    name: str
    experts: ExpertGroup
    copies: dist.ProcessGroup

    def whole(self, mine: Tensor, owner: int = 0) -> Tensor | None:
        """Gathers all experts' rows in one rank from each rank's `mine`. None in the other ranks. All ranks call.

        owner: one of the ranks that hold the first copy of each expert.
        """
        size, rank = self.experts.size, self.experts.rank
        if dist.get_rank(self.copies) > 0:
            return None  # only the first copy of each expert sends
        whole = mine.new_empty(size * len(mine), *mine.shape[1:]) if rank == owner else None
        parts = None if whole is None else list(whole.chunk(size))
        dist.gather(mine.contiguous(), parts, group=self.experts.group, group_dst=owner)
        return whole

    def shard(self, mine: Tensor, whole: Tensor | None) -> None:
        """Fills `mine` with this rank's experts from rank 0's `whole`. All ranks call."""
        if dist.get_rank(self.copies) == 0:
            parts = None if whole is None else list(whole.to(mine.device, mine.dtype).chunk(self.experts.size))
            dist.scatter(mine, parts, group=self.experts.group, group_src=0)
        dist.broadcast(mine, group=self.copies, group_src=0)


def expert_groups(config: Config) -> ExpertGroups | None:
    """The groups of train.expert_parallel, created at the first call; None where it is 1. Every process calls."""
    size = config.train.expert_parallel
    if size == 1:
        return None
    from deepspeed.utils import groups  # imported after distributed.join has chosen the accelerator

    name, stages = f"ep_size_{size}", config.train.pipeline_parallel  # the name is DeepSpeed's own
    made = groups._get_expert_parallel_group_dict(), groups._get_expert_data_parallel_group_dict()
    if name in made[1] and dist.get_world_size(made[1][name]) * size * stages != dist.get_world_size():
        for each in made:  # of an engine before, with another number of stages
            del each[name]
    if name not in made[0]:
        # Without the number of stages, experts of different layers would have the same copies.
        groups._create_expert_and_data_parallel(size, pp_size=stages)
    group = groups._get_expert_parallel_group(name)
    copies = groups._get_expert_data_parallel_group(name)
    return ExpertGroups(name, ExpertGroup(group, dist.get_rank(group), size), copies)


def expert_layer(config: Config, *, equal_tokens: bool = True) -> Callable[[Model], MoeFeedForward]:
    """The constructor of a model's MoE layers: all experts, or with train.expert_parallel those of this rank.

    equal_tokens: whether the ranks have equally many tokens in each forward pass in training.
    """
    groups = expert_groups(config)
    if groups is None:
        return MoeFeedForward
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    known: Any = type("KnownExpertParallelFeedForward", (ExpertParallelFeedForward, AutoEPMoELayer), {})

    def make(model: Model) -> MoeFeedForward:
        layer: Any = ExpertParallelFeedForward(model, groups.experts, equal_tokens=equal_tokens)
        for name in EXPERT_PARAMETERS:
            parameter = getattr(layer, name)
            parameter.allreduce = False
            parameter.group_name = parameter.ds_zero_partition_group_name = groups.name
            parameter.ds_zero_placement_family = "autoep_expert"
            parameter.ds_zero_partition_process_group = groups.copies  # under ZeRO-3, also before DeepSpeed sees it
        layer.ep_size, layer.ep_group_name, layer.folding_group_handles = groups.experts.size, groups.name, None
        layer.num_experts = model.feed_forward.experts
        layer.num_local_experts = layer.num_experts // layer.ep_size
        # AutoEPMoELayer's constructor is not called: it would convert a layer of a transformers model.
        layer.__class__ = known
        made: MoeFeedForward = layer
        return made

    return make


def is_expert_shard(parameter: Tensor) -> bool:
    """Whether a parameter holds only the experts of this rank."""
    return not getattr(parameter, "allreduce", True)


def total_norm(
    gradients: list[tuple[Tensor, bool]], group: dist.ProcessGroup | None, stages: dist.ProcessGroup | None = None
) -> Tensor:
    """The norm of all gradients, with every expert and every share counted once: a float32 scalar, equal in every rank.

    gradients: each with whether the ranks of the group have different parts of it. stages: the ranks with the others.
    Squares are summed in float64. PyTorch's sequential float32 sum on a CPU has a relative error of 4e-6 for half a
    million elements, and up to 1e-4 for more.
    """
    squares = _sum_of_squares([gradient for gradient, divided in gradients if not divided])
    different = [gradient for gradient, divided in gradients if divided]  # none in a stage without experts
    if group is not None and different:
        parts = _sum_of_squares(different)
        dist.all_reduce(parts, group=group)
        squares = squares + parts
    if stages is not None:
        dist.all_reduce(squares, group=stages)
    return squares.sqrt().float()


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """A scalar in float64, summed in an order that the number of threads does not change.

    Squares of a row are summed in float32, rows in float64: float64 throughout takes ten times as long on a CPU. A GPU
    sums a tensor as a tree, which is as exact, and all tensors in one launch.
    """
    if tensors[0].device.type == "cuda":
        norms = torch.stack(torch._foreach_norm(tensors))
    else:
        norms = torch.cat([torch.linalg.vector_norm(tensor, dim=-1).reshape(-1) for tensor in tensors])
    return torch.linalg.vector_norm(norms, dtype=torch.float64).square()
