"""AdamW with its decay groups, the loss scale of fp16, and the running average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdrmix.config.schema import Train
from cdrmix.model.layers import ParameterKind, parameter_kinds
from cdrmix.registry import Registry

OPTIMIZERS = Registry[Callable[[list[dict[str, Any]], Train], torch.optim.Optimizer]]("optimizer")

# Weight decay shrinks what multiplies activations; norms, biases, mixing vectors and embeddings are left alone.
DECAYED: dict[ParameterKind, bool] = {"matrix": True, "embedding": False, "vector": False, "decay_bias": False}


def parameter_groups(model: nn.Module, train: Train) -> list[dict[str, Any]]:
    """AdamW's groups: every trainable parameter once, by (weight decay, learning-rate multiplier).

    The order is that of first appearance in the model, so it is the same in every process and every run. The experts
    of a process under expert parallelism have groups of their own, marked as DeepSpeed's ZeRO looks for them.
    """
    groups: dict[tuple[float, float, str], list[nn.Parameter]] = {}
    kinds = parameter_kinds(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            what = kinds[name]
            expert_group: str = getattr(parameter, "group_name", "")  # expert_parallel.expert_layer sets it
            multiplier = train.decay_bias_multiplier if what == "decay_bias" else 1.0
            key = (train.weight_decay if DECAYED[what] else 0.0, multiplier, expert_group)
            groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "multiplier": multiplier}
        | ({"moe": True, "name": expert_group} if expert_group else {})
        for (decay, multiplier, expert_group), parameters in groups.items()
    ]


def make_optimizer(groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    """The optimizer `train.optimizer` over the groups of `parameter_groups`. Its state must consist of tensors."""
    return OPTIMIZERS[train.optimizer](groups, train)


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
