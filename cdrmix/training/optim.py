"""The optimizers and their groups, the loss scale of fp16, and the running average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdrmix.config.schema_optimizer import Optimizer, ParameterGroup
from cdrmix.config.schema_training import Train
from cdrmix.model.layers import ParameterKind, fused_matrices, parameter_kinds
from cdrmix.model.pipeline import is_copy, is_elsewhere
from cdrmix.registry import Registry
from cdrmix.training.muon import OrthogonalizedMomentum

OPTIMIZERS = Registry[Callable[[list[dict[str, Any]], Train], torch.optim.Optimizer]]("optimizer")

# Weight decay shrinks what multiplies activations; norms, biases, mixing vectors and embeddings are left alone.
DECAYED: tuple[ParameterKind, ...] = ("projection", "expert")
# The name under which train.groups may name several kinds.
COARSE_KINDS: dict[ParameterKind, str] = {
    "projection": "matrix",
    "expert": "matrix",
    "low_rank": "vector",
    "router": "vector",
    "convolution": "vector",
}


def parameter_groups(model: nn.Module, train: Train) -> list[dict[str, Any]]:
    """The optimizer's groups: every trainable parameter once, by weight decay, multiplier, schedule and update; in a
    stage of a pipeline those that it has.

    The order is that of first appearance in the model, so it is the same in every process and every run. The experts
    of a process under expert parallelism have groups of their own, marked as DeepSpeed's ZeRO looks for them. A group
    has the keys params, weight_decay, multiplier (of the learning rate), schedule (the name in `train.groups` whose
    schedule it has; None: train.schedule), and for Muon `matrices`: for each parameter the maps that it holds.
    """
    groups: dict[tuple[float, float, str, str | None, bool], dict[str, Any]] = {}
    kinds, fused = parameter_kinds(model), fused_matrices(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or is_elsewhere(parameter) or is_copy(parameter):
            continue
        kind = kinds[name]
        key = next((key for key in (kind, COARSE_KINDS.get(kind)) if key in train.groups), None)
        own = ParameterGroup() if key is None else train.groups[key]
        decay = own.weight_decay if own.weight_decay is not None else train.weight_decay if kind in DECAYED else 0.0
        multiplier = own.rate * (train.decay_bias_multiplier if kind == "decay_bias" else 1.0)
        schedule = None if own.schedule is None else key
        expert_group: str = getattr(parameter, "group_name", "")  # expert_parallel.expert_layer sets it
        orthogonal = is_orthogonalized(kind, train.optimizer)
        settings = (decay, multiplier, expert_group, schedule, orthogonal)
        if settings not in groups:
            marks = {"moe": True, "name": expert_group} if expert_group else {}
            empty: dict[str, Any] = {"params": [], "weight_decay": decay, "multiplier": multiplier}
            groups[settings] = empty | {"schedule": schedule} | marks | ({"matrices": []} if orthogonal else {})
        groups[settings]["params"].append(parameter)
        if orthogonal:
            groups[settings]["matrices"].append(fused.get(name))
    return list(groups.values())


def is_orthogonalized(kind: ParameterKind, optimizer: Optimizer) -> bool:
    """Whether Muon updates the parameters of a kind: projections, and experts by `train.optimizer.experts`."""
    return optimizer.kind == "muon" and (kind == "projection" or (kind == "expert" and optimizer.experts))


def make_optimizer(groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    """The optimizer `train.optimizer` over the groups of `parameter_groups`. Its state must consist of tensors."""
    return OPTIMIZERS[train.optimizer.kind](groups, train)


@OPTIMIZERS("muon")
def muon(groups: list[dict[str, Any]], train: Train) -> OrthogonalizedMomentum:
    """Muon over the groups with `matrices`, AdamW over the others."""
    return OrthogonalizedMomentum(
        groups, train.optimizer, lambda rest: adamw(rest, train), learning_rate=train.learning_rate
    )


@OPTIMIZERS("adamw")
def adamw(groups: list[dict[str, Any]], train: Train) -> torch.optim.AdamW:
    """AdamW over the groups. Fused: one pass over memory, element by element, so also deterministic."""
    return torch.optim.AdamW(
        groups,
        lr=train.learning_rate,
        betas=train.betas,
        eps=train.epsilon,
        weight_decay=train.weight_decay,
        fused=True,
    )


class LossScale:
    """Dynamic loss scaling of fp16: halves on overflow, doubles after `interval` steps without one.

    For bf16 and fp32 `enabled` is false and the scale stays 1.
    """

    def __init__(self, enabled: bool, *, initial: float = 2.0**16, interval: int = 1000) -> None:
        self.enabled = enabled
        self.value = initial if enabled else 1.0
        self.interval = interval
        self.steps_since_overflow = 0

    def update(self, applied: bool) -> None:
        """Takes note of whether the step was applied (no overflow)."""
        if not self.enabled:
            return
        if not applied:
            self.value = max(self.value / 2.0, 1.0)
            self.steps_since_overflow = 0
            return
        self.steps_since_overflow += 1
        if self.steps_since_overflow == self.interval:
            self.value *= 2.0
            self.steps_since_overflow = 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"value": self.value, "steps_since_overflow": self.steps_since_overflow}

    def load(self, state: dict[str, float]) -> None:
        """Continues from a checkpoint's state."""
        if self.enabled and math.isfinite(state["value"]):
            self.value = float(state["value"])
            self.steps_since_overflow = int(state["steps_since_overflow"])


class WeightAverage:
    """Exponential moving average of fp32 weights: average += (1 - decay) * (weight - average), element by element.

    Each process averages the part of the weights it holds, so nothing is communicated.
    """

    def __init__(self, weights: Sequence[Tensor], decay: float) -> None:
        self.decay = decay
        self.tensors = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def update(self, weights: Sequence[Tensor]) -> None:
        """Takes in the weights after a step; the same tensors, in the same order, as at the start."""
        torch._foreach_lerp_(self.tensors, list(weights), 1.0 - self.decay)
