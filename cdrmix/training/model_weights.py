"""The weights of a model in training: gathered from the processes for checkpoints, and loaded from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdrmix.model.pipeline import is_copy, is_elsewhere
from cdrmix.model.tensor_parallel import cut_of
from cdrmix.training.copies import Keep
from cdrmix.training.distributed import DistributedContext
from cdrmix.training.expert_parallel import ExpertGroups, is_expert_shard
from cdrmix.training.master_weights import MasterWeights
from cdrmix.training.optimizer_state import Share
from cdrmix.training.pipeline import PipelineGroups
from cdrmix.training.tensor_groups import TensorGroups

TABLE, HEAD = "embedding.weight", "head.weight"


class ModelWeights:
    """The parameters and buffers of a loss model after DeepSpeed has sharded them, by their name without
    `language_model.`.

    experts: the groups of expert parallelism. shares: those of tensor parallelism. stages: those of a pipeline.
    masters: the float32 weights of a model with bf16 weights; None: the weights are float32. trained_only: save and
    load the trained parameters alone, without buffers.

    parameters: those that this process has, of a pipeline those of its stage. names, trained: of all parameters of the
    model, and of those that are trained. tied: the last stage's copy of a tied table, and the table itself in the first
    stage; None in others and without.
    """

    def __init__(
        self,
        loss_model: nn.Module,
        world: DistributedContext,
        stage: int,
        experts: ExpertGroups | None,
        shares: TensorGroups | None,
        stages: PipelineGroups | None,
        masters: MasterWeights | None,
        *,
        trained_only: bool,
    ) -> None:
        self._model, self._world, self._stage, self._experts, self.masters = loss_model, world, stage, experts, masters
        self._shares, self._stages = shares, stages
        assert masters is None or shares is None, "bf16 weights are for models of transformers, which are not divided"
        everywhere: dict[str, Any] = {  # ZeRO-3 gives parameters ds_tensor, ds_numel and ds_shape
            name.removeprefix("language_model."): parameter for name, parameter in loss_model.named_parameters()
        }
        # State that no gradient changes: the routers' biases. Whole and equal in every process.
        self._buffers = {name.removeprefix("language_model."): buffer for name, buffer in _saved_buffers(loss_model)}
        self.names = list(everywhere)
        self.trained = [name for name, each in everywhere.items() if each.requires_grad]
        self.parameters: dict[str, Any] = {name: each for name, each in everywhere.items() if not is_elsewhere(each)}
        self._listed: dict[str, Any] = everywhere
        if trained_only:
            self._buffers = {}
            self._listed = {name: everywhere[name] for name in self.trained}
        self.tied = None if stages is None or HEAD in everywhere else self.parameters.get(TABLE)
        self._saved = {name: each for name, each in self._listed.items() if self._saves(each)}
        # The group of a stage, of which the first rank sends and writes.
        self._together = None if stages is None else stages.together
        self._root = world.pipeline_stage * world.stage_size

    def _saves(self, parameter: Tensor) -> bool:
        return not is_elsewhere(parameter) and not is_copy(parameter)

    def local(self) -> list[Tensor]:
        """The float32 weights that this process holds: whole, or under ZeRO-3 one padded slice of each; with bf16
        weights the partitions of this process."""
        if self.masters is not None:
            return [flat.detach() for flat in self.masters.flat]
        return [self._held(parameter) for parameter in self._saved.values()]

    def whole(
        self, local: Sequence[Tensor], keep: Keep, *, spread: bool, wanted: Callable[[str], bool] = lambda name: True
    ) -> dict[str, Tensor]:
        """Whole float32 weights on the CPU, with all experts, and the buffers: each in one process.

        local: what `local` returned, or its average. keep: brings a tensor to the CPU. All ranks call.
        spread: under ZeRO-3 the parameters are spread over the ranks, and with a pipeline the first rank of each stage
            has those of the stage. Otherwise rank 0 has all of them.
        wanted: of the names; the others are left out.
        One parameter at a time is whole on the device.
        """
        whole = {}
        owners = self._owners() if spread and self._stage == 3 else dict.fromkeys(self._saved, self._root)
        for number, (name, parameter) in enumerate(self._saved.items()):
            if not wanted(name):
                continue
            if self.masters is not None and parameter in self.masters:
                mine = self.masters.whole(parameter, local)
            else:
                mine = local[number] if self.masters is None else self._held(parameter).float()  # or it is frozen
                mine = _joined(mine.to(self._world.device), parameter) if self._stage == 3 else mine
            tensor: Tensor | None = mine if self._world.rank == owners[name] else None
            if is_expert_shard(parameter):
                assert self._experts is not None
                tensor = self._experts.whole(mine, owners[name] - self._root)
            elif (cut := cut_of(parameter)) is not None:
                assert self._shares is not None
                tensor = self._shares.gather(mine, cut, owners[name] - self._root)
            if tensor is not None:
                whole[name] = keep(name, tensor.detach())
        if self._world.rank == self._root:
            held = {name: buffer for name, buffer in self._buffers.items() if wanted(name) and not buffer.is_meta}
            whole |= {name: buffer.cpu().clone() for name, buffer in held.items()}
        return whole if spread or self._stages is None else self._collected(whole)

    def _collected(self, of_stage: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all stages in rank 0, sent one at a time; {} in the others. of_stage: in the first rank of
        each stage."""
        tables = self._world.gather(
            [(name, tuple(each.shape), each.dtype) for name, each in of_stage.items()], "the tensors of the stages"
        )
        device = self._world.device
        if self._world.rank > 0:
            for each in of_stage.values():
                dist.send(each.to(device), 0)
            return {}
        found = dict(of_stage)
        for rank, table in enumerate(tables[1:], 1):
            for name, shape, dtype in table:
                received = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(received, rank)
                found[name] = received.cpu()
        return {name: found[name] for name in (*self._listed, *self._buffers)}

    def _owners(self) -> dict[str, int]:
        """A rank for each saved parameter: the largest first, each to the rank with the fewest elements; experts and
        shares to the ranks that hold the first copy of each."""
        elements = [0] * self._world.size
        sizes = {name: self.place(parameter)[1].numel() for name, parameter in self._saved.items()}
        owners = {}
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            ranks = range(self._world.size)
            if is_expert_shard(self._saved[name]):
                assert self._experts is not None
                ranks = range(self._experts.experts.size)
            elif self._shares is not None:
                ranks = range(self._shares.size)
            owners[name] = min(ranks, key=lambda rank: elements[rank])
            elements[owners[name]] += sizes[name]
        return owners

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Loads what `whole` returned. The first rank's argument, with a pipeline that of each stage, is sent to the
        others. All ranks call."""
        root = self._world.rank == self._root
        for name, parameter in self._listed.items():
            if is_elsewhere(parameter):
                continue
            with self._gathered(parameter), torch.no_grad():
                if is_expert_shard(parameter):
                    assert self._experts is not None
                    self._experts.shard(parameter.data, weights[name] if root else None)
                elif (cut := cut_of(parameter)) is not None:
                    assert self._shares is not None
                    self._shares.scatter(parameter.data, cut, weights[name] if root else None)
                elif self.masters is not None and parameter in self.masters:
                    whole = self._sent(weights.get(name), parameter.shape)
                    parameter.copy_(whole)
                    self.masters.load(parameter, whole, self.masters.flat)
                else:
                    if root:
                        parameter.copy_(weights[name])
                    # The context of ZeRO-3 sends it to the processes with the same share, of which rank 0 is one.
                    if self._world.size > 1 and (self._stage < 3 or self._shares is not None):
                        dist.broadcast(parameter.data, self._root, group=self._together)
        for name, buffer in self._buffers.items():
            if buffer.is_meta:
                continue
            if root:
                buffer.copy_(weights[name])
            if self._world.size > 1:
                dist.broadcast(buffer, self._root, group=self._together)

    @torch.no_grad()
    def exchange(self, local: Sequence[Tensor]) -> None:
        """Gives the model other weights, and `local`, of the shapes of `local()`, those that it had. All ranks call.

        With bf16 weights the float32 ones stay where they are, and the model has the others, rounded, until `restore`.
        """
        if self.masters is not None:
            self._round(local)
            return
        for number, parameter in enumerate(self._saved.values()):
            other, mine = local[number], self._held(parameter)
            before = mine.clone()
            if self._stage < 3:
                mine.copy_(other)
            else:
                whole = _joined(other.to(self._world.device), parameter)
                with self._gathered(parameter):  # a small parameter stays whole in every process
                    parameter.copy_(whole)
            other.copy_(before)
        if self.tied is not None:
            assert self._stages is not None
            dist.broadcast(self.tied.detach(), group=self._stages.ends, group_src=0)

    def restore(self, local: Sequence[Tensor]) -> None:
        """Undoes `exchange` of the same tensors. All ranks call."""
        if self.masters is not None:
            self._round(self.masters.flat)
            return
        self.exchange(local)

    @torch.no_grad()
    def _round(self, flat: Sequence[Tensor]) -> None:
        """Gives a model with bf16 weights these float32 ones, which are as `masters.flat`, rounded."""
        assert self.masters is not None
        for parameter in self._saved.values():
            if parameter in self.masters:
                whole = self.masters.whole(parameter, flat)
                with self._gathered(parameter):
                    parameter.copy_(whole)

    def load_local(self, local: Sequence[Tensor], weights: Mapping[str, Tensor]) -> None:
        """Fills tensors of the shapes of `local` from whole weights, which every rank passes."""
        for number, (name, parameter) in enumerate(self._saved.items()):
            if self.masters is not None:
                if parameter in self.masters:
                    self.masters.load(parameter, weights[name], local)
                continue
            whole = self.shard(parameter, weights[name]).flatten()
            if self._stage == 3:
                size = parameter.ds_tensor.numel()
                rank = dist.get_rank(parameter.ds_process_group)
                whole = whole[rank * size : (rank + 1) * size]
            local[number].flatten()[: whole.numel()].copy_(whole)

    def copy_to(self, target: nn.Module) -> None:
        """Copies all weights into a module of the same structure. All ranks call."""
        assert self._shares is None, "conflicts/parallel.py refuses stage B, whose rollouts need this"
        assert self._stages is None, "likewise"
        with torch.no_grad():
            for parameter, copied in zip(self.parameters.values(), target.parameters(), strict=True):
                with self._gathered(parameter):
                    copied.copy_(parameter)
            for buffer, its_copy in zip(self._model.buffers(), target.buffers(), strict=True):
                its_copy.copy_(buffer)

    def shapes(self) -> dict[str, list[int]]:
        """The shapes of what `whole` returns, in every rank and without gathering."""
        shapes = {name: list(buffer.shape) for name, buffer in self._buffers.items()}
        return shapes | {name: list(self.place(parameter)[1]) for name, parameter in self._listed.items()}

    def place(self, parameter: Any) -> tuple[int, torch.Size]:
        """The number of elements before this process's parameter in the tensor with all experts, and its shape."""
        shape: torch.Size = parameter.ds_shape if self._stage == 3 else parameter.shape
        if (share := self.share(parameter)) is not None:
            return 0, share.cut.whole_shape(shape, share.size)
        if not is_expert_shard(parameter):
            return 0, shape
        assert self._experts is not None
        experts = self._experts.experts
        return experts.rank * shape.numel(), torch.Size([experts.size * shape[0], *shape[1:]])

    def shard(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """The part of a whole tensor that belongs to this process's parameter."""
        if (share := self.share(parameter)) is not None:
            return share.of(whole)
        if not is_expert_shard(parameter):
            return whole
        assert self._experts is not None
        return self._experts.experts.share(whole)

    def share(self, parameter: Tensor) -> Share | None:
        """This process's share of a parameter that tensor parallelism divides; None: it is whole here."""
        cut = cut_of(parameter)
        if cut is None:
            return None
        assert self._shares is not None
        return Share(cut, self._shares.rank, self._shares.size)

    def _held(self, parameter: Any) -> Tensor:
        held: Tensor = parameter.ds_tensor.data if self._stage == 3 else parameter.data
        return held

    def _sent(self, tensor: Tensor | None, shape: torch.Size) -> Tensor:
        """Rank 0's tensor in float32, on the device of every rank."""
        device = self._world.device
        sent = torch.empty(shape, device=device) if tensor is None else tensor.to(device, torch.float32)
        if self._world.size > 1:
            dist.broadcast(sent, 0)
        return sent

    def _gathered(self, parameter: nn.Parameter) -> Any:
        if self._stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


def _joined(mine: Tensor, parameter: Any) -> Tensor:
    """Gathers a parameter under ZeRO-3 from the slices of its group. All ranks of the group call."""
    size = dist.get_world_size(parameter.ds_process_group)
    if size > 1:
        slices = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(slices, mine.contiguous(), group=parameter.ds_process_group)
        mine = torch.cat(slices)
    return mine[: parameter.ds_numel].view(parameter.ds_shape)


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of the state_dict: not those that the model computes, such as rotary frequencies."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
