"""What a phase of stage B is, and how the trainer trains by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import nn

from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import EpisodesOfTask, Reasoning
from cdrmix.config.schema_reasoning import Phase as PhaseSection
from cdrmix.errors import ConfigError
from cdrmix.reason.episodes import EpisodeSource
from cdrmix.reason.lockstep import Lockstep
from cdrmix.reason.model import Loss, StageBModel
from cdrmix.records import PhaseRecord
from cdrmix.registry import Registry
from cdrmix.training.distributed import DistributedContext
from cdrmix.training.engine import Engine
from cdrmix.training.objective import Outcome, StepFacts, StepTotals


class Phase(Protocol):
    """One kind of training step. Generators are seeded by (seed, name, step, rank), so no random state is kept."""

    @property
    def name(self) -> str:
        """Its key under `reasoning.phases`."""

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of Outcome.sums."""

    @property
    def rolls_out(self) -> bool:
        """Whether `losses` runs the model, within `model.lockstep`."""

    @property
    def passes_vary(self) -> bool:
        """Whether a loss makes a number of passes of the language model that depends on its data; otherwise one."""

    def trains(self, parameter: str) -> bool:
        """Whether this phase changes a parameter, named as in a StageBModel."""

    def losses(self, model: StageBModel, step: int, rank: int, processes: int) -> list[Loss]:
        """The micro-batches of this process's part of step `step`, counted from 0, at least one; rolls out first where
        it has to. Other processes may have another number."""

    def record(self, sums: dict[str, float]) -> dict[str, float]:
        """The means and rates that are logged, from the sums of one or several steps."""


Sources = Callable[[EpisodesOfTask], EpisodeSource]

PHASES: Registry[Callable[[Config, Sources], Phase]] = Registry("phase of stage B")
"""Makes a phase, by its key under `reasoning.phases`, from the configuration and from what makes episodes of a task."""


def reasoning_of(config: Config) -> Reasoning:
    """The section that every configuration with stage B has."""
    assert config.reasoning is not None
    return config.reasoning


def generator_of(seed: int, name: str, step: int, rank: int = 0) -> torch.Generator:
    """A CPU generator for one step of one process: the same in every run."""
    values = torch.tensor([seed, *name.encode(), step, rank], dtype=torch.int64)
    mixed = 0xCBF29CE484222325
    for value in values.tolist():  # FNV-1a over 64-bit values instead of bytes
        mixed = ((mixed ^ value) * 0x100000001B3) % 2**64
    return torch.Generator().manual_seed(mixed % 2**63)


