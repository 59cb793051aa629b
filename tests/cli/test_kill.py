"""A run killed at a random step and resumed ends with the weights of one that was left alone, bit for bit."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cdrmix.cli import main
from cdrmix.train.run import read_metrics

STEPS = 12


def only_run(root: Path) -> Path:
    (path,) = root.iterdir()
    return path


@pytest.mark.parametrize(("accumulation", "processes"), [(1, 1), (4, 1), (1, 2)])
def test_sigkill_and_resume(
    place: Path, arguments: Callable[..., list[str]], accumulation: int, processes: int, tmp_path: Path
) -> None:
    shape = (
        f"train.steps={STEPS}",
        "train.checkpoint_every=3",
        f"train.evaluate_every={STEPS}",
        "train.batch_rows=4",
        f"train.micro_batch_rows={4 // accumulation // processes}",
    )
    command = [sys.executable, "-m", "cdrmix.cli", "train", "--nproc", str(processes)]

    def start(root: Path, *more: str) -> subprocess.Popen[bytes]:
        words = [*command, *arguments(*shape, f"run.root={root}"), *more]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL)

    alone = start(tmp_path / "alone")
    # Seeded, so that a failure can be had again; the step that is under way when the signal comes is chance.
    step = random.Random(10 * accumulation + processes).randrange(3, STEPS - 2)
    victim = start(tmp_path / "killed")
    deadline = time.monotonic() + 120
    while not any(
        row["step"] >= step for run in (tmp_path / "killed").glob("*/metrics.jsonl") for row in read_metrics(run)
    ):
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
