"""Selects the checkpoint of a run to export: the best on held-out text, the last, or a named one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cdrmix.config.schema import Config
from cdrmix.errors import CheckpointError, ConfigError
from cdrmix.hf.load import LoadedForeign, load_trained
from cdrmix.inference.checkpoints import MANIFEST, list_checkpoints, step_of
from cdrmix.inference.load import Loaded
from cdrmix.run_folder import RunFolder, read_metrics

BEST, LAST = "best", "last"


class Choice(NamedTuple):
    """The selected model, and the reason as the end of a sentence: "step 2, the best on held-out text"."""

    loaded: Loaded | LoadedForeign
    reason: str


def check_choice(wanted: str) -> None:
    """Raises ConfigError if export.checkpoint is a path that does not exist. A name is looked up after the training."""
    if wanted not in (BEST, LAST) and Path(wanted).name != wanted and not Path(wanted).is_dir():
        raise ConfigError(f"export.checkpoint: {wanted} does not exist; name a checkpoint, or {BEST} or {LAST}")


def choose_checkpoint(run: RunFolder, wanted: str) -> Choice:
    """Loads the model of a run to export: the running average of the weights if the checkpoint has one.

    wanted: best; last (the newest complete checkpoint); or a checkpoint of the run, by its path or its name in
    checkpoints/. best has the lowest bits per byte of all validations in stage A, measured with the weights themselves.
    The last is taken instead of best if there is no best, if it is damaged, and if stage B came after it.
    Raises ConfigError for a checkpoint of another run and for an unknown one, CheckpointError if none is complete.
    """
    if wanted not in (BEST, LAST):
        return Choice(load_trained(_named(run, wanted)), "as requested")
    if wanted == LAST:
        return Choice(load_trained(run.path), "the last, as requested")
    pointer, checkpoints = run.checkpoints / BEST, list_checkpoints(run.checkpoints)
    if not pointer.is_file() or not checkpoints:
        return Choice(load_trained(run.path), "the last, because none is marked as the best on held-out text")
    best = run.checkpoints / pointer.read_text(encoding="utf-8").strip()
    step, last, stage_a = step_of(best), step_of(checkpoints[-1]), Config.from_yaml(run.config_snapshot).train.steps
    if step <= stage_a < last:
        return Choice(
            load_trained(run.path), f"the last, because the best on held-out text, step {step}, is before stage B"
        )
    try:
        loaded = load_trained(best)
    except CheckpointError as error:
        return Choice(load_trained(run.path), f"the last, because the best on held-out text cannot be used: {error}")
    bits = {row["step"]: row.get("valid_bits_per_byte") for row in read_metrics(run.metrics_jsonl)}
    reason = f"the best on held-out text{_bits_text(bits.get(step))}"
    return Choice(loaded, reason if step == last else f"{reason}; the last is step {last}{_bits_text(bits.get(last))}")


def _bits_text(bits: float | None) -> str:
    return "" if bits is None else f" ({bits:.4f} bits per byte)"


def _named(run: RunFolder, wanted: str) -> Path:
    path = run.checkpoints / wanted if Path(wanted).name == wanted else Path(wanted)
    if not (path / MANIFEST).is_file() or path.resolve().parent != run.checkpoints.resolve():
        names = ", ".join(checkpoint.name for checkpoint in list_checkpoints(run.checkpoints)) or "none"
        raise ConfigError(
            f"export.checkpoint: {wanted} is no checkpoint of {run.path}, which has {names}; name one of these, "
            f"{BEST} or {LAST}"
        )
    return path
