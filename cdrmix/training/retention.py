"""Which checkpoints of a folder are kept, and why; how the others are removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from cdrmix.config.schema_training import Train
from cdrmix.errors import CheckpointError
from cdrmix.inference.checkpoints import list_checkpoints, pointed, read_manifest, step_of

LAST, BEST, EVERY = "last", "best", "every"  # reasons to keep a checkpoint
LEFT = 3600.0  # seconds
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
    sweep(folder)
    for checkpoint, reasons in reasons_to_keep(folder, rules, current).items():
        if not reasons and checkpoint not in busy:
            shutil.rmtree(set_aside(checkpoint), ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes what a kill has left of checkpoints that were being written or removed. No process may write there."""
    for incomplete in folder.glob("step-*.tmp-*"):
        shutil.rmtree(incomplete, ignore_errors=True)


def sweep_root(root: Path) -> None:
    """Removes what killed processes have left under a run.root, and what no later start of theirs would remove.

    Checkpoints that were being removed, whichever run they are of; run folders of which no more than the configuration
    was written, and parts of a run that was being restored from its mirror, both if they have not changed for LEFT
    seconds: another process may be making them.
    """
    for removed in root.glob("*/checkpoints/step-*.tmp-*-removed"):
        shutil.rmtree(removed, ignore_errors=True)
    unfinished = [path for path in root.glob("[0-9]*T[0-9]*Z-*") if _is_begun_alone(path)]
    for path in (*unfinished, *root.glob(".restore-*.tmp")):
        with contextlib.suppress(FileNotFoundError):  # another process sweeps too
            changed = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
            if time.time() - changed > LEFT:
                shutil.rmtree(path, ignore_errors=True)


def _is_begun_alone(run: Path) -> bool:
    """Whether RunFolder.create was interrupted: there is neither a checkpoint nor any record."""
    first = {"checkpoints", "config_snapshot.yaml", "config_snapshot.yaml.tmp", "metrics.json.tmp"}
    try:
        return {path.name for path in run.iterdir()} <= first and not any((run / "checkpoints").glob("*"))
    except (FileNotFoundError, NotADirectoryError):
        return False


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
