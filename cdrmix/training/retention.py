"""Which checkpoints of a folder are kept, and why; how the others are removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from cdrmix.config.schema import Train
from cdrmix.errors import CheckpointError
from cdrmix.inference.checkpoints import list_checkpoints, pointed, read_manifest, step_of

LAST, BEST, EVERY = "last", "best", "every"  # reasons to keep a checkpoint
LATEST = "latest"  # like BEST a pointer file


class Rules(NamedTuple):
    """keep_last: periodic checkpoints to keep. keep_every: that of each N-th step is kept too; None: of no step."""

    keep_last: int
    keep_every: int | None = None

    @classmethod
    def of(cls, settings: Train) -> Rules:
        """The rules of a configuration."""
        return cls(settings.keep_last, settings.keep_every)


def reasons_to_keep(folder: Path, rules: Rules, current: Path | None = None) -> dict[Path, list[str]]:
    """The committed checkpoints of a folder in order of step, each with the reasons to keep it; [] if there is none.

    current: the newest checkpoint of the training. It is kept, and is one of `keep_last` if it is periodic. Checkpoints
    of higher steps are not kept: they were corrupt, the run resumed before them, and its weights differ since. By
    default the last checkpoint.
    """
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return {}
    current = current or checkpoints[-1]
    last = [*[path for path in checkpoints if path <= current and is_periodic(path)][-rules.keep_last :], current]
    best = pointed(folder, BEST)
    reasons: dict[Path, list[str]] = {}
    for path in checkpoints:
        every = rules.keep_every is not None and step_of(path) % rules.keep_every == 0 and path <= current
        found = ((LAST, path in last), (BEST, path == best), (EVERY, every))
        reasons[path] = [name for name, holds in found if holds]
    return reasons


def prune(folder: Path, rules: Rules, current: Path, busy: Collection[Path] = ()) -> None:
    """Removes the checkpoints that no rule keeps, and incomplete ones. current: as of `reasons_to_keep`.

    busy: checkpoints that are being copied. They stay until a later call.
    """
    for incomplete in folder.glob("step-*.tmp-*"):
        shutil.rmtree(incomplete, ignore_errors=True)
    for checkpoint, reasons in reasons_to_keep(folder, rules, current).items():
        if not reasons and checkpoint not in busy:
            shutil.rmtree(set_aside(checkpoint), ignore_errors=True)


def is_periodic(checkpoint: Path) -> bool:
    """Whether a checkpoint counts for `train.keep_last`."""
    try:
        return bool(read_manifest(checkpoint)["periodic"])
    except (CheckpointError, KeyError):
        return False


def set_aside(checkpoint: Path) -> Path:
    """Renames a checkpoint before it is removed, so that a kill in between leaves no partial checkpoint."""
    aside = checkpoint.with_name(f"{checkpoint.name}.tmp-{os.getpid()}-removed")
    return checkpoint.rename(aside)
