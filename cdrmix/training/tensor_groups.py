"""Tensor parallelism in training: the groups of processes, and whole tensors from the processes' shares.

With train.tensor_parallel = S, ranks 0 .. S - 1 divide every layer, the next S ranks do the same for other rows, and so
on. Ranks r, r + S, ... hold the same shares and sum their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdrmix.model.tensor_parallel import Cut, Divisible, TensorGroup, cut_of
from cdrmix.training.distributed import TIMEOUT


@dataclass(frozen=True)
class TensorGroups:
    """The groups of this process: `tensor` has the ranks with the other shares, `copies` those with the same ones.

    DeepSpeed takes an instance as `mpu`, and calls the methods get_*, whose names are Megatron's.
    """

    tensor: TensorGroup
    copies: dist.ProcessGroup

    @classmethod
    def of(cls, model: nn.Module) -> TensorGroups | None:
        """The groups of a model that was divided; None: it was not. Every process calls."""
        tensor = next(
            (each.tensor for each in model.modules() if isinstance(each, Divisible) and each.tensor is not None), None
        )
        if tensor is None:
            return None
        size, world = tensor.size, dist.get_world_size()
        copies, _ = dist.new_subgroups_by_enumeration(
            [list(range(first, world, size)) for first in range(size)], timeout=TIMEOUT
        )
        assert copies is not None
        return cls(tensor, copies)

    def gather(self, mine: Tensor, cut: Cut, owner: int = 0) -> Tensor | None:
        """The whole tensor in one rank; None in the others. owner: one of the first S ranks. All ranks call."""
        if dist.get_rank(self.copies) > 0:
            return None  # only the first copy of each share sends
        shares = [torch.empty_like(mine) for _ in range(self.tensor.size)] if self.tensor.rank == owner else None
        dist.gather(mine.contiguous(), shares, group=self.tensor.group, group_dst=owner)
        return None if shares is None else cut.whole(shares)

    def scatter(self, mine: Tensor, cut: Cut, whole: Tensor | None) -> None:
        """Fills `mine` with this rank's share of rank 0's `whole`. All ranks call."""
        if dist.get_rank(self.copies) == 0:
            shares = None
            if whole is not None:
                whole = whole.to(mine.device, mine.dtype)
                shares = [cut.share(whole, rank, self.tensor.size).contiguous() for rank in range(self.tensor.size)]
            dist.scatter(mine, shares, group=self.tensor.group, group_src=0)
        dist.broadcast(mine, group=self.copies, group_src=0)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.tensor.group

    def get_model_parallel_rank(self) -> int:
        return self.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self.tensor.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.copies

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.copies)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.copies)


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """How each parameter of a model is divided, or would be, by name. Those that stay whole are left out."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Divisible):
            for name, cut in module.cuts().items():
                path, _, leaf = name.rpartition(".")
                parameter = getattr(module.get_submodule(path), leaf)
                found[f"{prefix}.{name}" if prefix else name] = cut_of(parameter) or cut
    return found
