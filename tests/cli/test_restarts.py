"""`cdrmix train --max-restarts`: a run whose process is killed goes on by itself, with the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cdrmix.cli import main
from cdrmix.training.launch import CRASHED

Arguments = Callable[..., list[str]]
LONG = ("train.steps=600", "train.checkpoint_every=5", "train.evaluate_every=600", "train.log_every=100")
ASYNC = "train.async_checkpoints=true"


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "setting"), [(1, "run.threads=1"), (2, ASYNC)])
def test_a_killed_process(
    arguments: Arguments,
    tmp_path: Path,
    wait_for_checkpoint: Callable[[Path], Path],
    workers: Callable[[int], list[int]],
    processes: int,
    setting: str,
) -> None:
    count = ["--nproc", str(processes)]
    assert main(["train", *count, *arguments(*LONG, f"run.root={tmp_path / 'straight'}")]) == 0
    command = [sys.executable, "-m", "cdrmix.cli", "train", *count, "--max-restarts", "1"]
    command += arguments(*LONG, setting, f"run.root={tmp_path / 'killed'}")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        run = wait_for_checkpoint(tmp_path / "killed")
        os.kill(workers(launcher.pid)[-1], signal.SIGKILL)
        _, error = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, error
    assert f"{CRASHED}\ncdrmix: starting the processes again (1 of 1)\n" in error
    (fault,) = map(json.loads, (run / "faults.jsonl").read_text().splitlines())
    assert fault["exit_code"] == 1
    assert fault["message"] == CRASHED
    assert fault["checkpoint"] is not None
    summary = json.loads((run / "metrics.json").read_text())
    assert (summary["restarts"], summary["lost_seconds"]) == (1, fault["lost_seconds"])
    assert 0 <= summary["lost_seconds"] < 60
    assert "restarts after faults" in (run / "report.html").read_text()
    (straight,) = (tmp_path / "straight").iterdir()
    assert [path.name for path in (tmp_path / "killed").iterdir()] == [run.name], "one run"
    assert main(["compare", str(straight), str(run)]) == 0


def test_what_would_fail_again_is_not_started_again(
    arguments: Arguments, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A configuration that only the processes find wrong."""
    missing = ("data.source={kind: text, paths: [/nowhere]}", f"run.root={tmp_path}")
    assert main(["train", "--max-restarts", "3", *arguments(*missing)]) == 3
    assert "starting the processes again" not in capfd.readouterr().err
    several = ["--nnodes", "2", "--node-rank", "0", "--rendezvous", "localhost:29500"]
    assert main(["train", "--max-restarts", "3", *several, *arguments()]) == 2
    assert "--max-restarts: allowed on one machine" in capfd.readouterr().err
