"""Resumable stages: runs the stages of a preparation in a working folder and skips tasks that are finished.

A stage is a function and its tasks. A task writes its files first and then its result as JSON. When all tasks are
finished, their results are collected in one file. So a preparation that was killed at any time runs the missing tasks.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cdrmix.data.pipeline.executor import Executor
from cdrmix.durable import wait_for_lock, wait_until, write_atomically
from cdrmix.json_text import parse_json

Task = TypeVar("Task")
Say = Callable[[str], None]

PROGRESS_INTERVAL_SECONDS = 10.0
MIN_REPORTED_SECONDS = 1.0
HEARTBEAT_SECONDS = 5.0
HEARTBEAT_TIMEOUT_SECONDS = 60.0
STALE_AFTER_SECONDS = 7 * 24 * 60 * 60.0


@dataclass
class Progress:
    """Reports the progress of a stage at intervals, and its speed at the end."""

    say: Say
    name: str
    tasks: int | None = None  # None: unknown
    done: int = 0
    bytes: int = 0
    started: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)

    def add(self, size: int) -> None:
        """Counts a finished task and the bytes of text that it processed."""
        self.bytes += size
        self.done += 1
        if time.monotonic() - self.last >= PROGRESS_INTERVAL_SECONDS:
            self.last = time.monotonic()
            parts = [f"{self.done:,} of {self.tasks:,} tasks"] if self.tasks else []
            parts += [f"{self.bytes / 1e6:,.0f} MB, {self.rate():,.1f} MB/s"] if self.bytes else []
            self.say(f"  {self.name}: {'; '.join(parts)}")

    def end(self) -> None:
        """Reports the speed of the stage, if it took at least MIN_REPORTED_SECONDS."""
        seconds = time.monotonic() - self.started
        if seconds >= MIN_REPORTED_SECONDS:
            speed = f"{self.bytes / 1e6:,.1f} MB, {self.rate():,.1f} MB/s, " if self.bytes else ""
            self.say(f"  {self.name}: {speed}{seconds:,.1f} s")

    def rate(self) -> float:
        """Megabytes per second since the start of the stage."""
        return self.bytes / 1e6 / max(time.monotonic() - self.started, 1e-9)


class StageRunner:
    """Runs stages in a working folder. Only one process may use the folder at a time."""

    def __init__(self, folder: Path, executor: Executor, say: Say) -> None:
        self.folder, self.executor, self.say = folder, executor, say
        folder.mkdir(parents=True, exist_ok=True)
        for left_behind in folder.rglob(".*.tmp"):
            left_behind.unlink(missing_ok=True)

    def folder_of(self, stage: str) -> Path:
        """The folder for the files of a stage."""
        folder = self.folder / stage
        folder.mkdir(exist_ok=True)
        return folder

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """The result of `make`, JSON. It is computed once and stored in a file."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            write_atomically(path, json.dumps(make()))
        return parse_json(path.read_bytes())

    def stage(
        self, name: str, function: Callable[[Task], dict[str, Any]], tasks: Iterable[Task], *, about: str
    ) -> list[dict[str, Any]]:
        """The results of the tasks, in their order. `function` must write its files before it returns.

        A result may have the key "bytes": the size of the processed text. about: name of the stage in messages.
        """

        def make() -> dict[str, Any]:
            folder = self.folder_of(f"{name}.results")
            numbered = [(folder / f"{number:06d}.json", task) for number, task in enumerate(tasks)]
            missing = [(path, task) for path, task in numbered if not path.exists()]
            progress = Progress(self.say, about, len(missing))
            for size in self.executor.run(partial(_run, function), missing):
                progress.add(size)
            progress.end()
            results = [parse_json(path.read_bytes()) for path, _ in numbered]
            return {
                "results": results,
                "seconds": time.monotonic() - progress.started,
                "cpu_seconds": sum(result.pop("cpu_seconds") for result in results),
                "bytes": progress.bytes,
            }

        made = self.cached(name, make)
        shutil.rmtree(self.folder / f"{name}.results", ignore_errors=True)
        return list(made["results"])

    def task_count(self, name: str, otherwise: int) -> int:
        """The number of tasks of a finished stage; otherwise `otherwise`.

        Results of an unfinished stage with another number of tasks are deleted: the number depends on data.memory_mb,
        which the user may change between two attempts.
        """
        path = self.folder / f"{name}.json"
        if path.exists():
            return len(parse_json(path.read_bytes())["results"])
        begun = self.folder / f"{name}.tasks"
        if not begun.exists() or begun.read_text() != str(otherwise):
            self.remove(f"{name}.results")
            write_atomically(begun, str(otherwise))
        return otherwise

    def timings(self) -> dict[str, dict[str, float]]:
        """By stage: seconds, cpu_seconds of its tasks, bytes of processed text."""
        timings = {}
        for path in sorted(self.folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
            content = parse_json(path.read_bytes())
            if isinstance(content, dict) and "seconds" in content:
                timings[path.stem] = {name: content[name] for name in ("seconds", "cpu_seconds", "bytes")}
        return timings

    def remove(self, stage: str) -> None:
        """Deletes the files of a stage."""
        shutil.rmtree(self.folder / stage, ignore_errors=True)


def _run(function: Callable[[Any], dict[str, Any]], task: tuple[Path, Any]) -> int:
    path, content = task
    begun = time.process_time()
    result = function(content)
    write_atomically(path, json.dumps({**result, "cpu_seconds": time.process_time() - begun}))
    return int(result.get("bytes", 0))


@contextmanager
def exclusive_lock(lock: Path, say: Say) -> Iterator[None]:
    """A context that one process at a time can enter. The lock of a process that dies is released at once.

    On some network file systems, locks do not work between machines. So the holder writes its host name to the lock
    file and updates the modification time every HEARTBEAT_SECONDS. Another machine waits until the heartbeat is too
    old.
    """
    me = f"{socket.gethostname()} {os.getpid()}"
    with lock.open("a+") as file:

        def waiting(seconds: float = 0.0) -> None:
            say(f"{_holder(lock)} is preparing this text; waiting for it")

        def free() -> bool:
            holder = lock.read_text().split()
            return not holder or holder[0] == me.split()[0] or _age(lock) >= HEARTBEAT_TIMEOUT_SECONDS

        wait_for_lock(file, waiting)
        wait_until(free, math.inf, waiting, first=0.0)
        lock.write_text(me)
        stop = threading.Event()

        def heartbeat() -> None:
            while not stop.wait(HEARTBEAT_SECONDS):
                os.utime(lock)

        thread = threading.Thread(target=heartbeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            lock.write_text("")


def _holder(lock: Path) -> str:
    host, _, process = lock.read_text().partition(" ")
    return f"Process {process} on {host}" if process else "Another process"


def remove_stale_folders(cache: Path) -> None:
    """Deletes working folders that no process uses and that have not changed for a week."""
    for work_folder in cache.glob(".*.work"):
        lock = work_folder.with_suffix(".lock")
        if min(_age(path) for path in (work_folder, *work_folder.glob("*"))) < STALE_AFTER_SECONDS:
            continue
        with lock.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(work_folder, ignore_errors=True)


def _age(path: Path) -> float:
    """Seconds since the last modification of a file; 0 if it does not exist."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
