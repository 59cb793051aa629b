"""Which checkpoint of a run is exported: the best on held-out text, the last, or a named one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cdrmix.config.schema import Config
from cdrmix.errors import CheckpointError, ConfigError
from cdrmix.inference.checkpoints import MANIFEST, list_checkpoints, step_of
from cdrmix.inference.load import Loaded, load_model
from cdrmix.run_folder import RunFolder, read_metrics

BEST, LAST = "best", "last"


class Choice(NamedTuple):
    """A model of a run, and why it is the one: a sentence's end, after its step."""

    loaded: Loaded
    reason: str


def choose_checkpoint(run: RunFolder, wanted: str) -> Choice:
    """The model that is exported of a run: of each checkpoint the running average of the weights, where one is kept.

    wanted: best, last (the newest whole one), or a checkpoint of the run, by its path or by its name in checkpoints/.
    best is that of the lowest bits per byte in the validations of stage A, of the weights themselves. The last is taken
    where there is no such, where it is damaged, and where stage B came after it.
    Raises ConfigError for another run's checkpoint or one that there is not, CheckpointError where none is whole.
    """
    if wanted not in (BEST, LAST):
        return Choice(load_model(_named(run, wanted)), "the one that was asked for")
    if wanted == LAST:
        return Choice(load_model(run.path), "the last, as was asked for")
    pointer, kept = run.checkpoints / BEST, list_checkpoints(run.checkpoints)
    if not pointer.is_file() or not kept:
        return Choice(load_model(run.path), "the last, since none is marked as the best on held-out text")
    best = run.checkpoints / pointer.read_text(encoding="utf-8").strip()
    step, last, stage_a = step_of(best), step_of(kept[-1]), Config.from_yaml(run.config_snapshot).train.steps
    if step <= stage_a < last:
        return Choice(
            load_model(run.path), f"the last, since the best on held-out text, step {step}, is before stage B"
        )
    try:
        loaded = load_model(best)
    except CheckpointError as error:
        return Choice(load_model(run.path), f"the last, since the best on held-out text cannot be used: {error}")
    bits = {row["step"]: row.get("valid_bits_per_byte") for row in read_metrics(run.metrics_jsonl)}
    reason = f"the best on held-out text{_told(bits.get(step))}"
    return Choice(loaded, reason if step == last else f"{reason}; the last is step {last}{_told(bits.get(last))}")


def _told(bits: float | None) -> str:
    return "" if bits is None else f" ({bits:.4f} bits per byte)"


def _named(run: RunFolder, wanted: str) -> Path:
    path = run.checkpoints / wanted if Path(wanted).name == wanted else Path(wanted)
    if not (path / MANIFEST).is_file() or path.resolve().parent != run.checkpoints.resolve():
        names = ", ".join(kept.name for kept in list_checkpoints(run.checkpoints)) or "none"
        raise ConfigError(
            f"export.checkpoint: {wanted} is no checkpoint of {run.path}, which has {names}; name one of these, "
            f"{BEST} or {LAST}"
        )
    return path
