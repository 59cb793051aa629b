"""Everything that stage B trains, in one module: the language model with its adapters, and the heads beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.heads import ControllerHeads, OperationHeads, Summariser


class PhaseLoss(NamedTuple):
    """What one micro-batch gives: its part of the step's loss, and float32 [K] sums of what the phase measures.

    Both are summed over a step's micro-batches and processes.
    """

    total: Tensor
    sums: Tensor


class StageBModel(nn.Module):
    """A language model and what reads its hidden states; `forward` evaluates a phase's loss on it.

    So that one module, and with it one engine, serves every phase: what a micro-batch computes is the phase's matter.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        controller: ControllerHeads | None = None,
        operations: OperationHeads | None = None,
        summary: Summariser | None = None,
    ) -> None:
        super().__init__()
        self.language_model = language_model
        self.controller = controller
        self.operations = operations
        self.summary = summary

    def forward(self, loss: Callable[[StageBModel], PhaseLoss]) -> PhaseLoss:
        """The loss of one micro-batch."""
        return loss(self)


Loss = Callable[[StageBModel], PhaseLoss]
