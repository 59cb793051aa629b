"""Everything that stage B trains, in one module: the language model with its adapters, and the heads."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.heads import ControllerHeads, OperationHeads, Summariser
from cdrmix.reason.lockstep import Lockstep
from cdrmix.training.objective import Outcome


class StageBModel(nn.Module):
    """A language model and the heads that read its hidden states; `forward` evaluates a phase's loss on it.

    One module, and therefore one engine, serves every phase: the phase gives the computation of a micro-batch.
    lockstep: of the processes that train it. A phase enters it around forward passes whose number depends on its data.
    """

    lockstep = Lockstep()

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

    def forward(self, loss: Callable[[StageBModel], Outcome]) -> Outcome:
        """The loss of one micro-batch."""
        return loss(self)


Loss = Callable[[StageBModel], Outcome]
