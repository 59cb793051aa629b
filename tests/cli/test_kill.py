"""A run killed in the middle of a step and resumed ends with the weights of an uninterrupted run, bit for bit."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from forked import Forked
from in_process import main
from json_rows import read_metrics

STEPS = 12
CHECKPOINT_EVERY = 3


def only_run(root: Path) -> Path:
    (path,) = root.iterdir()
    return path


def is_at(run: Path, step: int) -> bool:
    """Whether the run has done this step, and has a checkpoint from which to continue."""
    reached = any(row["step"] >= step for row in read_metrics(run / "metrics.jsonl"))
    return reached and (run / "checkpoints" / "latest").is_file()


# Steps right after a checkpoint, between two and right after the second; what the step that is under way when the
# signal comes has done by then is chance.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulation", "processes", "step", "more"),
    [
        (4, 1, 4, ()),
        pytest.param(2, 2, 5, ("train.batch_warmup={rows: 2, steps: 9}",), marks=pytest.mark.long),
    ],
)
def test_sigkill_and_resume(
    workspace: Path,
    arguments: Callable[..., list[str]],
    accumulation: int,
    processes: int,
    step: int,
    more: tuple[str, ...],
    tmp_path: Path,
) -> None:
    shape = (
        *more,
        f"train.steps={STEPS}",
        f"train.checkpoint_every={CHECKPOINT_EVERY}",
        f"train.evaluate_every={STEPS}",
        "train.batch_rows=4",
        f"train.micro_batch_rows={4 // accumulation // processes}",
    )
    command = ["-m", "cdrmix.cli", "train", "--nproc", str(processes)]

    def start(root: Path, *more: str) -> Forked:
        return forked.start([*command, *arguments(*shape, f"run.root={root}"), *more])

    alone = start(tmp_path / "alone")
    victim = start(tmp_path / "killed")
    deadline = time.monotonic() + 120
    while not any(is_at(run, step) for run in (tmp_path / "killed").glob("*")):
        assert victim.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    killed = only_run(tmp_path / "killed")
    assert max(row["step"] for row in read_metrics(killed / "metrics.jsonl")) < STEPS

    assert alone.wait(timeout=200) == 0
    assert start(tmp_path / "killed", "--resume", "auto").wait(timeout=200) == 0
    assert only_run(tmp_path / "killed") == killed
    assert "continuing from step-" in (killed / "train.log").read_text()
    assert [row["step"] for row in read_metrics(killed / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert main(["compare", str(only_run(tmp_path / "alone")), str(killed)]) == 0