def phase_config(config: Config, section: PhaseSection | None = None) -> Config:
    """The configuration that a phase's engine reads: with a section its steps and rates; weights are not averaged."""
    # A phase makes its own micro-batches; DeepSpeed needs numbers that are consistent.
    rows = max(1, config.train.batch_rows // config.train.micro_batch_rows)
    changes: dict[str, object] = {"ema_decay": None, "batch_rows": rows, "micro_batch_rows": 1, "batch_warmup": None}
    if section is not None:
        own = ("steps", "learning_rate", "warmup_steps", "weight_decay")
        changes |= {name: getattr(section, name) for name in own}
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


class PhaseObjective:
    """A phase as the trainer's objective.

    needs_others: whether a forward pass of the model needs all processes (`lockstep.py`). copy: a model of the same
    structure, whole in every process, that makes the rollouts in place of the trained one; each of its passes gathers
    nothing.
    """

    balances_routers = False

    def __init__(
        self,
        phase: Phase,
        model: StageBModel,
        world: DistributedContext,
        *,
        needs_others: bool = False,
        copy: StageBModel | None = None,
    ) -> None:
        self._phase, self._model, self._world, self._copy = phase, model, world, copy
        self._lockstep = Lockstep(world if needs_others and world.size > 1 else None)
        if copy is None:
            model.lockstep = self._lockstep
        self._varies = phase.passes_vary and world.size > 1
        self._gathers = False  # whether `engine` has been told what a loss whose passes vary needs
        self.phase: str | None = phase.name
        self.measures = phase.measures

    def micro_batches(self, engine: Engine, step: int) -> Sequence[Loss]:
        """Rolls out if the phase does, and gives the same number of micro-batches in every process."""
        model = self._model if self._copy is None else self._copy
        if self._copy is not None:
            engine.copy_weights(self._copy)
        model.eval()  # rollouts without dropped tokens and router jitter
        calls_parts = self._phase.rolls_out and self._copy is None
        gathering = engine.gathering.of_parts(model, outside_blocks(model)) if calls_parts else nullcontext()
        with engine.module.precision(whole=self._copy is not None), gathering, torch.no_grad():
            losses = self._phase.losses(model, step, self._world.rank, self._world.size)
        model.train()
        if self._copy is not None:  # buffers that the phase sets
            for buffer, changed in zip(self._model.buffers(), model.buffers(), strict=True):
                buffer.copy_(changed)
        return _padded(losses, self._world, self._no_passes if self._varies else None)

    def forward(self, engine: Engine, micro_batch: Loss, *, last: bool) -> Outcome:
        """The phase's loss on the engine's model."""
        if self._varies and not self._gathers:
            engine.gathering.gather_first(self._model, _perhaps_unused(self._model))
            self._gathers = True
        loss = self._together(engine, micro_batch) if self._varies else micro_batch
        outcome: Outcome = engine.evaluate(loss, last=last)
        return outcome

    def _together(self, engine: Engine, micro_batch: Loss) -> Loss:
        """The loss with a gradient of every trained parameter. Where passes need the other processes, it makes as many
        of them as the process that makes most.

        ZeRO fills its messages with gradients in the order in which they are there, and this order has to be the same
        in all processes. That of the blocks is. The gradients of what a pass need not reach are last, in the order of
        the model, because autograd goes back to what was computed first at the end.
        """

        def loss(model: StageBModel) -> Outcome:
            engine.gathering.forget_trace()
            nothing = sum(0.0 * each.float().sum() for each in _perhaps_unused(model) if each.requires_grad)
            with self._lockstep(model.language_model, least=1) as further:
                outcome = micro_batch(model)
            return outcome._replace(total=outcome.total + nothing + sum(0.0 * each.float().sum() for each in further))

        return loss

    def _no_passes(self, model: StageBModel) -> Outcome:
        """A loss without passes of its own, to which `_together` adds those that other processes make."""
        device = next(model.parameters()).device
        return Outcome(torch.zeros((), device=device), torch.zeros(len(self.measures), device=device))

    def update(self, engine: Engine, totals: StepTotals) -> None:
        """Does nothing: a phase trains by gradients alone."""

    def tokens(self, totals: StepTotals) -> int:
        """0: the run counts the tokens of stage A."""
        return 0

    def loss(self, totals: StepTotals) -> float:
        """The optimised loss."""
        return totals.loss

    def record(self, facts: StepFacts, totals: StepTotals) -> PhaseRecord:
        """The step with what the phase shows of it."""
        return PhaseRecord(
            step=facts.step,
            phase=self._phase.name,
            phase_step=facts.objective_step,
            loss=totals.loss,
            learning_rate=facts.learning_rate,
            gradient_norm=facts.gradient_norm,
            seconds=facts.seconds,
            memory_gib=facts.memory_gib,
            measures=self._phase.record(totals.sums),
        )


def _padded(losses: list[Loss], world: DistributedContext, further: Loss | None) -> list[Loss]:
    """As many micro-batches in every process, because gradients are reduced together: with `further` ones, by default
    the last one of the process times 0."""
    assert losses, "a phase gives every process at least one micro-batch"
    missing, last = max(world.gather(len(losses), "the number of micro-batches")) - len(losses), losses[-1]
    if further is not None:
        return losses + [further] * missing

    def nothing(model: StageBModel) -> Outcome:
        outcome = last(model)
        return Outcome(0.0 * outcome.total, torch.zeros_like(outcome.sums))

    return losses + [nothing] * missing


def outside_blocks(model: StageBModel) -> list[nn.Parameter]:
    """The parameters of the tables, the norms and the heads: of modules that a phase calls by themselves."""
    return [each for name, each in model.named_parameters() if not name.startswith("language_model.blocks.")]


def _perhaps_unused(model: StageBModel) -> list[nn.Parameter]:
    """The parameters without a gradient in some passes of the language model: those outside of the blocks, and the
    rates of fast weights, whose updates take effect in the next chunk."""
    return [
        each
        for name, each in model.named_parameters()
        if not name.startswith("language_model.blocks.") or (".plastic." in name and name.endswith(".rate"))
    ]


def freeze(model: nn.Module, phase: Phase) -> None:
    """Sets requires_grad for the parameters that the phase trains, and clears it for all others.

    Raises ConfigError if there are none.
    """
    trained = False
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(phase.trains(name))
        trained |= parameter.requires_grad
    if not trained:
        raise ConfigError(
            f"reasoning.phases.{phase.name} trains no parameter of this model; name projections in"
            " reasoning.plastic_lora that its layers have"
        )
