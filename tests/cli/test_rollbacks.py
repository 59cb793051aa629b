"""train.skip.rollbacks: a run goes back to its newest checkpoint and trains on later rows, the same after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from in_process import main

import cdrmix
from cdrmix.data.batch import Batch
from cdrmix.errors import NonFiniteLossError
from cdrmix.model.loss import Losses
from cdrmix.training import faults
from cdrmix.training.engine import Engine

pytestmark = pytest.mark.usefixtures("training_alone")

Arguments = Callable[..., list[str]]
Row = tuple[int, ...]
STEPS = 8
RUN = (
    f"train.steps={STEPS}",
    "train.batch_rows=1",
    "train.checkpoint_every=2",
    "train.evaluate_every=8",
    "train.skip.nonfinite=1",
)


def train(arguments: Arguments, root: Path, *more: str, **options: Any) -> Path:
    _, path, *overrides = arguments(*RUN, f"run.root={root}", *more)
    return cdrmix.train(cdrmix.Config.from_yaml(path, overrides), **options)


class Rows:
    """Notes the rows of each step, and multiplies the loss of some rows.

    plain: the rows of an undisturbed run of twice as many steps, of one row each.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plain: Sequence[Row] = ()) -> None:
        self.plain = plain
        self.seen: list[Row] = []
        self.bad: set[Row] = set()
        self.factor = float("nan")
        forward = Engine.forward

        def noted(engine: Engine, batch: Batch, **options: Any) -> Losses:
            losses, row = forward(engine, batch, **options), tuple(batch.ids_BT.flatten().tolist())
            self.seen.append(row)
            return losses._replace(total=losses.total * self.factor) if row in self.bad else losses

        monkeypatch.setattr(Engine, "forward", noted)


@pytest.fixture(scope="module")
def plain(training_alone: None, arguments: Arguments, workspace: Path) -> Sequence[Row]:
    with pytest.MonkeyPatch.context() as patch:
        found = Rows(patch)
        train(arguments, workspace / "plain", f"train.steps={2 * STEPS}")
    assert len(set(found.seen)) == len(found.seen) == 2 * STEPS
    return tuple(found.seen)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, plain: Sequence[Row]) -> Rows:
    return Rows(monkeypatch, plain)


class Stop(cdrmix.Callback):
    """Breaks a run off after it has made a step for the second time."""

    def __init__(self, step: int) -> None:
        self.step, self.times = step, 0

    def on_step(self, step: int) -> None:
        self.times += step == self.step
        if self.times == 2:
            raise KeyboardInterrupt


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_rows_with_nan_are_passed_over(rows: Rows, arguments: Arguments, tmp_path: Path) -> None:
    """The losses of steps 4 and 5 are NaN; from step 3 on again, so are those of the second and the third."""
    rows.bad = {rows.plain[step] for step in (3, 4, 6, 7)}
    run = train(arguments, tmp_path / "run", "train.skip.rollbacks=2")
    first, second = [0, 1, 2, 3, 4], [5, 6, 7]  # then back to step 2
    assert rows.seen == [rows.plain[step] for step in (*first, *second, *range(8, 14))]
    recorded = [json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines()]
    assert [(fault["step"], fault["rollback"]) for fault in recorded] == [(3, 2)] * 2
    assert [fault["message"] for fault in recorded] == [
        f"went back from step 5 to step 2, and passes over rows {first} to {first + 2} of the run's order: "
        "the loss is nan; 2 steps in a row were skipped"
        for first in (2, 5)
    ]
    assert steps_of(run) == list(range(1, STEPS + 1))

    # Broken off between the rollback and the next checkpoint, it goes back again.
    with pytest.raises(KeyboardInterrupt):
        train(arguments, tmp_path / "stopped", "train.skip.rollbacks=2", callbacks=[Stop(3)])
    stopped = train(arguments, tmp_path / "stopped", "train.skip.rollbacks=2", resume="auto")
    assert main(["compare", str(run), str(stopped)]) == 0
    assert steps_of(stopped) == steps_of(run)


def test_checkpoints_of_the_time_before_are_not_resumed_from(rows: Rows, arguments: Arguments, tmp_path: Path) -> None:
    """Of steps 4 and 6, which were skipped: the run goes back to step 2 and is broken off before step 6 comes again."""
    rows.bad = {rows.plain[step] for step in (3, 4, 5, 6)}
    more = ("train.skip.nonfinite=3", "train.skip.rollbacks=1", "train.keep_last=3", "train.async_checkpoints=true")
    run = train(arguments, tmp_path / "run", *more)
    with pytest.raises(KeyboardInterrupt):
        train(arguments, tmp_path / "stopped", *more, callbacks=[Stop(5)])
    stopped = train(arguments, tmp_path / "stopped", *more, resume="auto")
    assert main(["compare", str(run), str(stopped)]) == 0
    recorded = [json.loads(line) for line in (stopped / "faults.jsonl").read_text().splitlines()]
    assert [fault["rollback"] for fault in recorded] == [2]


@pytest.mark.parametrize(("every", "after"), [(2, [11, 12, 13, 14]), (100, [10, 11])])
def test_spikes(
    rows: Rows,
    arguments: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    after: list[int],
) -> None:
    """After three in a row the run goes back to step 8; without a checkpoint the loss has a new level."""
    monkeypatch.setattr(faults, "RECENT", 8)
    monkeypatch.setattr(faults, "MAX_CONSECUTIVE_SPIKES", 3)
    rows.factor = 100.0
    rows.bad = {rows.plain[step] for step in (8, 9, 10)}
    saved = (f"train.checkpoint_every={every}", f"train.evaluate_every={every}")  # the best is saved too
    more = ("train.steps=12", *saved, "train.keep_last=1", "train.skip.spike=6")
    train(arguments, tmp_path / "run", *more, "train.skip.rollbacks=1")
    assert rows.seen == [rows.plain[step] for step in (*range(11), *after)]


def test_more_rollbacks_than_allowed_end_the_run(rows: Rows, arguments: Arguments, tmp_path: Path) -> None:
    rows.bad = {rows.plain[step] for step in (3, 4, 6, 7)}
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan at step 5 .* after 1 that were skipped"):
        train(arguments, tmp_path / "run", "train.skip.rollbacks=1")


def test_without_a_checkpoint_the_run_ends(rows: Rows, arguments: Arguments, tmp_path: Path) -> None:
    rows.bad = {rows.plain[step] for step in (0, 1)}
    with pytest.raises(NonFiniteLossError, match="no checkpoint from before them to go back to"):
        train(arguments, tmp_path / "run", "train.skip.rollbacks=1")
