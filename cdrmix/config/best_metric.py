"""The held-out figures by which the best checkpoint of a run can be chosen (train.best_metric)."""

from __future__ import annotations

from typing import Literal

TEXT_FIGURES = ("bits_per_byte", "loss")
PAIR_FIGURES = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")  # means over held-out pairs of dpo
RISING = ("accuracy", "margin", "chosen_reward", "rejected_reward")  # figures of which the highest is the best
OF_DOMAIN = "bits_per_byte/"  # the bits per byte of a domain: bits_per_byte/NAME


def metric_and_mode(
    metric: str | None, mode: Literal["min", "max"] | None, *, pairs: bool
) -> tuple[str, Literal["min", "max"]] | None:
    """The figure that chooses the best checkpoint, and whether its lowest or its highest value is the best.

    metric, mode: train.best_metric, train.best_mode. pairs: whether the run trains on preferences. None: no checkpoint
    is the best, which is so for preferences without a metric.
    """
    if metric is None:
        if pairs:
            return None
        metric = "bits_per_byte"
    return metric, mode or ("max" if metric in RISING else "min")
