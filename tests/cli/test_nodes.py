"""Several machines: a launcher for each, here all on this one. Same bits as one machine, one end, clear messages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from in_process import main

from cdrmix.errors import ConfigError
from cdrmix.inference.checkpoints import list_checkpoints
from cdrmix.training import distributed
from cdrmix.training.distributed import DistributedContext
from cdrmix.training.launch import CRASHED, Nodes

Arguments = Callable[..., list[str]]
Wait = Callable[[Path], Path]
Workers = Callable[[int], list[int]]
LONG = ("train.steps=4000", "train.checkpoint_every=5", "train.evaluate_every=4000")


@contextmanager
def launched(arguments: list[str], *more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The launchers of two machines, with one process each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"localhost:{probe.getsockname()[1]}"
    launchers = []
    for rank in range(2):
        command = [sys.executable, "-m", "cdrmix.cli", "train", "--nnodes", "2", "--node-rank", str(rank)]
        command += ["--rendezvous", where, *arguments, *more]
        launchers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    try:
        yield launchers
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()


def ends(launchers: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and standard error of each."""
    with ThreadPoolExecutor(len(launchers)) as pool:  # at once: one whose output nobody reads would wait
        errors = [error for _, error in pool.map(lambda each: each.communicate(timeout=200), launchers)]
    return [(launcher.returncode, error) for launcher, error in zip(launchers, errors, strict=True)]


def last_step(run: Path) -> int:
    """The step of the newest checkpoint."""
    return int(list_checkpoints(run / "checkpoints")[-1].name.removeprefix("step-"))


@pytest.mark.long
def test_two_machines_train_as_one_with_two_processes(arguments: Arguments, tmp_path: Path) -> None:
    with launched(arguments(f"run.root={tmp_path / 'two'}")) as launchers:
        assert [status for status, _ in ends(launchers)] == [0, 0]
    assert main(["train", "--nproc", "2", *arguments(f"run.root={tmp_path / 'one'}")]) == 0
    (two,), (one,) = (tmp_path / "two").iterdir(), (tmp_path / "one").iterdir()
    assert main(["compare", str(one), str(two)]) == 0

    launcher = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", "2", "--no_local_rank"]
    command = [*launcher, "--module", "cdrmix.cli", "train", *arguments(f"run.root={tmp_path / 'deepspeed'}")]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (by_deepspeed,) = (tmp_path / "deepspeed").iterdir()
    assert main(["compare", str(one), str(by_deepspeed)]) == 0


@pytest.mark.slow
def test_a_killed_process_ends_all_machines_with_one_message_each(
    arguments: Arguments, tmp_path: Path, wait_for_checkpoint: Wait, workers: Workers
) -> None:
    with launched(arguments(f"run.root={tmp_path}", *LONG)) as launchers:
        wait_for_checkpoint(tmp_path)
        (victim,) = workers(launchers[1].pid)
        os.kill(victim, signal.SIGKILL)
        for status, error in ends(launchers):
            assert status == 1
            assert error.strip().endswith(CRASHED)
            assert "Traceback" not in error


@pytest.mark.long
def test_a_signal_to_one_machine_stops_all_of_them_after_a_checkpoint(
    arguments: Arguments, tmp_path: Path, wait_for_checkpoint: Wait
) -> None:
    with launched(arguments(f"run.root={tmp_path}", *LONG)) as launchers:
        run = wait_for_checkpoint(tmp_path)
        launchers[1].send_signal(signal.SIGTERM)
        assert [status for status, _ in ends(launchers)] == [75, 75]
    saved = last_step(run)
    with launched(arguments(f"run.root={tmp_path}", *LONG), "--resume", "auto") as launchers:
        deadline = time.monotonic() + 120
        while last_step(run) < saved + 5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_one_machine_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two ranks, which are threads here; the path of the second does not exist."""
    store = dist.HashStore()
    monkeypatch.setattr(distributed, "rendezvous_store", lambda rank, size: store)
    monkeypatch.setattr(distributed, "SHARED_FOLDER_WAIT", 0.2)

    def check(rank: int) -> str:
        world = DistributedContext(rank, 2, rank, torch.device("cpu"))
        try:
            distributed.check_shared(world, tmp_path if rank == 0 else tmp_path / "nowhere", "run.root")
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(check, range(2)))
    for message in said:
        assert message.startswith("run.root: ")
        assert f"does not exist on {os.uname().nodename}; all machines of a run must share this folder" in message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((2, None, "a:1"), "--node-rank: needed with --nnodes 2, the number of this machine: 0 to 1"),
        ((2, 2, "a:1"), "--node-rank: needed with --nnodes 2"),
        ((2, 0, None), "--rendezvous: needed with --nnodes 2, as HOST:PORT"),
        ((2, 0, "a:0"), "found a:0"),
        ((2, 0, ":29500"), "found :29500"),
        ((1, 1, None), "allowed with --nnodes above 1 only"),
        ((1, None, "a:1"), "allowed with --nnodes above 1 only"),
    ],
)
def test_options_that_are_refused(options: tuple[int, int | None, str | None], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Nodes.of(*options)
    assert said in str(caught.value)


def test_the_processes_of_all_machines_are_counted(arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    several = ["--nproc", "3", "--nnodes", "2", "--node-rank", "0", "--rendezvous", "localhost:1"]
    assert main(["train", *several, *arguments()]) == 2
    assert "times the 6 processes" in capsys.readouterr().err
