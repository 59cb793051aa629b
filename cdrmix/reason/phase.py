"""What a phase of stage B is, and the plain loop that trains small models by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cdrmix.reason.stage_b_model import StageBModel


class PhaseLoss(NamedTuple):
    """What one micro-batch gives: its part of the step's loss, and float32 [K] sums of what the phase measures.

    Both are summed over a step's micro-batches and processes.
    """

    total: Tensor
    sums: Tensor


Loss = Callable[[StageBModel], PhaseLoss]


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


def run_phase(
    model: StageBModel,
    phase: Phase,
    *,
    steps: int,
    learning_rate: float,
    warmup_steps: int = 10,
    weight_decay: float = 0.0,
    gradient_clip: float = 1.0,
    say: Callable[[int, dict[str, float]], None] | None = None,
) -> dict[str, float]:
    """Trains a small model in this process by plain PyTorch: AdamW, cosine to a tenth, norm clipping.

    say: hears a step's record. Returns the last step's. Parameters that the phase does not train get no gradient.
    """
    trained = _trained(model, phase)
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)
    record: dict[str, float] = {}
    for step in range(steps):
        share = min(1.0, (step + 1) / max(warmup_steps, 1))
        rate = learning_rate * share * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        sums = torch.zeros(len(phase.measures), dtype=torch.float64)
        for loss in phase.losses(model, step, 0, 1):
            outcome = model(loss)
            outcome.total.backward()
            sums += outcome.sums.double().cpu()
        nn.utils.clip_grad_norm_(trained, gradient_clip, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        record = phase.record(dict(zip(phase.measures, sums.tolist(), strict=True)))
        if say is not None:
            say(step, record)
    return record


def _trained(model: nn.Module, phase: Phase) -> list[nn.Parameter]:
    trained = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(phase.trains(name))
        if parameter.requires_grad:
            trained.append(parameter)
    assert trained, f"{phase.name} trains no parameter of this model"
    return trained
