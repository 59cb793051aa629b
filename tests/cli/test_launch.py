"""Tests of the launcher: signals reach every worker once and at any time, failures are reported once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdrmix.training import launch

# Counts the signals it gets until 0.3 s after the first, and reports them.
WORKER = """
import os, signal, sys, time
from pathlib import Path
from cdrmix.training import launch
caught = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: caught.append(number))
launch.begin_work()
Path(os.environ["CDRMIX_LAUNCH"], f"ready-{os.getpid()}").touch()
while not caught:
    time.sleep(0.02)
time.sleep(0.3)
launch.report_failure(75, f"stopped by {len(caught)} signal")
launch.end_work()
"""

# launch() with two processes of the code in argv[1] in place of the command line.
LAUNCHER = """
import subprocess, sys
from cdrmix.training import launch
class Worker(subprocess.Popen):
    def __init__(self, command, env, start_new_session):
        super().__init__([sys.executable, "-c", sys.argv[1]], env=env, start_new_session=start_new_session)
        if env["RANK"] == "0":
            print(env["CDRMIX_LAUNCH"], flush=True)
launch.subprocess.Popen = Worker
launch.LAST_WORDS = 0.2
status, message = launch.launch(2, [])
print(message)
sys.exit(status)
"""


def start_launcher(worker: str) -> tuple[subprocess.Popen[str], Path]:
    """A launcher of two workers, and the folder in which they meet."""
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, worker], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def wait_for(folder: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that begins with the folder tmp_path."""
    process = subprocess.Popen([sys.executable, "-c", WORKER], env=os.environ | {launch.FOLDER: str(tmp_path)})
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_every_worker_once(number: signal.Signals) -> None:
    process, folder = start_launcher(WORKER)
    wait_for(folder, "ready-*", 2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.strip()) == (75, "stopped by 1 signal")


def test_a_signal_before_any_worker_has_begun_ends_the_run_at_once() -> None:
    process, _ = start_launcher("import time; time.sleep(300)")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.strip()) == (130, "cdrmix: interrupted")


def test_a_finished_worker_does_not_keep_the_signal_from_the_others(
    tmp_path: Path, worker: subprocess.Popen[bytes]
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f"{gone.pid}.pid").touch()  # it was killed, so that it could not take leave
    wait_for(tmp_path, "ready-*", 1)
    assert launch.signal_workers(tmp_path, signal.SIGTERM)
    assert worker.wait(timeout=60) == 0
    assert json.loads((tmp_path / "failure.json").read_text())["message"] == "stopped by 1 signal"
    # It took leave: its number, which another process may have by now, is signalled no more.
    assert (tmp_path / f"{worker.pid}.done").exists()
    assert not (tmp_path / f"{worker.pid}.pid").exists()
    (tmp_path / f"{gone.pid}.pid").unlink()
    assert launch.signal_workers(tmp_path, signal.SIGTERM)  # the run is ending, it must not be cut off


def test_a_worker_that_begins_after_the_signal_gets_it_once(tmp_path: Path) -> None:
    assert not launch.signal_workers(tmp_path, signal.SIGTERM)
    environment = os.environ | {launch.FOLDER: str(tmp_path)}
    subprocess.run([sys.executable, "-c", WORKER], env=environment, check=True, timeout=60)
    assert json.loads((tmp_path / "failure.json").read_text())["message"] == "stopped by 1 signal"


def test_a_command_interrupted_before_it_begins_says_so_and_takes_leave(tmp_path: Path) -> None:
    launch.signal_workers(tmp_path, signal.SIGINT)
    environment = os.environ | {launch.FOLDER: str(tmp_path)}
    command = [sys.executable, "-m", "cdrmix.cli", "train", "--config", "nowhere.yaml"]
    assert subprocess.run(command, env=environment, check=False, timeout=60).returncode == 0  # as the others do
    assert json.loads((tmp_path / "failure.json").read_text())["status"] == 130
    assert len(list(tmp_path.glob("*.done"))) == 1


def test_a_worker_ends_without_finalising_the_interpreter(tmp_path: Path) -> None:
    """During finalisation, a thread of gloo that frees tensors aborts the process: one run in dozens, under load."""
    command = [sys.executable, "-m", "cdrmix.cli", "train", "--config", "nowhere.yaml"]
    verbose = os.environ | {"PYTHONVERBOSE": "1"}  # prints "# cleanup" when modules are cleared
    worker, alone = (
        subprocess.run(command, env=environment, check=False, timeout=120, capture_output=True, text=True)
        for environment in (verbose | {launch.FOLDER: str(tmp_path)}, verbose)
    )
    assert worker.returncode == alone.returncode == 2
    assert "# cleanup" in alone.stderr
    assert "# cleanup" not in worker.stderr
    assert len(list(tmp_path.glob("*.done"))) == 1


def test_the_first_failure_is_the_one_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.FOLDER, str(tmp_path))
    launch.report_failure(9, "the cause")
    launch.report_failure(1, "a consequence")
    assert json.loads((tmp_path / "failure.json").read_text()) == {"status": 9, "message": "the cause"}
