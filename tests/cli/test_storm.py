"""Runs of one, two and four processes, killed at random moments and resumed, end with the files of undisturbed ones.

`make storm` makes sixty of them, `make test-all` six. Kills of one run are in test_kill.py.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import main

from cdrmix.inference.checkpoints import list_checkpoints, verify_checkpoint

Arguments = Callable[..., list[str]]
STORMS = int(os.environ.get("CDRMIX_STORMS", "6"))
LAYOUTS = {1: "train.zero_stage=0", 2: "train.zero_stage=1", 4: "train.zero_stage=3"}
SHAPE = (
    "train.steps=16",
    "train.checkpoint_every=2",
    "train.evaluate_every=16",
    "train.batch_rows=4",
)


def tensors(run: Path) -> dict[str, bytes]:
    """The files with tensors of the last checkpoint."""
    last = list_checkpoints(run / "checkpoints")[-1]
    verify_checkpoint(last)
    return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


@pytest.fixture(scope="module")
def undisturbed(arguments: Arguments, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, bytes]]:
    """What a run of so many processes ends with that nothing disturbs."""
    found: dict[int, dict[str, bytes]] = {}

    def end(processes: int) -> dict[str, bytes]:
        if processes not in found:
            root = tmp_path_factory.mktemp("undisturbed")
            count = ["--nproc", str(processes)]
            assert main(["train", *count, *arguments(*SHAPE, LAYOUTS[processes], f"run.root={root}")]) == 0
            (run,) = root.iterdir()
            found[processes] = tensors(run)
        return found[processes]

    return end


def wait_for(root: Path, pattern: str, launcher: subprocess.Popen[bytes]) -> bool:
    """Waits for a path in the run folder; False: the run has ended before."""
    while launcher.poll() is None:
        if any(root.glob(f"*/checkpoints/{pattern}")):
            return True
        time.sleep(0.0005)
    return False


@pytest.mark.long
@pytest.mark.parametrize("number", range(STORMS))
def test_a_storm(
    arguments: Arguments,
    undisturbed: Callable[[int], dict[str, bytes]],
    workers: Callable[[int], list[int]],
    tmp_path: Path,
    number: int,
) -> None:
    """Half of the kills come while a checkpoint is being written. Half of them hit a single process."""
    rng = random.Random(number)
    processes = (1, 2, 4)[number % 3]
    beside = f"train.async_checkpoints={str(rng.random() < 0.5).lower()}"
    command = [sys.executable, "-m", "cdrmix.cli", "train", "--nproc", str(processes)]
    command += arguments(*SHAPE, LAYOUTS[processes], beside, f"run.root={tmp_path}")
    expected, told = undisturbed(processes), []
    kills = rng.choice((1, 2))
    for turn in range(kills + 1):
        launcher = subprocess.Popen(
            [*command, *(["--resume", "auto"] if turn else [])], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            if turn < kills and wait_for(tmp_path, "step-*[0-9]", launcher):
                if rng.random() < 0.5:
                    wait_for(tmp_path, "step-*.tmp-*", launcher)
                else:
                    time.sleep(rng.uniform(0.0, 1.0))
                single = processes > 1 and rng.random() < 0.5
                found = workers(launcher.pid) if single else [launcher.pid]
                if launcher.poll() is None and found:
                    os.kill(rng.choice(found), signal.SIGKILL)
            told.append(launcher.wait(timeout=300))
        finally:
            launcher.kill()
        if told[-1] == 0:  # the run was faster
            break
    assert told[-1] == 0, told
    (run,) = tmp_path.iterdir()
    found = tensors(run)
    assert {name for name in found if found[name] != expected[name]} == set()
    assert found.keys() == expected.keys()
    assert not [path for path in run.rglob("*") if "tmp" in path.name], "a temporary file is left"
