"""Selects the checkpoint of a run to use: the best on held-out text, the last, or a named one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cdrmix.config.best_metric import metric_and_mode
from cdrmix.config.schema import Config
from cdrmix.errors import CheckpointError, ConfigError
from cdrmix.inference.checkpoints import MANIFEST, list_checkpoints, named_checkpoint, step_of, verify_weights
from cdrmix.records import read_records
from cdrmix.run_folder import RunFolder

BEST, LAST = "best", "last"
SUMS = "SHA256SUMS"  # of an export


class Found(NamedTuple):
    """path: a checkpoint; or the run folder, whose newest checkpoint with valid weights is meant.

    reason: the end of a sentence: "step 2, the best on held-out text".
    """

    path: Path
    reason: str


def check_choice(wanted: str) -> None:
    """Raises ConfigError if export.checkpoint is a path that does not exist. A name is looked up after the training."""
    if wanted not in (BEST, LAST) and Path(wanted).name != wanted and not Path(wanted).is_dir():
        raise ConfigError(f"export.checkpoint: {wanted} does not exist; name a checkpoint, or {BEST} or {LAST}")


def is_run(path: Path) -> bool:
    """Whether a folder is a run, from which a checkpoint can be selected: no checkpoint, export or other model."""
    return (path / "config_snapshot.yaml").is_file() and not any((path / name).is_file() for name in (SUMS, MANIFEST))


def of_run(model: Path, wanted: str | None) -> Found:
    """The checkpoint `wanted` of the run folder `model`, as of `find_checkpoint`; without `wanted` the model as it is.

    Raises ConfigError if a checkpoint of something else than a run is wanted.
    """
    if wanted is None:
        return Found(model, "")
    if not is_run(model):
        raise ConfigError(f"--checkpoint selects one of a run folder; {model} is {_kind(model)}")
    return find_checkpoint(RunFolder.open(model, writes=False), wanted)


def find_checkpoint(run: RunFolder, wanted: str) -> Found:
    """Finds a checkpoint of a run.

    wanted: best; last (the newest complete checkpoint); or a checkpoint of the run, by its path or its name in
    checkpoints/. best has the best value of train.best_metric (by default the lowest bits per byte) of all validations
    in stage A, which measure what is loaded: with train.ema_decay the running average. The last is taken instead of
    best if there is no best, if its weights are damaged, and if stage B came after it.
    Raises ConfigError for a checkpoint of another run, for an unknown one, and for a damaged metrics.jsonl.
    """
    if wanted not in (BEST, LAST):
        return Found(_named(run, wanted), "as requested")
    if wanted == LAST:
        return Found(run.path, "the last, as requested")
    pointer, checkpoints = run.checkpoints / BEST, list_checkpoints(run.checkpoints)
    if not pointer.is_file() or not checkpoints:
        return Found(run.path, "the last, because none is marked as the best on held-out text")
    try:
        best = named_checkpoint(pointer)
    except CheckpointError as error:
        return Found(run.path, f"the last, because the best on held-out text is not known: {error}")
    train = Config.from_yaml(run.config_snapshot).train
    step, last = step_of(best), step_of(checkpoints[-1])
    if step <= train.steps < last:
        return Found(run.path, f"the last, because the best on held-out text, step {step}, is before stage B")
    try:
        verify_weights(best)
    except CheckpointError as error:
        return Found(run.path, f"the last, because the best on held-out text cannot be used: {error}")
    chosen = metric_and_mode(train.best_metric, train.best_mode, pairs=train.dpo is not None)
    metric = chosen[0] if chosen else "bits_per_byte"
    figures = {record.step: record.held_out_figure(metric) for record in read_records(run.metrics_jsonl).steps}
    reason = f"the best on held-out {'text' if train.dpo is None else 'pairs'}{_figure_text(metric, figures.get(step))}"
    if step != last:
        reason += f"; the last is step {last}{_figure_text(metric, figures.get(last))}"
    return Found(best, reason)


def _figure_text(metric: str, value: float | None) -> str:
    if value is None:
        return ""
    return (
        f" ({value:.4f} bits per byte in its validation)" if metric == "bits_per_byte" else f" ({metric} {value:.4f})"
    )


def _kind(path: Path) -> str:
    return "one model" if path.exists() else "not there"


def _named(run: RunFolder, wanted: str) -> Path:
    path = run.checkpoints / wanted if Path(wanted).name == wanted else Path(wanted)
    if not (path / MANIFEST).is_file() or path.resolve().parent != run.checkpoints.resolve():
        names = ", ".join(checkpoint.name for checkpoint in list_checkpoints(run.checkpoints)) or "none"
        raise ConfigError(
            f"{wanted} is no checkpoint of {run.path}, which has {names}; name one of these, {BEST} or {LAST} "
            "(--checkpoint, or export.checkpoint of the run)"
        )
    return path
