"""The learning rate as a function of the step: linear warmup, then cosine decay to a fraction of the peak."""

from __future__ import annotations

import math

from cdrmix.config.schema import Train


def learning_rate(train: Train, step: int) -> float:
    """The rate of the update that follows `step` finished updates, for parameters whose multiplier is 1.

    It reaches `train.learning_rate` at the last warmup step and `final_learning_rate_ratio` of it at the last
    step of the run. It depends on the step alone, so a resumed run has the same rates.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    progress = min(1.0, (step + 1 - train.warmup_steps) / (train.steps - train.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    ratio = train.final_learning_rate_ratio
    return train.learning_rate * (ratio + (1.0 - ratio) * cosine)
