"""What a phase of stage B is, and the plain loop that trains small models by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from cdrmix.config.schema import Train
from cdrmix.config.schema_reasoning import Phase as PhaseSection
from cdrmix.reason.model import Loss, StageBModel
from cdrmix.training.optim import make_optimizer, parameter_groups
from cdrmix.training.schedule import learning_rate


class Phase(Protocol):
    """One kind of training step. Nothing random outlives a step: generators are seeded by (seed, name, step, rank)."""

    @property
    def name(self) -> str:
        """Its key under `reasoning.phases`."""

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of PhaseLoss.sums."""

    def trains(self, parameter: str) -> bool:
        """Whether a parameter, by its name in a StageBModel, is changed by this phase."""

    def losses(self, model: StageBModel, step: int, rank: int, processes: int) -> list[Loss]:
        """The micro-batches of this process's part of step `step`, counted from 0; rolls out first where it has to."""

    def record(self, sums: dict[str, float]) -> dict[str, float]:
        """What is shown of a step (or of several, summed): means and rates."""


def generator_of(seed: int, name: str, step: int, rank: int = 0) -> torch.Generator:
    """A CPU generator for one step of one process: the same in every run."""
    words = torch.tensor([seed, *name.encode(), step, rank], dtype=torch.int64)
    mixed = 0xCBF29CE484222325
    for word in words.tolist():  # FNV-1a, by words
        mixed = ((mixed ^ word) * 0x100000001B3) % 2**64
    return torch.Generator().manual_seed(mixed % 2**63)


def train_section(train: Train, section: PhaseSection) -> Train:
    """What an optimizer and its schedule read, with a phase's own steps and rates in the place of stage A's."""
    own = {"steps", "learning_rate", "warmup_steps", "weight_decay"}
    return train.model_copy(update={name: getattr(section, name) for name in own} | {"ema_decay": None})


def run_phase(
    model: StageBModel, phase: Phase, train: Train, say: Callable[[str], None] | None = None
) -> list[dict[str, float]]:
    """Trains a small model in this process without an engine, by its optimizer, schedule and clipping.

    say: hears of a tenth of the steps. Returns every step's record. What the phase does not train gets no gradient.
    """
    trained = _trained(model, phase)
    optimizer = make_optimizer(parameter_groups(model, train), train)
    records = []
    for step in range(train.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step) * group["multiplier"]
        sums = torch.zeros(len(phase.measures), dtype=torch.float64)
        for loss in phase.losses(model, step, 0, 1):
            outcome = model(loss)
            outcome.total.backward()
            sums += outcome.sums.double().cpu()
        nn.utils.clip_grad_norm_(trained, train.gradient_clip, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        records.append(phase.record(dict(zip(phase.measures, sums.tolist(), strict=True))))
        if say is not None and (step + 1) % max(train.steps // 10, 1) == 0:
            figures = ", ".join(f"{name} {value:.3f}" for name, value in records[-1].items())
            say(f"  {phase.name}, step {step + 1}: {figures}")
    return records


def _trained(model: nn.Module, phase: Phase) -> list[nn.Parameter]:
    trained = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(phase.trains(name))
        if parameter.requires_grad:
            trained.append(parameter)
    assert trained, f"{phase.name} trains no parameter of this model"
    return trained
