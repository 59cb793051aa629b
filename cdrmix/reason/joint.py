"""Phase B4: text, writes and memory in one step, so that what one of them learns is not at another's cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cdrmix.config.schema import Config
from cdrmix.data.loader import Batch, TrainLoader
from cdrmix.model.loss import LossModel
from cdrmix.reason.phase import Loss, Phase, PhaseLoss
from cdrmix.reason.stage_b_model import StageBModel

OWN = ("text", "tokens")


class JointPhase:
    """Every step takes one of each inner phase and a global batch of stage A's text: CE + J + the routers' losses.

    The whole model learns. loader: of the text, by this process's rank; its batches go on behind stage A's. Losses are
    added up, each a mean over its own tokens; measures carry their phase's name.
    """

    name = "joint"

    def __init__(self, config: Config, inner: Sequence[Phase], loader: TrainLoader, micro_batches: int) -> None:
        self.inner, self._loader, self._first = tuple(inner), loader, config.train.steps
        self._share = 1.0 / micro_batches  # of one micro-batch, over all processes
        names = [f"{phase.name}/{measure}" for phase in self.inner for measure in phase.measures]
        self.measures: tuple[str, ...] = (*OWN, *names)

    def trains(self, parameter: str) -> bool:
        """The whole model."""
        return True

    def losses(self, model: StageBModel, step: int, rank: int, processes: int) -> list[Loss]:
        """The text's micro-batches, then each inner phase's."""
        batches = self._loader.micro_batches(self._first + step)
        losses: list[Loss] = [_Text(batch, self._share, len(self.measures)) for batch in batches]
        place = len(OWN)
        for phase in self.inner:
            losses += [_Placed(loss, place, len(self.measures)) for loss in phase.losses(model, step, rank, processes)]
            place += len(phase.measures)
        return losses

    def record(self, sums: dict[str, float]) -> dict[str, float]:
        """Nats a token of the text, and what the inner phases show."""
        shown = {"text_loss": sums["text"] / sums["tokens"]}
        for phase in self.inner:
            own = {measure: sums[f"{phase.name}/{measure}"] for measure in phase.measures}
            shown |= {f"{phase.name}/{name}": value for name, value in phase.record(own).items()}
        return shown


class _Text:
    """Stage A's loss of one micro-batch."""

    def __init__(self, batch: Batch, share: float, measures: int) -> None:
        self._batch, self._share, self._measures = batch, share, measures

    def __call__(self, model: StageBModel) -> PhaseLoss:
        batch = self._batch.to(model.language_model.embedding.weight.device)
        losses = LossModel(model.language_model)(
            batch.ids_BT, batch.targets_BT, batch.weights_BT, batch.cu_seqlens_N, batch.token_count, self._share
        )
        sums = torch.zeros(self._measures, device=losses.total.device)
        sums[0], sums[1] = losses.next_token_sum.detach(), batch.weights_BT.sum()
        return PhaseLoss(losses.total, sums)


class _Placed:
    """An inner phase's loss, its sums at their place among all measures."""

    def __init__(self, loss: Loss, place: int, measures: int) -> None:
        self._loss, self._place, self._measures = loss, place, measures

    def __call__(self, model: StageBModel) -> PhaseLoss:
        outcome = self._loss(model)
        sums = outcome.sums.new_zeros(self._measures)
        sums[self._place : self._place + len(outcome.sums)] = outcome.sums
        return PhaseLoss(outcome.total, sums)
