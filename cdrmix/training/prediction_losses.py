"""The losses of the further depths of multi-token prediction in an objective: their weights, measures and means."""

from __future__ import annotations

from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.model.loss import Losses
from cdrmix.model.prediction import Depths
from cdrmix.training.objective import StepTotals


class PredictionLosses:
    """The further depths of a configuration; none without model.prediction. measures: the names of `sums`."""

    def __init__(self, config: Config) -> None:
        self._section = config.model.prediction if isinstance(config.model, Model) else None
        self._steps = config.train.steps
        self._depths = [] if self._section is None else [str(i) for i in range(2, self._section.tokens + 1)]
        self.measures = tuple(f"depth_{depth}_{kind}" for kind in ("nats", "weights") for depth in self._depths)

    def at(self, step: int) -> Depths | None:
        """The depths at a step, counted from 0; None without any."""
        return None if self._section is None else Depths.of(self._section, step, self._steps)

    def sums(self, losses: Losses) -> tuple[Tensor, ...]:
        """The sums of losses and of weights of a micro-batch, a scalar for each of `measures`."""
        return () if losses.prediction_2K is None else losses.prediction_2K.flatten().unbind()

    def means(self, totals: StepTotals) -> dict[str, float]:
        """The loss of each depth that has a weight at a step, in nats a token."""
        nats, weights = ({d: totals.sums[f"depth_{d}_{kind}"] for d in self._depths} for kind in ("nats", "weights"))
        return {depth: nats[depth] / weights[depth] for depth in self._depths if weights[depth]}
