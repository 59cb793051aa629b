"""Extends a run: continues it with other steps or periods, where that leaves the steps already done as they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from cdrmix.config.changes import changes
from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.config.schema_training import Train
from cdrmix.errors import ConfigError
from cdrmix.inference.checkpoints import newest_whole_checkpoint, step_of
from cdrmix.model.prediction import Depths
from cdrmix.run_folder import RunFolder
from cdrmix.training.mirror import ABOUT
from cdrmix.training.schedule import group_rates, learning_rate

# The keys of Config.hash that may change. Those outside the hash (docs/training.md lists them) may change too.
EXTENDABLE = ("train.steps", "train.evaluate_every", "train.checkpoint_every")
ALLOWED = (
    f"{', '.join(EXTENDABLE)}, and the keys that affect no weight, such as train.log_every, train.keep_last, "
    "train.keep_every, and the sections logging, export and evaluation"
)


def extend(path: str | Path, keys: Sequence[str]) -> Config:
    """Changes keys of a run and returns its new configuration, with which the run is continued: `resume=path`.

    path: the run folder. keys: `key.path=value` each. What changes is recorded in extensions.jsonl of the run. Keys
    that have these values already change nothing, so the same call may be repeated.
    Raises ConfigError for keys that may not change, with those that may; for steps that a step already done depends on;
    and if another process is working on the run.
    """
    run = RunFolder.open(path)
    if (run.path / ABOUT).is_file():
        raise ConfigError(f"{path} is a mirror; restore the run first: cdrmix train --resume {path}")
    before = Config.from_yaml(run.config_snapshot)
    after = Config.from_yaml(run.config_snapshot, keys)
    changed = changes(before, after)
    after.refuse(
        (each.key, each.after, f"{each.before}, as in the run; --extend may change {ALLOWED}")
        for each in changed
        if each.hashed and each.key not in EXTENDABLE
    )
    if not changed:
        return after
    with run.locked():
        checkpoint = newest_whole_checkpoint(run.checkpoints)
        step = 0 if checkpoint is None else step_of(checkpoint)
        if before.train.steps != after.train.steps:
            for reason in _dependent(before, after, step):
                raise ConfigError(
                    f"train.steps: {before.train.steps} -> {after.train.steps} would change steps that {run.path} has "
                    f"made, {step} so far: {reason}. Start a new run; train.start_from={run.path} gives it the "
                    "weights of this one"
                )
        run.extend(after, changed, step)
    return after


def _dependent(before: Config, after: Config, step: int) -> Iterator[str]:
    """Why the first `step` steps of a run depend on the number of steps."""
    old, new = before.train, after.train
    if before.reasoning is not None and step > old.steps:
        yield "stage B, which follows the last step of stage A, has begun"
        return
    if new.steps < step:
        yield f"at least {step} steps are allowed"
        return
    kind = old.schedule.kind
    for done in range(step):
        if _rates(old, done) != _rates(new, done):
            until = "" if kind != "wsd" else f" from step {old.steps - round(old.schedule.decay * old.steps)} on"
            yield (
                f"the learning rate of step {done + 1} would be another one, because the {kind} schedule decays to the "
                f"last step{until}. With constant, or with wsd before its decay, the number of steps is free"
            )
            return
    section = before.model if isinstance(before.model, Model) else None
    if section is not None and (prediction := section.prediction) is not None:
        for done in range(step):
            if Depths.of(prediction, done, old.steps) != Depths.of(prediction, done, new.steps):
                yield f"model.prediction: the weights of the depths at step {done + 1} depend on the number of steps"
                return
    if section is not None and section.depth is not None and old.start_from is None and step:
        release = section.depth.release
        if math.ceil(release * old.steps) != math.ceil(release * new.steps):
            yield f"model.depth.release: {release} is a share of the steps"
    key, stages = before.data.stages()
    rows = old.batch_sizes.before(step)
    totals = [each.batch_sizes.before(each.steps) for each in (old, new)]
    for number, stage in enumerate(stages[:-1]):
        ends = [round(stage.until * total) for total in totals]
        if ends[0] != ends[1] and min(ends) < rows:
            yield f"{key}[{number}].until is a share of the rows, and stage {number + 1} ended after {ends[0]} rows"


def _rates(train: Train, step: int) -> tuple[float, dict[str, float]]:
    return learning_rate(train, step), group_rates(train, step)
