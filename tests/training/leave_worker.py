"""One process of a training under test, which then counts its threads of gloo before and after what runs at exit."""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # conftest.py keeps it off the path of child processes

from worker import train

from cdrmix.training.launch import exit_worker


def gloo_threads() -> int:
    """How many threads of gloo this process has."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            found += "gloo" in (task / "comm").read_text()
    return found


def threads_that_stay() -> int:
    """How many threads of gloo this process still has after ten seconds. The kernel lists a thread that has been joined
    until the thread has run once more, which on a busy machine is later."""
    end = time.monotonic() + 10.0
    while (found := gloo_threads()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def leave(order: dict[str, Any]) -> int:
    """Trains, and prints the number of gloo's threads now and after all other functions that run at exit."""
    atexit.register(lambda: print("after:", threads_that_stay()))  # the first to be registered runs last
    status = train(order)
    print("before:", gloo_threads())
    return status


if __name__ == "__main__":
    exit_worker(leave(json.loads(sys.argv[1])))
