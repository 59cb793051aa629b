"""What may listen to a run: progress on the console, metrics and trackers, and a caller's own objects."""

from __future__ import annotations

from pathlib import Path

from cdrmix.records import Record


class Callback:
    """Is told what a run does, in every process of it. Subclass it and override what you need.

    An exception in a method ends the run; `--resume auto` continues from the newest checkpoint.
    """

    def on_step(self, step: int) -> None:
        """After every optimizer step. step: finished steps of the run."""

    def on_record(self, record: Record) -> bool | None:
        """After every step that is recorded: the first, the last, each `train.log_every`-th, each validated one.

        record: a StepRecord in stage A, a PhaseRecord in stage B. Return True to stop the run as a signal does: it
        makes one more step, commits a checkpoint and raises Preempted.
        """

    def on_checkpoint(self, checkpoint: Path) -> None:
        """After a checkpoint is committed. checkpoint: its folder."""
