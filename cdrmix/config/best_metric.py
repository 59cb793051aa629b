"""The held-out figures by which the best checkpoint of a run can be chosen (train.best_metric)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from cdrmix.config.rule import Rule, Violation
from cdrmix.registry import nearest

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


def _best_metric(metric: str | None, dpo: object, domains: Mapping[str, object] | None) -> Violation | None:
    if metric is None:
        return None
    names = [*PAIR_FIGURES] if dpo is not None else [*TEXT_FIGURES]
    if dpo is None and domains is not None and len(domains) > 1:
        names += [f"{OF_DOMAIN}{name}" for name in domains]
    if metric in names:
        return None
    held_out = "the held-out pairs (train.dpo) have" if dpo is not None else "the validations measure"
    needs_domains = metric.startswith(OF_DOMAIN) and dpo is None and len(domains or {}) < 2
    why = "; the bits per byte of a domain need several domains in data.domains" if needs_domains else ""
    return Violation((), f"a figure that {held_out}: {', '.join(names)}{why}", nearest(metric, names))


def _best_mode(mode: str | None, metric: str | None, dpo: object) -> str | None:
    refused = mode is not None and metric is None and dpo is not None
    return "null, or with train.best_metric, which says what min or max is of" if refused else None


RULES = (
    Rule(("train.best_metric", "train.dpo", "data.domains"), _best_metric),
    Rule(("train.best_mode", "train.best_metric", "train.dpo"), _best_mode),
)
