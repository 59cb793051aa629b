"""`cdrmix train --max-restarts`: a run whose process is killed goes on by itself, with the same bits."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from in_process import main
from json_rows import read_metrics

from cdrmix import workflow
from cdrmix.config.schema import Config
from cdrmix.errors import UNEXPECTED, OutOfMemoryError
from cdrmix.run_folder import RunFolder
from cdrmix.training import launch
from cdrmix.training.launch import CRASHED

Arguments = Callable[..., list[str]]
LONG = ("train.steps=200", "train.checkpoint_every=5", "train.evaluate_every=200", "train.log_every=100")
ASYNC = "train.async_checkpoints=true"


@pytest.mark.long
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
    assert re.search(r"restarts after faults, [^<]*lost \(\d+\.\d % of the time\)", (run / "report.html").read_text())
    (straight,) = (tmp_path / "straight").iterdir()
    assert [path.name for path in (tmp_path / "killed").iterdir()] == [run.name], "one run"
    assert main(["compare", str(straight), str(run)]) == 0


OUT_OF_MEMORY = """
import torch
from cdrmix.training.engine import Engine
forward = Engine.forward
def limited(self, batch, **options):
    if batch.step >= 3 and len(batch.ids_BT) > 1:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    return forward(self, batch, **options)
Engine.forward = limited
"""


@pytest.mark.long
def test_a_run_out_of_memory_continues_with_fewer_rows(
    arguments: Arguments, install_plugin: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    """In the processes, a plugin lets micro-batches of more than one row run out of memory from the fourth step on."""
    rows = ("train.steps=6", "train.batch_rows=4", "train.micro_batch_rows=4", f"run.root={tmp_path / 'runs'}")
    command = ["-m", "cdrmix.cli", "train", "--max-restarts", "2", *arguments(*rows)]
    status, told = forked.run(command, install_plugin(tmp_path, OUT_OF_MEMORY))
    assert status == 0, told
    for attempt, (now, parts) in enumerate([(2, 2), (1, 4)], 1):
        again = f"again ({attempt} of 2) with train.micro_batch_rows={now} train.micro_batch_parts={parts}\n"
        assert again in told
    (run,) = (tmp_path / "runs").iterdir()
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    faults = [json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines()]
    assert [(fault["exit_code"], fault["checkpoint"]) for fault in faults] == [(8, "step-00000002")] * 2
    assert "Tried to allocate 2.00 GiB" in faults[0]["message"]
    assert "micro_batch_rows: 4 before, 1 now" in (run / "train.log").read_text()
    assert json.loads((run / "metrics.json").read_text())["restarts"] == 2


def test_a_single_row_that_does_not_fit_ends_the_run(
    arguments: Arguments, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """6 rows are divided by their smallest prime factors; the run keeps its hash."""
    given: list[list[str]] = []

    def attempt(processes: int, words: list[str], nodes: object) -> launch.Ended:
        given.append(words)
        return launch.Ended(OutOfMemoryError.exit_code, "no room", False, {}, exhausted=True)

    monkeypatch.setattr(launch, "_attempt", attempt)
    command = arguments("train.batch_rows=6", "train.micro_batch_rows=6")
    assert main(["train", "--max-restarts", "9", *command]) == OutOfMemoryError.exit_code
    assert [words[len(given[0]) :] for words in given] == [
        [],
        ["train.micro_batch_rows=3", "train.micro_batch_parts=2"],
        [
            "train.micro_batch_rows=3",
            "train.micro_batch_parts=2",
            "train.micro_batch_rows=1",
            "train.micro_batch_parts=6",
        ],
    ]
    assert capsys.readouterr().err.count("no room") == 3
    hashes = {Config.from_yaml(words[2], words[3:]).hash() for words in given}
    assert len(hashes) == 1
    assert Config.from_yaml(given[0][2], [*given[0][3:], "train.micro_batch_rows=3"]).hash() not in hashes


@pytest.mark.slow
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


def test_the_record_of_faults_is_kept_through_a_kill(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last line that was cut off hides no other, and no temporary folder counts as a checkpoint."""
    _, path, *overrides = arguments(f"run.root={tmp_path}")
    run = RunFolder.create(Config.from_yaml(path, overrides))
    run.record_skip(3, "the loss is nan")
    run.record_skip(7, "the loss is nan")
    with run.faults.open("a") as file:
        file.write('{"time": "2026-')
    for name in ("step-00000004", "step-00000009.tmp-77"):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "manifest.json").write_text("{}")
    os.utime(run.checkpoints / "step-00000004" / "manifest.json", (1000, 1000))
    monkeypatch.setattr(time, "time", lambda: 1012.5)
    run.record_fault(1, CRASHED, started=990.0)
    run.record_fault(1, CRASHED, started=1010.0)
    run.drop_records_after(3)
    skip, fault, again = map(json.loads, run.faults.read_text().splitlines())
    assert (skip["step"], skip["message"]) == (3, "the loss is nan")
    assert fault["checkpoint"] == "step-00000004"
    assert fault["lost_seconds"] == 12.5, "since the checkpoint"
    assert again["lost_seconds"] == 2.5, "since the processes were started again"
    assert (run.summary()["restarts"], run.summary()["lost_seconds"]) == (2, 15.0)


@pytest.mark.parametrize(("messages", "attempts"), [(["a", "a", "b"], 2), (["a", "b", "b"], 3), (["a", "b", "c"], 4)])
def test_a_defect_that_comes_again_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, messages: list[str], attempts: int
) -> None:
    made: list[int] = []

    def attempt(*_: object) -> launch.Ended:
        made.append(1)
        return launch.Ended(UNEXPECTED, [*messages, "d"][len(made) - 1], False, {})

    monkeypatch.setattr(launch, "_attempt", attempt)
    status, _ = launch.launch(1, ["train"], restarts=3)
    assert (status, len(made)) == (UNEXPECTED, attempts)


@pytest.mark.parametrize(
    "text", ["[enforce fail] can't allocate memory", f"unable to mmap 8 bytes: {os.strerror(errno.ENOMEM)}"]
)
def test_memory_that_the_evaluation_at_the_end_exhausts(
    toy_run: Path,
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
) -> None:
    """Of a run whose last checkpoint is there, and which is not evaluated yet."""
    run = RunFolder.open(shutil.copytree(toy_run, tmp_path / toy_run.name))
    run.update_summary({"held_out_step": None, "finished": False})
    command = ["train", *arguments(f"run.root={tmp_path}"), "--resume", "auto"]

    def exhausts(*_: object) -> None:
        raise RuntimeError(text)

    with monkeypatch.context() as patch:
        patch.setattr(workflow, "measure", exhausts)
        assert main(command) == OutOfMemoryError.exit_code
    assert "The training is complete" in capsys.readouterr().err
    assert not run.summary()["finished"]
    assert main(command) == 0
    assert run.summary()["finished"]
    assert "Stage A is already complete" in capsys.readouterr().out
