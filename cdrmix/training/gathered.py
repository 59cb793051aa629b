"""Passes of parts of a model under ZeRO-3 that DeepSpeed's trace of a step does not contain, such as rollouts.

DeepSpeed 0.19 records the order in which a step calls modules, and gathers weights before their module is called. The
order has to be the same in all processes. Processes that call the same layers in the same order, and other modules at
any time, therefore need two things: no trace, and weights of the other modules that are whole all the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

OURS = -1  # an owner of gathered weights that is no module: DeepSpeed numbers modules from 0


class Gathering:
    """How the engine of a process gathers weights. zero: a DeepSpeedZeroOptimizer_Stage3; None: all weights are whole,
    and no method does anything. Every process calls each method."""

    def __init__(self, zero: Any | None) -> None:
        self._zero = zero

    @contextmanager
    def of_parts(self, model: nn.Module, whole: Sequence[Any]) -> Iterator[None]:
        """Within it modules of `model` may be called without it: those that own the parameters `whole` at any time, all
        others by all processes in the same order. `whole` stay gathered."""
        if self._zero is None:
            yield
            return
        import deepspeed  # imported after distributed.join has chosen the accelerator

        self.forget_trace()
        with deepspeed.zero.GatheredParameters(whole):
            for parameter in whole:
                parameter.ds_active_sub_modules.add(OURS)
            _gather_when_read(model, True)
            try:
                yield
            finally:
                _gather_when_read(model, False)
                for parameter in whole:
                    parameter.ds_active_sub_modules.discard(OURS)

    def gather_first(self, module: nn.Module, parameters: Iterable[Any]) -> None:
        """From now on the parameters are gathered when `module` is called, and stay whole until its backward pass
        ends."""
        if self._zero is None:
            return
        import deepspeed

        for parameter in parameters:
            deepspeed.zero.register_external_parameter(module, parameter)

    def forget_trace(self) -> None:
        """Until the next forward pass of the whole model weights are gathered when their module is called."""
        if self._zero is None:
            return
        coordinator = self._zero.parameter_offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()


def _gather_when_read(model: nn.Module, yes: bool) -> None:
    """Whether a weight that is read outside of its module is gathered with the module that reads it, as in a forward
    pass of DeepSpeed's engine."""
    for module in model.modules():
        module._parameters._in_forward = yes  # type: ignore[attr-defined]  # a ZeROOrderedDict
