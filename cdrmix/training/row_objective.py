"""What the objectives of stage A share: batches of packed rows, the routers' biases, and the record of a step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.data.batch import Batch
from cdrmix.data.loader import Prefetcher, TrainLoader
from cdrmix.model.depth import move_biases
from cdrmix.model.feed_forward.router import balance_routers
from cdrmix.records import StepRecord
from cdrmix.training.distributed import DistributedContext
from cdrmix.training.engine import Engine
from cdrmix.training.objective import Outcome, StepFacts, StepTotals


class RowObjective(ABC):
    """An objective of the trainer on packed rows. A context manager.

    Batches are made one step ahead, in a thread. `measures` must have load_balance and z_loss, the routers' losses.
    """

    phase: str | None = None
    measures: tuple[str, ...]

    def __init__(self, config: Config, loader: TrainLoader, world: DistributedContext) -> None:
        self._config, self._loader = config, loader
        self._batches = Prefetcher(loader, config.train.steps, world.device)
        routes = isinstance(config.model, Model) and bool(config.model.routers)
        self._bias_rate = config.cdrmix_model.feed_forward.bias_update_rate if routes else 0.0
        self.balances_routers = self._bias_rate > 0
        self._depth = config.model.depth if isinstance(config.model, Model) else None
        self._skipping = config.model.skipping if isinstance(config.model, Model) else ()
        # A run that starts from other weights has their biases.
        share = 0.0 if self._depth is None or config.train.start_from is not None else self._depth.release
        self._release_steps = math.ceil(share * config.train.steps)
        self._step = 0  # at hand
        self._token_count = 0.0  # of the global batch at hand
        self._share = 0.0  # of one micro-batch in it

    def __enter__(self) -> Self:
        self._batches.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._batches.__exit__(kind, error, traceback)

    def micro_batches(self, engine: Engine, step: int) -> list[Batch]:
        """This process's micro-batches of global batch `step`."""
        batches, self._step = self._batches.micro_batches(step), step
        engine.set_micro_batches(len(batches))
        self._token_count, self._share = batches[0].token_count, engine.share
        return batches

    def pass_over(self, rows: int) -> None:
        """So many rows, before those of any further step, are not trained on."""
        self._batches.pass_over(rows)

    @abstractmethod
    def forward(self, engine: Engine, micro_batch: Batch, *, last: bool) -> Outcome:
        """As of Objective."""

    def update(self, engine: Engine, totals: StepTotals) -> None:
        """Moves the routers' biases towards even loads, and those of the depth towards the capacity."""
        if self.balances_routers:
            balance_routers(engine.module, totals.routing.tokens_per_expert_LE, self._bias_rate)
        if self._depth is not None:
            released = min(1.0, (self._step + 1) / max(self._release_steps, 1))
            move_biases(engine.module, totals.depth.threshold_G, totals.depth.lowest_G, released, self._depth.rate)

    def tokens(self, totals: StepTotals) -> int:
        """The loss weights of the global batch, summed: tokens with a target, of conversations those of the answers."""
        return round(self._token_count)

    @abstractmethod
    def loss(self, totals: StepTotals) -> float:
        """As of Objective."""

    def record(self, facts: StepFacts, totals: StepTotals) -> StepRecord:
        """The step with its losses and the loads of the experts."""
        return StepRecord(
            step=facts.step,
            epoch=self._loader.epoch(facts.step),
            loss=totals.loss,
            next_token_loss=self.loss(totals),
            load_balance=totals.sums["load_balance"] * self._share,
            z_loss=totals.sums["z_loss"] * self._share,
            learning_rate=facts.learning_rate,
            gradient_norm=facts.gradient_norm,
            tokens=facts.tokens,
            tokens_per_second=facts.tokens_per_second,
            seconds=facts.seconds,
            memory_gib=facts.memory_gib,
            **totals.routing.measures(self._config.model),
            depth=dict(zip(self._skipping, totals.depth.share_G.tolist(), strict=True)),
        )
