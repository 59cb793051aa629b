"""The learning rate as a function of the step: linear warmup, then a decay to a fraction of the peak."""

from __future__ import annotations

import math

from cdrmix.config.schema_optimizer import Schedule
from cdrmix.config.schema_training import Train


def learning_rate(train: Train, step: int, schedule: Schedule | None = None) -> float:
    """The rate of the update that follows `step` finished updates, for parameters whose multiplier is 1.

    schedule: None: train.schedule. The rate is `train.learning_rate` at the last warmup step, and the final share of it
    at the last step of the run, except with a constant schedule. It depends on the step alone, so a resumed run has the
    same rates.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    schedule = train.schedule if schedule is None else schedule
    final = train.final_learning_rate_ratio if schedule.final_ratio is None else schedule.final_ratio
    return train.learning_rate * (final + (1.0 - final) * _height(schedule, train, step))


def group_rates(train: Train, step: int) -> dict[str, float]:
    """The rates of the kinds in `train.groups` that have a schedule of their own."""
    schedules = {name: group.schedule for name, group in train.groups.items()}
    return {name: learning_rate(train, step, each) for name, each in schedules.items() if each is not None}


def _height(schedule: Schedule, train: Train, step: int) -> float:
    """The height of the decay after the warmup: 1 before it, 0 at the last step."""
    if schedule.kind == "constant":
        return 1.0
    begin = train.warmup_steps
    if schedule.kind == "wsd":
        begin = max(begin, train.steps - round(schedule.decay * train.steps))
    if step < begin:
        return 1.0
    progress = min(1.0, (step + 1 - begin) / (train.steps - begin))
    if schedule.kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - (math.sqrt(progress) if schedule.kind == "wsd" and schedule.shape == "sqrt" else progress)
