"""Rules about the optimizer, the learning-rate schedule, the groups of parameters, and the average of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

from cdrmix.config.rule import Rule, Violation, registered_name
from cdrmix.config.schema_optimizer import GroupName, Optimizer, Schedule
from cdrmix.config.schema_reasoning import Phases
from cdrmix.registry import nearest

OF_MUON = {key: value for key, value in Optimizer().model_dump().items() if key != "kind"}
OF_WSD = {"decay": Schedule().decay, "shape": Schedule().shape}
# The steps of what has the schedules of `train`: of stage A, and of the phases of stage B.
STEPS = (("train.steps",), tuple(f"reasoning.phases.{name}.steps" for name in Phases.model_fields))


def _only_of(kind_of: str, neutral: object, value: object, kind: str) -> str | None:
    shown = str(neutral).lower()
    return f"{shown}, for kind={kind}; it is a key of {kind_of}" if kind != kind_of and value != neutral else None


def _kind(kind: str, model: str, weights: str, offload: str) -> str | None:
    if kind != "muon":
        return None
    if model != "cdrmix":
        return f"adamw for model.kind={model}: which of its matrices hold several maps is not known"
    if weights != "fp32" or offload != "none":
        return "adamw with train.weights: bf16 or train.offload, whose partitions divide matrices"
    return None


def _zero_stage(stage: int | str, kind: str) -> str | None:
    refused = kind == "muon" and stage in (2, 3)
    return "auto, 0 or 1 with train.optimizer.kind=muon: stages 2 and 3 divide matrices" if refused else None


def _groups(groups: Mapping[str, Any]) -> Violation | None:
    known = get_args(GroupName)
    for name, group in groups.items():
        if name not in known:
            close = nearest(name, known)
            suggestion = f"train.groups.{close}" if close else None
            return Violation((name,), f"one of {', '.join(known)}", suggestion, "unknown kind of parameter")
        schedule = group.get("schedule") if isinstance(group, Mapping) else None
        if not isinstance(schedule, Mapping):  # none, or of a wrong type, which pydantic refuses
            continue
        for key, neutral in OF_WSD.items():
            value, kind = schedule.get(key, neutral), schedule.get("kind", Schedule().kind)
            if (allowed := _only_of("wsd", neutral, value, kind)) is not None:
                return Violation((name, "schedule", key), allowed)
    return None


def _decays(keys: tuple[str, ...], decay: float, kind: str, *steps: int) -> str | None:
    """steps: of the trainings with the schedule, whose keys are `keys`; a phase of 0 steps is skipped."""
    least, key = min(((count, key) for count, key in zip(steps, keys, strict=True) if count), default=(0, ""))
    if kind != "wsd" or not least or round(decay * least):  # as `schedule.learning_rate` rounds
        return None
    return f"above {0.5 / least:g} with {key}={least}: a shorter decay has no step, and the rate would not decay"


def _group_decays(keys: tuple[str, ...], groups: Mapping[str, Any], *steps: int) -> Violation | None:
    for name, group in groups.items():
        schedule = group.get("schedule") if isinstance(group, Mapping) else None
        if not isinstance(schedule, Mapping):
            continue
        decay, kind = schedule.get("decay", Schedule().decay), schedule.get("kind", Schedule().kind)
        if (allowed := _decays(keys, decay, kind, *steps)) is not None:
            return Violation((name, "schedule", "decay"), allowed, found=f"found {decay} (a number)")
    return None


def _group_head(
    groups: Mapping[str, Any], tied: bool, kind: str, prediction: Mapping[str, Any] | None
) -> Violation | None:
    further_heads = prediction is not None and prediction.get("kind") == "heads"
    if kind != "cdrmix" or not tied or further_heads or "head" not in groups:
        return None
    return Violation(("head",), "no group head with model.tie_embeddings: true; the table is in the group embedding")


def _average(average: int, keep_last: int, ema_decay: float | None, model: str, reasoning: object) -> str | None:
    if average > keep_last:
        return f"at most train.keep_last={keep_last}"
    others = ema_decay is not None or model != "cdrmix" or reasoning is not None
    return "1 with train.ema_decay, a model of transformers or a section reasoning" if average > 1 and others else None


RULES = (
    Rule(("train.optimizer.kind",), partial(registered_name, "optimizer")),
    *(
        Rule((f"train.optimizer.{key}", "train.optimizer.kind"), partial(_only_of, "muon", neutral))
        for key, neutral in OF_MUON.items()
    ),
    Rule(("train.optimizer.kind", "model.kind", "train.weights", "train.offload"), _kind),
    Rule(("train.zero_stage", "train.optimizer.kind"), _zero_stage),
    *(
        Rule((f"train.schedule.{key}", "train.schedule.kind"), partial(_only_of, "wsd", neutral))
        for key, neutral in OF_WSD.items()
    ),
    *(
        rule
        for keys in STEPS
        for rule in (
            Rule(("train.schedule.decay", "train.schedule.kind", *keys), partial(_decays, keys)),
            Rule(("train.groups", *keys), partial(_group_decays, keys)),
        )
    ),
    Rule(("train.groups",), _groups),
    Rule(("train.groups", "model.tie_embeddings", "model.kind", "model.prediction"), _group_head),
    Rule(("export.average", "train.keep_last", "train.ema_decay", "model.kind", "reasoning"), _average),
)
