"""train.skip.rollbacks: a run goes back to its newest checkpoint and trains on later rows, the same after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cdrmix
from cdrmix.cli import main
from cdrmix.data.batch import Batch
from cdrmix.errors import NonFiniteLossError
from cdrmix.model.loss import Losses
from cdrmix.training.engine import Engine

Arguments = Callable[..., list[str]]
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
    """Notes the rows of each step, and lets some rows have a loss that is NaN."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.bad: set[tuple[int, ...]] = set()
        forward = Engine.forward

        def noted(engine: Engine, batch: Batch, **options: Any) -> Losses:
            losses, row = forward(engine, batch, **options), tuple(batch.ids_BT.flatten().tolist())
            self.seen.append(row)
            return losses._replace(total=losses.total * float("nan")) if row in self.bad else losses

        monkeypatch.setattr(Engine, "forward", noted)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, arguments: Arguments, tmp_path: Path) -> Rows:
    """`seen` has the rows of an undisturbed run of twice as many steps, of one row each."""
    found = Rows(monkeypatch)
    train(arguments, tmp_path / "plain", f"train.steps={2 * STEPS}")
    assert len(set(found.seen)) == len(found.seen) == 2 * STEPS
    return found


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
    plain, rows.seen = rows.seen, []
    rows.bad = {plain[step] for step in (3, 4, 6, 7)}
    run = train(arguments, tmp_path / "run", "train.skip.rollbacks=2")
    first, second = [0, 1, 2, 3, 4], [5, 6, 7]  # then back to step 2
    assert rows.seen == [plain[step] for step in (*first, *second, *range(8, 14))]
    faults = [json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines()]
    assert (faults[-1]["step"], faults[-1]["rollback"]) == (5, 2)
    assert faults[-1]["message"] == (
        "went back to step 2, and passes over the rows of steps 3 to 5: the loss is nan; 2 steps in a row were skipped"
    )
    assert steps_of(run) == list(range(1, STEPS + 1))

    # Broken off between the rollback and the next checkpoint, it goes back again.
    with pytest.raises(KeyboardInterrupt):
        train(arguments, tmp_path / "stopped", "train.skip.rollbacks=2", callbacks=[Stop(3)])
    stopped = train(arguments, tmp_path / "stopped", "train.skip.rollbacks=2", resume="auto")
    assert main(["compare", str(run), str(stopped)]) == 0
    assert steps_of(stopped) == steps_of(run)


def test_more_rollbacks_than_allowed_end_the_run(rows: Rows, arguments: Arguments, tmp_path: Path) -> None:
    rows.bad = {rows.seen[step] for step in (3, 4, 6, 7)}
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan at step 5 .* after 1 that were skipped"):
        train(arguments, tmp_path / "run", "train.skip.rollbacks=1")


def test_without_a_checkpoint_the_run_ends(rows: Rows, arguments: Arguments, tmp_path: Path) -> None:
    rows.bad = {rows.seen[step] for step in (0, 1)}
    with pytest.raises(NonFiniteLossError, match="no checkpoint from before them to go back to"):
        train(arguments, tmp_path / "run", "train.skip.rollbacks=1")
