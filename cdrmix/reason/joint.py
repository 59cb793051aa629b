"""Phases that add several losses in one step, so that the model does not forget one task while it learns another.

Phase B4 is such a phase. Every other phase can replay stage A's text or the data of earlier phases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.loader import TrainLoader
from cdrmix.model.loss import LossModel
from cdrmix.reason.model import Loss, StageBModel
from cdrmix.reason.phase import Phase
from cdrmix.training.objective import Outcome

TEXT = ("text/loss", "text/tokens")


class JointPhase:
    """A step is one step of each phase and, with a loader, a global batch of stage A's text with its routers' losses.

    own: the phase that determines the trained parameters; its measures keep their names. None in B4, which trains the
    whole model. replay: other phases; their measures are prefixed with the name of the phase. loader: of the text, for
    the rank of this process; its batches continue those of stage A. The losses are added; each is a mean over its
    own tokens.
    """

    def __init__(
        self, config: Config, name: str, own: Phase | None, replay: Sequence[Phase], loader: TrainLoader | None
    ) -> None:
        self.name, self.own, self.replay = name, own, tuple(replay)
        self._loader, self._first = loader, config.train.steps
        self._share = config.train.micro_batch_rows / config.train.batch_rows  # of one micro-batch, over all processes
        phases = [*([] if own is None else [own]), *replay]
        self.rolls_out = any(phase.rolls_out for phase in phases)
        self.passes_vary = any(phase.passes_vary for phase in phases)
        self.measures: tuple[str, ...] = () if own is None else tuple(own.measures)
        self._text = len(self.measures)
        self.measures += TEXT if loader is not None else ()
        self._offsets = []  # of the measures of each replayed phase
        for phase in self.replay:
            self._offsets.append(len(self.measures))
            self.measures += tuple(f"{phase.name}/{measure}" for measure in phase.measures)

    def trains(self, parameter: str) -> bool:
        """As the own phase; without one the whole model."""
        return self.own is None or self.own.trains(parameter)

    def losses(self, model: StageBModel, step: int, rank: int, processes: int) -> list[Loss]:
        """The own phase's micro-batches, the text's, then those of the replayed phases."""
        count = len(self.measures)
        losses: list[Loss] = []
        if self.own is not None:
            losses += [_WithOffset(loss, 0, count) for loss in self.own.losses(model, step, rank, processes)]
        if self._loader is not None:
            batches = self._loader.micro_batches(self._first + step)
            losses += [_WithOffset(_Text(batch, self._share), self._text, count) for batch in batches]
        for phase, offset in zip(self.replay, self._offsets, strict=True):
            losses += [_WithOffset(loss, offset, count) for loss in phase.losses(model, step, rank, processes)]
        return losses

    def record(self, sums: dict[str, float]) -> dict[str, float]:
        """The records of the phases, and the text's loss in nats per token."""
        shown = {} if self.own is None else self.own.record({name: sums[name] for name in self.own.measures})
        if self._loader is not None:
            shown["text_loss"] = sums["text/loss"] / sums["text/tokens"]
        for phase in self.replay:
            measured = {measure: sums[f"{phase.name}/{measure}"] for measure in phase.measures}
            shown |= {f"{phase.name}/{name}": value for name, value in phase.record(measured).items()}
        return shown


def parts_of(phase: Phase) -> list[Phase]:
    """A phase, or the phases that it joins."""
    if not isinstance(phase, JointPhase):
        return [phase]
    return [*([] if phase.own is None else [phase.own]), *phase.replay]


class _Text:
    """Stage A's loss of one micro-batch."""

    def __init__(self, batch: Batch, share: float) -> None:
        self._batch, self._share = batch, share

    def __call__(self, model: StageBModel) -> Outcome:
        batch = self._batch.to(model.language_model.embedding.weight.device)
        losses = LossModel(model.language_model)(
            batch.ids_BT, batch.targets_BT, batch.weights_BT, batch.documents, batch.token_count, self._share
        )
        return Outcome(losses.total, torch.stack([losses.next_token_sum.detach(), batch.weights_BT.sum()]))


class _WithOffset:
    """A loss whose sums start at `offset` among all measures, the others zero."""

    def __init__(self, loss: Loss, offset: int, measures: int) -> None:
        self._loss, self._offset, self._measures = loss, offset, measures

    def __call__(self, model: StageBModel) -> Outcome:
        outcome = self._loss(model)
        sums = outcome.sums.new_zeros(self._measures)
        sums[self._offset : self._offset + len(outcome.sums)] = outcome.sums
        return Outcome(outcome.total, sums)
