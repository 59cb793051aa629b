"""Stage A with several parts of the loss: next token, fill in the middle and chains of thought in one forward pass."""

from __future__ import annotations

import dataclasses

import torch

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch, PartCount
from cdrmix.data.loader import TrainLoader
from cdrmix.data.objectives import PARTS
from cdrmix.records import StepRecord
from cdrmix.training.distributed import DistributedContext
from cdrmix.training.engine import Engine
from cdrmix.training.objective import Outcome, StepFacts, StepTotals
from cdrmix.training.prediction_losses import PredictionLosses
from cdrmix.training.row_objective import RowObjective


class PartedPretraining(RowObjective):
    """The weighted parts of the loss as the trainer's objective.

    The tokens of each part are one set of weights over the same hidden states, so that all parts cost one forward pass
    and their losses are known apart.
    """

    measures: tuple[str, ...] = (*PARTS, "load_balance", "z_loss")

    def __init__(self, config: Config, loader: TrainLoader, world: DistributedContext) -> None:
        super().__init__(config, loader, world)
        assert loader.weighting is not None
        self._prediction = PredictionLosses(config)
        self.measures += self._prediction.measures
        self._parts: tuple[PartCount, ...] = ()  # of the global batch at hand

    def micro_batches(self, engine: Engine, step: int) -> list[Batch]:
        """This process's micro-batches of global batch `step`."""
        batches = super().micro_batches(engine, step)
        self._parts = batches[0].parts
        return batches

    def forward(self, engine: Engine, micro_batch: Batch, *, last: bool) -> Outcome:
        """One forward pass. The measures of the parts are the sums of their losses, in nats, with their weights."""
        batch = engine.placed(micro_batch)
        # of a batch without any part one set, of weights that are all 0
        weights_PBT = batch.part_weights([part.number for part in batch.parts] or [0])
        arguments = batch.ids_BT, batch.targets_BT, weights_PBT, batch.documents, batch.token_count
        prediction = self._prediction.at(micro_batch.step)
        losses = engine.evaluate(*arguments, engine.share, prediction, True, last=last)
        nats_P = losses.next_token_sum.detach().float()
        sums = dict.fromkeys(self.measures, nats_P.new_zeros(()))
        sums |= {part.name: nats for part, nats in zip(batch.parts, nats_P, strict=False)}
        sums |= {"load_balance": losses.load_balance, "z_loss": losses.z_loss}
        sums |= dict(zip(self._prediction.measures, self._prediction.sums(losses), strict=True))
        return Outcome(
            losses.total, torch.stack([each.detach().float() for each in sums.values()]), losses.router, losses.depth
        )

    def loss(self, totals: StepTotals) -> float:
        """Nats a token over all parts, each token counted alike."""
        tokens = sum(part.tokens for part in self._parts)
        nats = sum(totals.sums[part.name] / part.factor for part in self._parts)
        return nats / tokens if tokens else 0.0

    def record(self, facts: StepFacts, totals: StepTotals) -> StepRecord:
        """The step with the loss of each part, in nats a token."""
        means = {part.name: totals.sums[part.name] / part.factor / part.tokens for part in self._parts}
        further = self._prediction.means(totals)
        return dataclasses.replace(super().record(facts, totals), parts=means, prediction_losses=further)
