"""The watcher that a training starts: it is never waited for in the loop, and it ends with the training."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.errors import CheckpointError
from cdrmix.eval.rows import last_results, lines, read_rows
from cdrmix.inference.checkpoints import list_checkpoints
from cdrmix.run_folder import RunFolder
from cdrmix.training.callbacks import Callback
from cdrmix.training.launch import OF_A_LAUNCHER
from cdrmix.watch.queue import candidate
from cdrmix.watch.watcher import pending

MOST_STARTS = 4  # of the process, if it is killed
PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL
POLL = 0.2  # seconds


class AttachedWatcher(Callback):
    """Runs `cdrmix eval watch` beside the training. A context manager; on exit the process is ended.

    It starts the process again if it was killed. The process ends by itself if the training does, however that ends.
    """

    def __init__(self, run: RunFolder, config: Config) -> None:
        self._run, self._section = run, config.evaluation
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._active = run.writes and config.evaluation.start and bool(config.evaluation.suites)

    def __enter__(self) -> AttachedWatcher:
        if self._active:
            suites = ", ".join(self._section.suites)
            self._run.say(f"Checkpoints are evaluated beside the training: {suites}; results in {self._run.evaluation}")
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def on_checkpoint(self, checkpoint: Path) -> None:
        """Starts the process again if it was killed."""
        self._is_running()

    def finish(self) -> None:
        """Waits for the evaluation of the last checkpoint, up to `evaluation.wait` seconds, and ends the process.

        Stores and prints the newest results of every suite.
        """
        if self._active and self._is_running() and self._left():
            self._run.say(
                f"Waiting for the evaluation of the last checkpoint, up to {self._section.wait:g} s (evaluation.wait)"
            )
            until = time.monotonic() + self._section.wait
            while time.monotonic() < until and self._is_running() and self._left():
                time.sleep(POLL)
        self._end()
        rows = read_rows(self._run.evaluation_rows)
        if results := last_results(rows):
            self._run.update_summary({"evaluation": results})
            self._run.say("\n".join(["Suites on checkpoints:", *lines(results)]))
        if self._active and (left := self._left()):
            self._run.say(
                f"Not evaluated on the last checkpoint: {', '.join(left)}. `cdrmix eval watch {self._run.path} --once` "
                "does it"
            )
        for row in rows:
            if row["status"] == "failed":
                self._run.say(f"Step {row['step']}, {row['suite'] or 'all suites'}: not evaluated: {row['reason']}")

    def _start(self) -> None:
        """Starts the process. If the system cannot, the run goes on without it."""
        self._starts += 1
        environment: dict[str, Any] = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
        environment["PYTHONSAFEPATH"] = "1"  # see `launch`
        command = [sys.executable, "-m", "cdrmix.cli", "eval", "watch", str(self._run.path.absolute())]
        try:
            self._run.evaluation.mkdir(exist_ok=True)
            with (self._run.evaluation / "watch.log").open("ab") as log:
                # A session of its own: Ctrl-C reaches the training alone, which ends it.
                self._process = subprocess.Popen(
                    [*command, "--parent", str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            self._run.say(f"Checkpoints are not evaluated: {error}. The training goes on")

    def _is_running(self) -> bool:
        """Whether the process runs. If a signal has ended it, it is started again; if it failed, the run goes on."""
        if self._process is None:
            return False
        status = self._process.poll()
        if status is None:
            return True
        self._process = None
        log = self._run.evaluation / "watch.log"
        if status < 0 and self._starts < MOST_STARTS:
            self._run.say(f"The process that evaluates checkpoints was ended by signal {-status}; it is started again")
            self._start()
            return self._process is not None
        if status != 0:
            self._run.say(f"The process that evaluates checkpoints has ended with exit code {status}: see {log}")
        return False

    def _left(self) -> list[str]:
        """The suites that are not done on the last checkpoint."""
        rows = read_rows(self._run.evaluation_rows)
        for checkpoint in reversed(list_checkpoints(self._run.checkpoints)):
            with contextlib.suppress(CheckpointError):
                last = candidate(checkpoint)
                return pending(rows, last.step, last.sha256, self._section)
        return []

    def _end(self) -> None:
        """Ends the process: SIGTERM, which it records, and SIGKILL if it does not react."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
