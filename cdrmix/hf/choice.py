"""Loads the checkpoint of a run to export: the best on held-out text, the last, or a named one."""

from __future__ import annotations

from typing import NamedTuple

from cdrmix.hf.load import LoadedForeign, load_trained
from cdrmix.inference.average import average_weights
from cdrmix.inference.choice import find_checkpoint
from cdrmix.inference.load import Loaded
from cdrmix.run_folder import RunFolder


class Choice(NamedTuple):
    """The selected model, and the reason as the end of a sentence: "step 2, the best on held-out text"."""

    loaded: Loaded | LoadedForeign
    reason: str


def choose_checkpoint(run: RunFolder, wanted: str, *, average: int = 1) -> Choice:
    """Loads the model of a run to export: the running average of the weights if the checkpoint has one.

    average: export.average; above 1 the mean of the weights of so many checkpoints, the chosen one and those before it.
    wanted, errors: as of `find_checkpoint`. Raises CheckpointError if no checkpoint is complete.
    """
    path, reason = find_checkpoint(run, wanted)
    loaded = load_trained(path)
    if average > 1:
        assert isinstance(loaded, Loaded), "a rule of the configuration"
        weights, steps = average_weights(run, loaded.step, average)
        loaded.model.load_state_dict(weights)
        reason += (
            f"; the weights are the average of the steps {', '.join(map(str, steps))}, which no validation measured"
        )
    return Choice(loaded, reason)
