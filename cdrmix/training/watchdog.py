"""Ends a process whose step takes far longer than its steps do, after writing the stacks of its threads to a file.

A process that waits in a collective runs no Python signal handler, and waits until the timeout of the collective. So a
thread of its own watches the time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from cdrmix.config.schema import Config
from cdrmix.errors import HangError
from cdrmix.run_folder import RunFolder
from cdrmix.training import launch
from cdrmix.training.distributed import DistributedContext

STEPS = 128  # last steps, whose median is the usual time
CHECKS = 20  # in the time that a step may take
WAIT = 3.0  # seconds from writing the stacks to the end, in which the other processes write theirs too


class Watchdog:
    """Watches the steps of a process: `begin` and `end` of each. A context manager: it watches inside only.

    timeout: seconds that a step may take; 0: `FACTOR` times the median of the last steps, and not less than `LEAST`.
    stacks: the file to write; its folder need not exist. report: receives the exit code and the message before the
    process ends with this code.
    """

    LEAST, FACTOR = 600.0, 20.0  # the first steps compile kernels, which may take minutes

    def __init__(self, timeout: float, stacks: Path, report: Callable[[int, str], None]) -> None:
        self._timeout, self._stacks, self._report = timeout, stacks, report
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._step: int | None = None  # None: between two steps
        self._started = 0.0
        self._ended = threading.Event()

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step, self._started = step, time.monotonic()

    def end(self) -> None:
        """The step has ended. What follows, such as a validation or a checkpoint, is not watched."""
        self._step = None
        self._seconds.append(time.monotonic() - self._started)

    @property
    def limit(self) -> float:
        """Seconds that the step may take."""
        if self._timeout > 0:
            return self._timeout
        usual = statistics.median(tuple(self._seconds)) if self._seconds else 0.0
        return max(self.LEAST, self.FACTOR * usual)

    def _watch(self) -> None:
        watched, seconds, before = None, 0.0, time.monotonic()
        while True:
            limit, step = self.limit, self._step
            interval = limit / CHECKS
            if self._ended.wait(interval):
                return
            now = time.monotonic()
            # A process that is stopped (Ctrl-Z, a debugger) is not hanging: its stop counts as two checks at most.
            passed, before = min(now - before, 2 * interval), now
            seconds = seconds + passed if step is not None and step == watched == self._step else 0.0
            watched = step
            if watched is not None and seconds > limit:
                self._stop(watched, seconds)

    def _stop(self, step: int, seconds: float) -> None:
        usual = f" (usually {statistics.median(tuple(self._seconds)):.3g} s)" if self._seconds else ""
        message = (
            f"cdrmix: error: step {step} has not ended for {seconds:.0f} s{usual}: a process or a device hangs. The "
            f"stacks of the processes that still run are in {self._stacks.parent}. Continue with --resume auto; for "
            "longer steps set train.hang_timeout"
        )
        with contextlib.suppress(OSError):  # the process must end, also where the disk is full
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks.open("w") as file:
                print(f"Step {step}, {seconds:.0f} s after it began:", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        self._report(HangError.exit_code, message)
        time.sleep(WAIT)
        os._exit(HangError.exit_code)


def make_watchdog(config: Config, run: RunFolder, world: DistributedContext) -> Watchdog | None:
    """The watchdog of train.hang_timeout. None: nothing is watched, with 0 also a single process without a launcher.

    A person who stops in a debugger has started the process without one.
    """
    timeout = config.train.hang_timeout
    if timeout is None or (timeout == 0 and world.size == 1 and not launch.is_worker()):
        return None

    def report(status: int, message: str) -> None:
        if launch.is_worker():
            launch.report_failure(status, message)
        else:
            print(message, file=sys.stderr, flush=True)

    return Watchdog(timeout, run.path / "stacks" / f"rank-{world.rank}.txt", report)
