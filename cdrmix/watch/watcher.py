"""`cdrmix eval watch`: waits for checkpoints of a run, and measures each suite on the newest one in its own process.

The queue has one place: a newer checkpoint replaces the one that waits. What happens to a checkpoint is a row of
eval/metrics.jsonl (see eval/rows.py), also that it was skipped, or that a process failed or was killed. A watcher that
starts again goes on from these rows and from the queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.config.schema_evaluation import Evaluation
from cdrmix.durable import lock_file, write_atomically
from cdrmix.errors import CheckpointError, ConfigError
from cdrmix.eval.rows import last_results, lines, read_rows
from cdrmix.eval.suites import SuiteOptions
from cdrmix.json_text import parse_json
from cdrmix.records import end_last_line
from cdrmix.run_folder import RunFolder
from cdrmix.runtime import device_type
from cdrmix.training.faults import StopRequest
from cdrmix.units import utc_now
from cdrmix.watch.priority import end_with_parent, lower_priority
from cdrmix.watch.queue import Candidate, Due, Queue
from cdrmix.watch.worker import Job

POLL = 0.5  # seconds between two looks at the checkpoints and at the process that evaluates
MOST_INTERRUPTIONS = 2  # after so many the evaluation of a suite on a checkpoint counts as failed
OPTIONS = {field.name for field in dataclasses.fields(SuiteOptions)}  # keys of the section with the same names
Say = Callable[[str], None]


def check_evaluation(section: Evaluation) -> None:
    """Raises ConfigError if the suites cannot be measured on this machine: the device, or the folder of the sets."""
    device_type(section.device, "evaluation.device")
    if section.sets is not None and not Path(section.sets).is_dir():
        raise ConfigError(
            f"evaluation.sets: there is no folder {section.sets}; name one with the wheels of the data sets, or null"
        )
    for name, path in (("canaries", section.canaries), ("policy", section.policy)):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"evaluation.{name}: there is no file {path}; name one with a JSON object on each line")


def options_of(section: Evaluation) -> dict[str, Any]:
    """The options of the suites, as rows have them."""
    return section.model_dump(mode="json", include=OPTIONS)


def pending(rows: list[dict[str, Any]], step: int, sha256: str, section: Evaluation) -> list[str]:
    """The suites that are neither measured on a checkpoint, with these options, nor failed."""
    options = options_of(section)
    done = {
        row["suite"]
        for row in rows
        if (row["step"], row["sha256"]) == (step, sha256)
        and row["status"] in ("measured", "failed")
        and (row["suite"] is None or row["options"] == options)
    }
    return [suite for suite in section.suites if suite not in done and None not in done]


def watch(run: RunFolder, config: Config, *, once: bool, parent: int | None, say: Say) -> bool:
    """Evaluates checkpoints of a run until the run is finished, or a signal comes. Returns whether none has failed.

    once: only the newest one that is there. parent: id of the training process that started this one; it ends with it.
    Raises ConfigError without suites, and if another process watches the run.
    """
    section = config.evaluation
    if not section.suites:
        raise ConfigError(
            f"{run.path}: evaluation.suites is empty; name suites by --suite, for example --suite code, or in the "
            "configuration of the run"
        )
    check_evaluation(section)
    with StopRequest() as stop, _locked(run):
        if parent is not None:
            end_with_parent(parent, signal.SIGTERM)
            lower_priority(section.niceness, section.threads)
        watcher = _Watcher(run, config, say)
        watcher.watch(once, stop)
    return not watcher.failed


def keep_results(run: RunFolder) -> None:
    """Stores the newest results in metrics.json, unless a training is under way, which does it at its end."""
    results = last_results(read_rows(run.evaluation_rows))
    with contextlib.suppress(ConfigError), run.locked():
        run.update_summary({"evaluation": results})


@contextlib.contextmanager
def _locked(run: RunFolder) -> Iterator[None]:
    """Raises ConfigError if another process watches the run, also on another machine."""
    path = run.evaluation / "lock"
    try:
        run.evaluation.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"{run.evaluation} is a file; the results of suites need a folder of this name") from error
    with path.open("a+", encoding="utf-8") as file:

        def other() -> str:
            file.seek(0)
            began = file.read().strip() or "it just began"
            return f"{run.path}: another `cdrmix eval watch` works on this run: {began}"

        lock_file(file, other)
        file.truncate(0)
        file.write(f"{_process()}, since {utc_now()}\n")
        file.flush()
        yield


def _process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


class _Watcher:
    """The state of a watcher. failed: whether an evaluation has failed."""

    def __init__(self, run: RunFolder, config: Config, say: Say) -> None:
        self._run, self._section, self._due, self._say = run, config.evaluation, Due(config), say
        self._log, self._state = run.evaluation / "watch.log", run.evaluation / "state.json"
        self._result = run.evaluation / "result.json"
        self._options = options_of(self._section)
        self._rows = read_rows(run.evaluation_rows)
        self._queue = Queue(run.evaluation / "queue")
        self._waiting: Candidate | None = None
        self._current: Candidate | None = None
        self._suite = ""
        self._worker: subprocess.Popen[bytes] | None = None
        self._began, self._logged = 0.0, 0
        self.failed = False

    def watch(self, once: bool, stop: StopRequest) -> None:
        self._recover()
        self._look()
        if once and self._waiting is None:
            self._say(f"{self._run.path}: there is no checkpoint to evaluate; each one that is due has its rows")
        elif not once:
            self._say(f"Waiting for checkpoints of {self._run.path}: suites {', '.join(self._section.suites)}")
        while not stop.requested:
            if self._worker is not None:
                self._check_worker()
            if self._worker is None:
                self._next()
            if self._worker is None:
                finished = self._run.finished
                if not once:
                    self._look()
                if self._waiting is None and (once or finished):
                    return
            time.sleep(POLL)
            if not once:
                self._look()
        self._stop()

    def _recover(self) -> None:
        """Records what a former watcher could not, and takes the newest checkpoint that it left in the queue."""
        if self._state.is_file():
            state = parse_json(self._state.read_text(encoding="utf-8"))
            before = state["options"] == self._options and [
                row
                for row in self._rows
                if row["status"] == "interrupted"
                and all(row[key] == state[key] for key in ("step", "sha256", "suite", "options"))
            ]
            last = bool(before) and len(before or ()) + 1 >= MOST_INTERRUPTIONS
            reason = f"the watcher ({state['process']}) was killed during this evaluation"
            status = "failed" if last else "interrupted"
            more = f"; so were {len(before or ())} before, and it is not tried again" if last else ""
            self._append(state | {"status": status, "reason": reason + more})
            self._state.unlink()
        for left in self._queue.left():
            self._wait_for(left)

    def _look(self) -> None:
        """Puts the newest due checkpoint into the queue, if it is not evaluated yet."""
        found = self._due.newest(self._run.checkpoints, self._damaged)
        if found is None or found[1:] in [known[1:] for known in (self._current, self._waiting) if known]:
            return
        if self._current is not None and found.step == self._current.step:
            return  # the run was resumed before it and has made it again; it is taken when the other one is done
        if not pending(self._rows, found.step, found.sha256, self._section):
            return
        if self._waiting is not None and found.step == self._waiting.step:
            self._queue.remove(self._waiting)
            self._waiting = None
        try:
            taken = self._queue.take(found)
        except CheckpointError as error:
            if found.folder.is_dir():  # else it was removed while it was linked
                self._damaged(found.folder, str(error), found.sha256)
            return
        self._wait_for(taken)

    def _damaged(self, checkpoint: Path, reason: str, sha256: str | None = None) -> None:
        """Records a checkpoint that cannot be linked, once."""
        facts = {"step": int(checkpoint.name.rpartition("-")[2]), "sha256": sha256, "suite": None, "status": "failed"}
        if not any(all(row[key] == value for key, value in facts.items()) for row in self._rows):
            self._append(facts | {"reason": reason})

    def _wait_for(self, taken: Candidate) -> None:
        """Makes a checkpoint of the queue the one that waits, unless it is done; the newest wins."""
        if not pending(self._rows, taken.step, taken.sha256, self._section):
            self._queue.remove(taken)
            return
        if self._waiting is not None:
            self._queue.remove(self._waiting)
            self._skipped(self._waiting.step, self._waiting.sha256, taken.step)
        self._waiting = taken

    def _skipped(self, step: int, sha256: str | None, newer: int) -> None:
        reason = f"the checkpoint of step {newer} was there before this one could be evaluated"
        self._append({"step": step, "sha256": sha256, "suite": None, "status": "skipped", "reason": reason})

    def _next(self) -> None:
        """Begins the next suite of the current checkpoint, or the checkpoint that waits."""
        if self._current is None and self._waiting is not None:
            self._current, self._waiting = self._waiting, None
            with_rows = {row["step"] for row in self._rows}
            for step in self._due.before(self._current.step):
                if step not in with_rows:
                    self._skipped(step, None, self._current.step)
        if self._current is None:
            return
        suites = pending(self._rows, self._current.step, self._current.sha256, self._section)
        if suites:
            self._begin(self._current, suites[0])
        else:
            self._queue.remove(self._current)
            self._current = None

    def _begin(self, current: Candidate, suite: str) -> None:
        self._suite, self._began = suite, time.monotonic()
        self._result.unlink(missing_ok=True)
        state = self._facts() | {"process": _process()}
        write_atomically(self._state, json.dumps(state) + "\n")
        section = self._section
        job = Job(
            str(current.folder),
            suite,
            self._options,
            section.device,
            section.niceness,
            section.threads,
            str(self._result),
            os.getpid(),
        )
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(section.threads))
        # Without PYTHONSAFEPATH `-m` puts the current folder on sys.path, where kernels/ may hide a PyPI package.
        environment = os.environ | threads | {"PYTHONSAFEPATH": "1"}
        with self._log.open("ab") as log:
            self._logged = log.tell()
            command = [sys.executable, "-m", "cdrmix.watch.worker", json.dumps(job._asdict())]
            self._worker = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self._say(f"Evaluating {suite} on step {current.step}")

    def _check_worker(self) -> None:
        """Records the result of the process that evaluates, if it has ended."""
        assert self._worker is not None
        status = self._worker.poll()
        if status is None:
            if time.monotonic() - self._began > self._section.timeout:
                self._kill()
                self._failed(f"it took more than {self._section.timeout:g} s (evaluation.timeout)")
            return
        self._worker = None
        if status == 0 and self._result.is_file():
            result = parse_json(self._result.read_text(encoding="utf-8"))
            self._done({"status": "measured", "reason": None} | result)
            self._say("\n".join(lines({self._suite: self._rows[-1]})))
        elif status < 0:
            name = signal.Signals(-status).name
            exhausted = ", which the system sends when memory is exhausted" if -status == signal.SIGKILL else ""
            self._failed(f"the process was ended by {name}{exhausted}")
        else:
            self._failed(f"{self._last_line()} (exit code {status}; {self._log} has more)")

    def _last_line(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._logged)
            said = log.read().decode("utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(said) if line.strip()), "the process gave no reason")

    def _failed(self, reason: str) -> None:
        self._done({"status": "failed", "reason": reason})
        self._say(f"{self._suite} on step {self._rows[-1]['step']} failed: {reason}")
        self.failed = True

    def _done(self, facts: dict[str, Any]) -> None:
        self._append(self._facts() | {"seconds": round(time.monotonic() - self._began, 1)} | facts)
        self._state.unlink(missing_ok=True)
        self._result.unlink(missing_ok=True)

    def _facts(self) -> dict[str, Any]:
        """What a row has of the evaluation that is under way."""
        assert self._current is not None
        return {
            "step": self._current.step,
            "sha256": self._current.sha256,
            "suite": self._suite,
            "options": self._options,
            "device": self._section.device,
        }

    def _stop(self) -> None:
        """Ends the process that evaluates. The checkpoint stays in the queue for the next watcher."""
        if self._worker is not None:
            self._kill()
            self._done({"status": "stopped", "reason": "the watcher was told to end"})
        self._say("The watcher ends, as it was told to")

    def _kill(self) -> None:
        assert self._worker is not None
        self._worker.kill()
        self._worker.wait()
        self._worker = None

    def _append(self, row: dict[str, Any]) -> None:
        """Writes a row and flushes it to the disk."""
        row = {"options": self._options, "measures": [], **row, "time": utc_now()}
        row.pop("process", None)
        self._rows.append(row)
        path = self._run.evaluation_rows
        end_last_line(path)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
