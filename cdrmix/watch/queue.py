"""The queue of `cdrmix eval watch`: one checkpoint of a run, hard-linked so that `train.keep_last` cannot remove it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cdrmix.config.schema import Config
from cdrmix.errors import CheckpointError
from cdrmix.inference.checkpoints import (
    MANIFEST,
    MODEL,
    file_name,
    list_checkpoints,
    read_manifest,
    step_of,
    weight_files,
    weights_hash,
)

FILES = ("state.json", "config_snapshot.yaml")  # what a model is loaded from, besides its weights


class Candidate(NamedTuple):
    """A checkpoint to evaluate. sha256: of its weights, of the running average if it has one, by its manifest."""

    folder: Path
    step: int
    sha256: str


def candidate(folder: Path) -> Candidate:
    """The checkpoint in a folder. Raises CheckpointError if its manifest is missing or damaged."""
    files = read_manifest(folder)["files"]
    digest = weights_hash(files)
    if digest is None:
        raise CheckpointError(f"{folder / MANIFEST} is corrupt: it has no SHA-256 of {file_name(MODEL)}")
    return Candidate(folder, step_of(folder), digest)


class Due:
    """The checkpoints of a run that `evaluation.every` selects."""

    def __init__(self, config: Config) -> None:
        train, phases = config.train, config.reasoning.phases if config.reasoning else ()
        in_stage_a = 0 if config.reasoning and config.reasoning.backbone else train.steps
        self._every = config.evaluation.every
        self._period, self._stage_a = self._every or train.checkpoint_every, train.steps
        self._ends = {in_stage_a, in_stage_a + sum(section.steps for _, section in phases)}

    def newest(self, folder: Path, damaged: Callable[[Path, str], None]) -> Candidate | None:
        """The newest due checkpoint in a folder; None if there is none.

        damaged: receives each newer one whose manifest cannot be read, and the reason.
        """
        for checkpoint in reversed(list_checkpoints(folder)):
            try:
                if self._is_due(checkpoint):
                    return candidate(checkpoint)
            except CheckpointError as error:
                if checkpoint.is_dir():  # else it was removed while it was read
                    damaged(checkpoint, str(error))
        return None

    def _is_due(self, checkpoint: Path) -> bool:
        step = step_of(checkpoint)
        periodic = read_manifest(checkpoint).get("periodic") is True
        return periodic and (self._every is None or step % self._every == 0 or step in self._ends)

    def before(self, step: int) -> range:
        """The steps before `step` at which stage A has due checkpoints."""
        return range(self._period, min(step, self._stage_a + 1), self._period)


class Queue:
    """A folder of linked checkpoints: the one that waits, and the one that is evaluated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for incomplete in folder.glob("step-*.tmp"):
            shutil.rmtree(incomplete, ignore_errors=True)

    def take(self, found: Candidate) -> Candidate:
        """Links a checkpoint into the queue, or copies it where the file system has no hard links.

        Raises CheckpointError if a file is missing; OSError.
        """
        target = self.folder / found.folder.name
        temporary = target.with_name(f"{target.name}.tmp")
        temporary.mkdir()
        try:
            files = read_manifest(found.folder)["files"]
            others = [name for name in FILES if name in files]
            # The optimizer's state, twice as large, is not kept from removal.
            for name in (*weight_files(files), *others, MANIFEST):
                _link(found.folder / name, temporary / name)
            temporary.rename(target)
        except FileNotFoundError as error:
            raise CheckpointError(f"{error.filename} is missing") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return found._replace(folder=target)

    def remove(self, taken: Candidate) -> None:
        """Removes a checkpoint from the queue."""
        shutil.rmtree(taken.folder, ignore_errors=True)

    def left(self) -> list[Candidate]:
        """What a former watcher left, in order of step; what is damaged is removed."""
        found = []
        for folder in list_checkpoints(self.folder):
            try:
                found.append(candidate(folder))
            except CheckpointError:
                shutil.rmtree(folder, ignore_errors=True)
        return found


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # no hard links here, or checkpoints/ is on another file system
        shutil.copyfile(source, target)
