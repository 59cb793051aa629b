"""State of ZeRO outside of GPU memory: gradients that are summed in main memory, and memory-mapped files.

DeepSpeed keeps the float32 weights, AdamW's moments and the gradients of a partition in main memory and updates them
there. Its stage 2 sums the gradients of micro-batches in the weights' own data type, sends the sum to the GPU and back
for each of them, and leaves the gradient of the step before where a parameter has none. `HostGradients` replaces that.
DeepSpeed writes to files with an operator that must be compiled and needs libaio. `StateFiles` maps files into memory
instead: the operating system keeps in main memory what fits and writes the rest.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdrmix.durable import disk_guard
from cdrmix.errors import ConfigError

ROW = 4096  # elements of a gradient whose squares are summed in float32

WHEN_FULL = (
    "The files take 16 to 20 bytes a trained parameter. Free some space, or set train.offload_folder to another disk."
)


class HostGradients:
    """Sums the gradients of stage 2 in float32 in main memory: `finish` before each step of the optimizer.

    zero: DeepSpeed's ZeRO optimizer, made with offload.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._summed: set[int] = set()  # parameters with a gradient in this step
        zero.copy_grads_in_partition = self._add  # DeepSpeed calls it for each gradient it has reduced

    @torch.no_grad()
    def _add(self, parameter: Any, group: int) -> None:
        number = self._zero.get_param_id(parameter)
        total, start = self._total(group, number)
        gradient = parameter.grad.reshape(-1)[start : start + len(total)].to(total.device)
        if number in self._summed:
            total.add_(gradient)
        else:
            total.copy_(gradient)
            self._summed.add(number)
        parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Gives DeepSpeed's step the norms of the gradients; a parameter without a gradient gets zeros."""
        zero = self._zero
        for group, parameters in enumerate(zero.params_in_partition):
            for parameter in parameters:
                number = zero.get_param_id(parameter)
                total, _ = self._total(group, number)
                if number not in self._summed:
                    total.zero_()
                    continue
                norm = _norm(total)
                zero.norm_for_param_grads[number] = norm
                zero.local_overflow |= not math.isfinite(norm.item())
        self._summed.clear()

    def _total(self, group: int, number: int) -> tuple[Tensor, int]:
        """The sum of a parameter's gradients in this process's partition, and its first element in the parameter."""
        _, source, target, count = self._zero.grad_position[number]
        return self._zero.single_partition_of_fp32_groups[group].grad[target : target + count], source


def offload_late_gradients(zero: Any) -> None:
    """Gives DeepSpeed's step of stage 3 the gradients of parameters that have none in the step's last micro-batch.

    DeepSpeed moves the sum of a gradient to main memory when the last micro-batch adds to it, and only then.
    """
    moved = zero.norm_for_param_grads
    zero._offload_boundary_param_ids = {
        parameter.ds_id
        for parameter in itertools.chain.from_iterable(zero.fp16_groups)
        if parameter.ds_id in zero._offload_boundary_param_ids and zero.get_param_id(parameter) not in moved
    }
    zero._finalize_offload_gradient_accumulation()


def _norm(values: Tensor) -> Tensor:
    """The norm of a flat tensor on the CPU, summed in an order that the number of threads does not change."""
    whole = len(values) // ROW * ROW
    rows = torch.linalg.vector_norm(values[:whole].view(-1, ROW), dim=1)
    rest = torch.linalg.vector_norm(values[whole:]).reshape(1)
    return torch.linalg.vector_norm(torch.cat([rows, rest]), dtype=torch.float64)


class StateFiles:
    """Memory-mapped files in a folder, for tensors that would be in main memory. The files have no names: they are
    deleted when the process ends, however it ends."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).expanduser()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"train.offload_folder: {folder} cannot be made ({error.strerror}); name a folder on a local disk, or "
                "null for main memory"
            ) from error
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"train.offload_folder: this process may not write to {folder}; name another folder on a local disk, "
                "or null for main memory"
            )

    def zeros(self, like: Tensor) -> Tensor:
        """A tensor of zeros in a file of its own. Raises DiskFullError."""
        size = like.numel() * like.element_size()
        if size == 0:
            return torch.zeros_like(like)
        with disk_guard(f"the state of the optimizer under {self._folder}", WHEN_FULL):
            descriptor, path = tempfile.mkstemp(dir=self._folder)
            try:
                os.posix_fallocate(descriptor, 0, size)  # a full disk is an error here, and not a signal later
                return torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)
            finally:
                os.close(descriptor)
                os.unlink(path)

    def move(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor in a file of its own."""
        return self.zeros(tensor).copy_(tensor)


@torch.no_grad()
def move_state(zero: Any, stage: int, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Moves what DeepSpeed's ZeRO optimizer has in main memory to files: float32 weights, gradients and moments.

    optimizer: AdamW without state, whose moments are made here.
    """
    files = StateFiles(folder)
    for flat in zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups:
        flat.data = files.move(flat.data)
        flat.grad = files.zeros(flat)
        optimizer.state[flat] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": files.zeros(flat),
            "exp_avg_sq": files.zeros(flat),
        }
    if stage == 3:
        parameters = list(itertools.chain.from_iterable(zero.fp16_groups))
        sums = files.zeros(zero.grad_partitions_flat_buffer)
        sizes = [parameter.partition_numel() for parameter in parameters]
        zero.grad_partitions_flat_buffer = sums
        parts = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        for parameter, part in zip(parameters, sums.split(sizes), strict=True):
            parts[parameter.ds_id] = part
        return
    for parameter in itertools.chain.from_iterable(zero.bit16_groups):
        parameter._hp_mapping = None  # views of the former tensors, for DeepSpeed's own checkpoints
    zero.offload_gradient_dict = {}
