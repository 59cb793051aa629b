"""Conflicts of the optimizer, the learning-rate schedules, the groups of parameters, and the average of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from cdrmix.config.conflicts.conflict import Conflict, unknown_name
from cdrmix.config.schema_optimizer import GroupName, Optimizer, Schedule
from cdrmix.config.schema_run import Sections
from cdrmix.registry import nearest

OF_WSD = ("decay", "shape")


def conflicts(config: Sections) -> Iterator[Conflict]:
    yield from _optimizer(config)
    yield from _schedule("train.schedule", (), config.train.schedule, config)
    yield from _groups(config)
    yield from _average(config)


def _only_of(
    owner: str, key: str, section: Optimizer | Schedule, name: str, prefix: tuple[str, ...]
) -> Iterator[Conflict]:
    """Of a key that another kind of a section has, and that is not at its default."""
    neutral = type(section).model_fields[name].default
    if section.kind != owner and getattr(section, name) != neutral:
        allowed = f"{str(neutral).lower()}, for kind={section.kind}; it is a key of {owner}"
        yield Conflict(key, allowed, (*prefix, name))


def _optimizer(config: Sections) -> Iterator[Conflict]:
    train, key = config.train, "train.optimizer.kind"
    if unknown := unknown_name(key, "optimizer", train.optimizer.kind):
        yield unknown
    for name in Optimizer.model_fields:
        if name != "kind":
            yield from _only_of("muon", "train.optimizer", train.optimizer, name, ())
    if train.optimizer.kind != "muon":
        return
    if config.model.kind != "cdrmix":
        allowed = f"adamw for model.kind={config.model.kind}: which of its matrices hold several maps is not known"
        yield Conflict(key, allowed)
    elif train.weights != "fp32" or train.offload != "none":
        yield Conflict(key, "adamw with train.weights: bf16 or train.offload, whose partitions divide matrices")
    if train.zero_stage in (2, 3):
        allowed = "auto, 0 or 1 with train.optimizer.kind=muon: stages 2 and 3 divide matrices"
        yield Conflict("train.zero_stage", allowed)


def _schedule(key: str, prefix: tuple[str, ...], schedule: Schedule, config: Sections) -> Iterator[Conflict]:
    for name in OF_WSD:
        yield from _only_of("wsd", key, schedule, name, prefix)
    # The steps of what has the schedules of `train`: of stage A, and of the phases of stage B that have steps.
    phases = {} if config.reasoning is None else dict(config.reasoning.phases)
    of_phases = {f"reasoning.phases.{name}.steps": phase.steps for name, phase in phases.items() if phase.steps}
    for steps in ({"train.steps": config.train.steps}, of_phases):
        if allowed := _too_short(schedule, steps):
            yield Conflict(key, allowed, (*prefix, "decay"))


def _too_short(schedule: Schedule, steps: Mapping[str, int]) -> str | None:
    least, key = min(((count, key) for key, count in steps.items()), default=(0, ""))
    if schedule.kind != "wsd" or not least or round(schedule.decay * least):  # as `schedule.learning_rate` rounds
        return None
    return f"above {0.5 / least:g} with {key}={least}: a shorter decay has no step, and the rate would not decay"


def _groups(config: Sections) -> Iterator[Conflict]:
    key, known = "train.groups", get_args(GroupName)
    for name, group in config.train.groups.items():
        if name not in known:
            close = nearest(name, known)
            suggestion = f"{key}.{close}" if close else None
            yield Conflict(key, f"one of {', '.join(known)}", (name,), suggestion, "unknown kind of parameter")
        elif group.schedule is not None:
            yield from _schedule(key, (name, "schedule"), group.schedule, config)
    if "head" in config.train.groups and config.model.kind == "cdrmix" and not config.model.has_own_heads:
        allowed = "no group head with model.tie_embeddings: true; the table is in the group embedding"
        yield Conflict(key, allowed, ("head",))


def _average(config: Sections) -> Iterator[Conflict]:
    average, train = config.export.average, config.train
    others = train.ema_decay is not None or config.model.kind != "cdrmix" or config.reasoning is not None
    if average > train.keep_last:
        yield Conflict("export.average", f"at most train.keep_last={train.keep_last}")
    elif average > 1 and others:
        allowed = "1 with train.ema_decay, a model of transformers or a section reasoning"
        yield Conflict("export.average", allowed)
