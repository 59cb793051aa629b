"""Loads the checkpoint of a run to export: the best on held-out text, the last, or a named one."""

from __future__ import annotations

from typing import NamedTuple

from cdrmix.hf.load import LoadedForeign, load_trained
from cdrmix.inference.choice import find_checkpoint
from cdrmix.inference.load import Loaded
from cdrmix.run_folder import RunFolder


class Choice(NamedTuple):
    """The selected model, and the reason as the end of a sentence: "step 2, the best on held-out text"."""

    loaded: Loaded | LoadedForeign
    reason: str


def choose_checkpoint(run: RunFolder, wanted: str) -> Choice:
    """Loads the model of a run to export: the running average of the weights if the checkpoint has one.

    wanted, errors: as of `find_checkpoint`. Raises CheckpointError if no checkpoint is complete.
    """
    path, reason = find_checkpoint(run, wanted)
    return Choice(load_trained(path), reason)
