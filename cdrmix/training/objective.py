"""What the trainer optimises: the interface of stage A, of every phase of stage B and of the experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cdrmix.model.depth import DepthStats
from cdrmix.model.language_model import RouterStats
from cdrmix.records import Record
from cdrmix.training.distributed import DistributedContext
from cdrmix.training.engine import Engine
from cdrmix.training.metrics import DepthTotals, RoutingCounts


class Outcome(NamedTuple):
    """What one micro-batch gives. `total` and `sums` are added up over a step's micro-batches and processes.

    total: its part of the step's loss, a scalar with a gradient. sums: float32 [K], one for each of the objective's
    `measures`. router: statistics of the mixture of experts; None without one. depth: of the branches that skip tokens.
    """

    total: Tensor
    sums: Tensor
    router: RouterStats | None = None
    depth: DepthStats | None = None


class StepTotals(NamedTuple):
    """One step over the global batch; the same in every process.

    loss: what was optimised. sums: by the objective's measures. gradient_norm: before clipping; None where DeepSpeed
    finds it. stop: whether a process was told to stop. saved: whether a checkpoint that was being written is committed.
    routing: loads of the experts; of no layers where not counted. depth: of the branches that skip tokens.
    """

    loss: float
    sums: dict[str, float]
    gradient_norm: float | None
    stop: bool
    saved: bool
    routing: RoutingCounts
    depth: DepthTotals


@dataclass(frozen=True)
class StepFacts:
    """What the trainer knows of a step that is recorded. `step` counts over the run, `objective_step` from 1.

    tokens, seconds: trained on since the run began; tokens_per_second: since the record before.
    """

    step: int
    objective_step: int
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_second: float
    seconds: float
    memory_gib: float


class Objective(Protocol):
    """Micro-batches of losses, and what is reported of them. Nothing random outlives a step."""

    phase: str | None
    """The phase of stage B; None for stage A."""
    measures: tuple[str, ...]
    """The names of `Outcome.sums`."""
    balances_routers: bool
    """Whether `update` needs the loads of the experts."""

    def micro_batches(self, engine: Engine, step: int) -> Sequence[Any]:
        """This process's micro-batches of step `step`, counted from 0: as many in every process, at least one."""

    def forward(self, engine: Engine, micro_batch: Any, *, last: bool) -> Outcome:
        """The forward pass and the loss of one of them. last: the step ends with it."""

    def update(self, engine: Engine, totals: StepTotals) -> None:
        """Changes what no gradient changes, after an optimizer step that was applied."""

    def tokens(self, totals: StepTotals) -> int:
        """The tokens of the step that count as trained on."""

    def loss(self, totals: StepTotals) -> float:
        """The loss that the run reports as its last."""

    def record(self, facts: StepFacts, totals: StepTotals) -> Record:
        """What is written of a step."""


class StepAccumulator:
    """Sums the outcomes of a step's micro-batches over all processes, in one all-reduce and one read of the device.

    counts_routing: the experts' loads too. They are results of the forward pass, so activation checkpointing, which
    runs it twice, counts them once.
    """

    def __init__(self, world: DistributedContext, measures: tuple[str, ...], *, counts_routing: bool) -> None:
        self._world, self._measures = world, measures
        self._counts_routing = counts_routing
        # loss, stop, saved, measures
        self._sums = torch.zeros(3 + len(measures), dtype=torch.float64, device=world.device)
        self._counts_2LE: Tensor | None = None  # tokens that wanted an expert, tokens it computed
        self._depth_5G = self._sums.new_zeros(5, 0)  # the fields of DepthStats, and the number of micro-batches

    def add(self, outcome: Outcome) -> None:
        """Takes in a micro-batch."""
        self._sums[0] += outcome.total.detach().double()
        self._sums[3:] += outcome.sums.detach().double()
        if self._counts_routing and outcome.router is not None:
            counts_2LE = torch.stack([outcome.router.tokens_per_expert_LE, outcome.router.counts_LE]).double()
            self._counts_2LE = counts_2LE if self._counts_2LE is None else self._counts_2LE + counts_2LE
        if outcome.depth is not None:
            fields = [field.double() for field in outcome.depth]
            depth_5G = torch.stack([*fields, torch.ones_like(fields[0])])
            self._depth_5G = depth_5G if not self._depth_5G.numel() else self._depth_5G + depth_5G

    def total(self, stop: bool, saved: bool, gradient_norm: Tensor | None) -> StepTotals:
        """The global batch's sums. Waits for the device: the step's only wait.

        stop: this process was told to stop. saved: it knows that the checkpoint that was being written is committed.
        gradient_norm: a scalar on the device, the same in every process.
        """
        self._sums[1], self._sums[2] = float(stop), float(saved)
        counts = self._sums.new_zeros(2, 0, 0) if self._counts_2LE is None else self._counts_2LE
        parts = [self._world.total_of_rows(torch.cat([self._sums, counts.flatten(), self._depth_5G.flatten()]))]
        if gradient_norm is not None:
            parts.append(gradient_norm.double().reshape(1))
        read = torch.cat(parts).cpu()
        end = len(self._sums)
        routed, skipping, _ = read[end:].split([counts.numel(), self._depth_5G.numel(), gradient_norm is not None])
        routing = RoutingCounts(*routed.view(counts.shape))
        depth = DepthTotals.of(skipping.view(self._depth_5G.shape))
        loss, stops, saves, *sums = read[:end].tolist()
        norm = None if gradient_norm is None else read[-1:].tolist()[0]
        return StepTotals(
            loss, dict(zip(self._measures, sums, strict=True)), norm, stops > 0, saves > 0, routing, depth
        )
