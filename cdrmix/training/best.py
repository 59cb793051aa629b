"""The best checkpoint of a run: the step with the best recorded held-out figure (train.best_metric, best_mode)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from cdrmix.config.best_metric import OF_DOMAIN, metric_and_mode
from cdrmix.config.schema_training import Train
from cdrmix.errors import ConfigError
from cdrmix.records import StepRecord
from cdrmix.training.checkpoint import Progress


def updated_best(progress: Progress, settings: Train, record: StepRecord) -> Progress:
    """The progress after a validation: its step is the best if its figure is better than all before it.

    A figure that is not finite never makes a step the best. Of equal figures the first step is the best.
    """
    chosen = metric_and_mode(settings.best_metric, settings.best_mode, pairs=settings.dpo is not None)
    if chosen is None:
        return progress
    metric, mode = chosen
    value, best = record.held_out_figure(metric), progress.best_value
    if value is None:
        return progress
    if best is None or (value > best if mode == "max" else value < best):
        return dataclasses.replace(progress, best_value=value, best_step=progress.step)
    return progress


def check_best_metric(settings: Train, domains: Iterable[str]) -> None:
    """Raises ConfigError if train.best_metric is of a domain without rows in the validations.

    domains: those with rows among the `train.evaluate_rows` held-out rows; none, if the text has one domain.
    """
    metric, domains = settings.best_metric or "", list(domains)
    if metric.startswith(OF_DOMAIN) and metric.removeprefix(OF_DOMAIN) not in domains:
        raise ConfigError(
            f"train.best_metric: {metric}: none of the {settings.evaluate_rows} held-out rows of a validation "
            f"(train.evaluate_rows) is of that domain; the validations measure {', '.join(domains) or 'no domain'}: "
            "raise train.evaluate_rows or data.valid_fraction, or choose another figure"
        )
