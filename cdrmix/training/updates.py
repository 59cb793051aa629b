"""From the gradients of a step to an update: one class for each ZeRO stage. An engine is built with one of them.

It uses private names of DeepSpeed 0.19's ZeRO optimizers, as they were read in `zero/stage_1_and_2.py` and `stage3.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from cdrmix.model.pipeline import is_copy
from cdrmix.model.tensor_parallel import cut_of
from cdrmix.training.expert_parallel import is_expert_shard, total_norm
from cdrmix.training.offload import HostGradients, offload_late_gradients
from cdrmix.training.optim import LossScale
from cdrmix.training.reduction import ReplicatedParameters


class Update(ABC):
    """What is done with the gradients of a step: `announce`, the backward passes, `gradients_are_final`, `clip`,
    `apply`, `clear`."""

    sums: ClassVar[bool]
    """Whether the gradients of all processes are summed in `.grad`; otherwise DeepSpeed sums them in partitions."""

    @abstractmethod
    def announce(self, scale: LossScale) -> float:
        """Before a backward pass. Returns the factor of its loss."""

    @abstractmethod
    def gradients_are_final(self) -> None:
        """After the last backward pass of a step and its sums over the processes."""

    @abstractmethod
    def clip(self, scale: LossScale) -> Tensor | None:
        """Clips the gradients, and takes the loss scale from them. Returns their norm before, a scalar on the device;
        None: `apply` does so."""

    @abstractmethod
    def apply(self, norm: float | None, *, discard: bool) -> tuple[bool, float]:
        """Updates the weights, unless the norm is not finite. norm: what `clip` returned, if it was read. discard: does
        not update. Returns whether it did, and the norm; of ZeRO it is infinite where it did not."""

    @abstractmethod
    def clear(self) -> None:
        """Removes gradients that are kept elsewhere than in `.grad`."""

    @abstractmethod
    def weights_changed(self) -> None:
        """After weights were loaded."""

    @abstractmethod
    def gradient(self, parameter: Tensor) -> Tensor:
        """The whole gradient of a parameter after the sums. All ranks call."""


class Replicated(Update):
    """Without ZeRO: every process has all gradients and updates all weights.

    divided: the ranks that divide some of the parameters, experts or shares; None: none are. line: the stages of a
    pipeline; None: there is one.
    """

    sums = True

    def __init__(
        self,
        engine: Any,
        parameters: Mapping[str, Tensor],
        largest_norm: float,
        *,
        divided: dist.ProcessGroup | None,
        line: dist.ProcessGroup | None,
    ) -> None:
        self._engine, self._parameters, self._largest_norm = engine, parameters, largest_norm
        self._divided, self._line = divided, line
        self._norm = torch.zeros(())

    def announce(self, scale: LossScale) -> float:
        return scale.value

    def gradients_are_final(self) -> None:
        pass

    def clip(self, scale: LossScale) -> Tensor:
        everything = [
            (parameter.grad, is_expert_shard(parameter) or cut_of(parameter) is not None)
            for parameter in self._parameters.values()
            if not is_copy(parameter)
        ]
        gradients = [(gradient, divided) for gradient, divided in everything if gradient is not None]
        if scale.enabled:
            torch._foreach_mul_([gradient for gradient, _ in gradients], 1.0 / scale.value)
        self._norm = total_norm(gradients, self._divided, self._line)
        torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._largest_norm, self._norm, foreach=True)
        return self._norm

    def apply(self, norm: float | None, *, discard: bool) -> tuple[bool, float]:
        norm = self._norm.item() if norm is None else norm
        applied = math.isfinite(norm) and not discard
        if applied:
            self._engine.step()
        return applied, norm

    def clear(self) -> None:
        pass

    def weights_changed(self) -> None:
        pass

    def gradient(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad


class _Zero(Update):
    """By DeepSpeed's ZeRO optimizer, whose step clips, checks and updates its partitions."""

    norm_name = "scaled_global_norm"  # of its method

    def __init__(self, engine: Any, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        self._engine, self._zero, self._parameters, self._device = engine, engine.optimizer, parameters, device

    def announce(self, scale: LossScale) -> float:
        if scale.enabled:
            self._zero.override_loss_scale(scale.value)
        return 1.0

    def gradients_are_final(self) -> None:
        pass

    def clip(self, scale: LossScale) -> None:
        return None

    def apply(self, norm: float | None, *, discard: bool) -> tuple[bool, float]:
        self._finish()
        if discard:
            # DeepSpeed skips an update whose norm is not finite, and then clears what it has accumulated.
            with self._norm_is(self._infinite_norm()):
                self._engine.step()
            assert not self._engine.was_step_applied()
            return False, math.inf
        self._engine.step()
        applied = bool(self._engine.was_step_applied())
        return applied, float(self._engine.get_global_grad_norm()) if applied else math.inf

    def clear(self) -> None:
        pass

    def weights_changed(self) -> None:
        self._zero.refresh_fp32_params()

    def gradient(self, parameter: Tensor) -> Tensor:
        from deepspeed.utils import safe_get_full_grad

        whole: Tensor = safe_get_full_grad(parameter)
        return whole

    def _infinite_norm(self) -> Any:
        return torch.full((), math.inf, device=self._device)

    def _finish(self) -> None:
        """Before the step: gradients that are not yet where it looks for them."""

    @contextmanager
    def _norm_is(self, value: Any) -> Iterator[None]:
        before = vars(self._zero).get(self.norm_name)  # of `pipeline.extend_over`
        setattr(self._zero, self.norm_name, lambda: value)
        try:
            yield
        finally:
            delattr(self._zero, self.norm_name)
            if before is not None:
                setattr(self._zero, self.norm_name, before)


class Zero1(_Zero):
    """Every process has all gradients, and updates the weights of its partition."""

    sums = True

    def __init__(self, engine: Any, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__(engine, parameters, device)
        for hook in self._zero._grad_acc_hooks:
            hook.remove()  # they create buckets that stay empty

    def owned(self) -> list[ReplicatedParameters]:
        """The parameters by group of processes, with the elements that each of them updates."""
        zero = self._zero
        assert not any(any(padding) for padding in zero.round_robin_bit16_padding), "gaps between parameters"
        layout = zip(zero.round_robin_bit16_groups, zero.real_dp_process_group, zero.partition_size, strict=True)
        return [ReplicatedParameters(parameters, group, int(part)) for parameters, group, part in layout]

    def gradients_are_final(self) -> None:
        # As ZeRO-1 of DeepSpeed does after its own reduction: its step reads the sums of this process's partitions.
        zero = self._zero
        for number, mine in enumerate(zero.params_in_partition):
            zero.all_grad_tensors[number] = zero.get_all_grad_tensors(mine, dtype=torch.float32)
        zero.finalize_gradient_accumulation_boundary()
        for parameter in self._parameters.values():
            parameter.grad = None


class Zero2(_Zero):
    """DeepSpeed sums each gradient in the process that updates the weights. It divides by the number of processes that
    have the same weights, `replicas`. offloads: the state is in main memory."""

    sums = False

    def __init__(
        self, engine: Any, parameters: Mapping[str, Tensor], device: torch.device, replicas: int, *, offloads: bool
    ) -> None:
        super().__init__(engine, parameters, device)
        self._replicas, self._offloads = replicas, offloads
        self._host = self._gradients_of_the_host() if offloads else None

    def announce(self, scale: LossScale) -> float:
        return self._replicas * super().announce(scale)

    def _gradients_of_the_host(self) -> HostGradients | None:
        return HostGradients(self._zero)

    def _finish(self) -> None:
        if self._host is not None:
            self._host.finish()


class Zero3(Zero2):
    """The same, and the weights are partitioned too."""

    norm_name = "_get_norm_groups"

    def clear(self) -> None:
        # A parameter that the next step does not use would otherwise get the gradient of this one again.
        self._zero.grad_partitions_flat_buffer.zero_()
        if self._offloads:
            self._zero.reset_cpu_buffers()
            for flat in self._zero.fp32_partitioned_groups_flat:
                flat.grad.zero_()

    def _infinite_norm(self) -> Any:
        return [super()._infinite_norm()]  # one for each group of parameters

    def _gradients_of_the_host(self) -> None:
        return None  # DeepSpeed sums them in float32 itself

    def _finish(self) -> None:
        if self._offloads:
            offload_late_gradients(self._zero)


def copies_of(
    parameters: Sequence[Tensor], everyone: dist.ProcessGroup, experts: dist.ProcessGroup | None
) -> list[ReplicatedParameters]:
    """The parameters by the processes that hold the same ones and all update them. experts: those with the same
    experts; None: there are none."""
    groups = [ReplicatedParameters([each for each in parameters if not is_expert_shard(each)], everyone)]
    if experts is not None:
        groups.append(ReplicatedParameters([each for each in parameters if is_expert_shard(each)], experts))
    return groups
