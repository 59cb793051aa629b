"""A step that hangs ends its processes, with the stacks of all threads; one that was stopped does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdrmix.errors import HangError
from cdrmix.training.watchdog import Watchdog

# One step that ends as soon as the process has been told to.
STEP = """
import sys
from pathlib import Path
from cdrmix.training.watchdog import Watchdog
with Watchdog(2.0, Path(sys.argv[1]), lambda status, message: print(message, flush=True)) as watchdog:
    watchdog.begin(1)
    print("begun", flush=True)
    sys.stdin.readline()
    watchdog.end()
"""


@pytest.mark.slow
def test_every_process_writes_its_stacks(work: Callable[..., list[Any]], tmp_path: Path) -> None:
    finished = work("hang", tmp_path, "train.micro_batch_rows=4", processes=2, script="fault_worker.py")
    for process in finished:
        assert process.returncode == HangError.exit_code, process.stdout
        assert "cdrmix: error: step 4 has not ended for" in process.stdout
        assert "set train.hang_timeout" in process.stdout
    first, second = (path.read_text() for path in sorted((tmp_path / "hangs" / "stacks").iterdir()))
    assert first.startswith("Step 4, ")
    assert "act_then_answer" in first, "rank 0 sleeps"
    assert "act_then_answer" not in second
    assert "reduction.py" in second, "rank 1 waits for its gradients"


@pytest.mark.slow
def test_a_process_that_is_stopped_for_longer_goes_on(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks" / "rank-0.txt"
    command = [sys.executable, "-c", STEP, str(stacks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate("end\n", timeout=60)
    assert (process.returncode, output) == (0, "")
    assert not stacks.exists()


def test_the_limit_follows_the_median(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog = Watchdog(0, tmp_path / "stacks", lambda status, message: None)
    assert watchdog.limit == Watchdog.LEAST, "before the first step"
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step, seconds in enumerate((900.0, 100.0, 101.0, 99.0, 102.0)):  # the first compiles
        watchdog.begin(step)
        now += seconds
        watchdog.end()
    assert watchdog.limit == 20 * 101.0
    assert Watchdog(5.0, tmp_path / "stacks", lambda status, message: None).limit == 5.0
