"""The folder of a preparation that is under way: stages whose tasks leave whole files, and are passed over when there.

A stage is a function and its tasks. A task's result, JSON, is written behind its files; the results of a stage are
gathered in one file when all are there. So a preparation that was killed at any moment goes on with what is missing.
"""

from __future__ import annotations

import fcntl
import json
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
from cdrmix.durable import write_atomically

Task = TypeVar("Task")
Say = Callable[[str], None]

PROGRESS_INTERVAL_SECONDS = 10.0
MIN_REPORTED_SECONDS = 1.0
HEARTBEAT_SECONDS = 5.0  # of life, by the process that prepares
HEARTBEAT_TIMEOUT_SECONDS = 60.0  # without one
STALE_AFTER_SECONDS = 7 * 24 * 60 * 60.0


@dataclass
class Progress:
    """Says from time to time how far a stage is, and at its end how fast it was."""

    say: Say
    name: str
    tasks: int | None = None  # where their number is known
    done: int = 0
    bytes: int = 0
    started: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)

    def add(self, size: int) -> None:
        """Count a task, and the bytes of text that it went through."""
        self.bytes += size
        self.done += 1
        if time.monotonic() - self.last >= PROGRESS_INTERVAL_SECONDS:
            self.last = time.monotonic()
            told = [f"{self.done:,} of {self.tasks:,} tasks"] if self.tasks else []
            told += [f"{self.bytes / 1e6:,.0f} MB, {self.rate():,.1f} MB/s"] if self.bytes else []
            self.say(f"  {self.name}: {'; '.join(told)}")

    def end(self) -> None:
        """Say how fast the stage was, unless it was over at once."""
        seconds = time.monotonic() - self.started
        if seconds >= MIN_REPORTED_SECONDS:
            speed = f"{self.bytes / 1e6:,.1f} MB, {self.rate():,.1f} MB/s, " if self.bytes else ""
            self.say(f"  {self.name}: {speed}{seconds:,.1f} s")

    def rate(self) -> float:
        """Megabytes a second since the stage began."""
        return self.bytes / 1e6 / max(time.monotonic() - self.started, 1e-9)


class StageRunner:
    """The folder, and the engine that runs tasks. One process at a time holds it."""

    def __init__(self, folder: Path, engine: Executor, say: Say) -> None:
        self.folder, self.executor, self.say = folder, engine, say
        folder.mkdir(parents=True, exist_ok=True)
        for left_behind in folder.rglob(".*.tmp"):
            left_behind.unlink(missing_ok=True)

    def folder_of(self, stage: str) -> Path:
        """The folder of a stage's files."""
        folder = self.folder / stage
        folder.mkdir(exist_ok=True)
        return folder

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, JSON, made once: kept in a file."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            write_atomically(path, json.dumps(make()))
        return json.loads(path.read_bytes())

    def stage(
        self,
        name: str,
        function: Callable[[Task], dict[str, Any]],
        tasks: Iterable[Task],
        *,
        about: str,
    ) -> list[dict[str, Any]]:
        """The results of the tasks, in their order; `function` has left its files when it gives a result.

        A result may say under "bytes" how much text was gone through; `about` names the stage for people.
        """

        def make() -> dict[str, Any]:
            folder = self.folder_of(f"{name}.results")
            numbered = [(folder / f"{number:06d}.json", task) for number, task in enumerate(tasks)]
            missing = [(path, task) for path, task in numbered if not path.exists()]
            progress = Progress(self.say, about, len(missing))
            for size in self.executor.run(partial(_run, function), missing):
                progress.add(size)
            progress.end()
            results = [json.loads(path.read_bytes()) for path, _ in numbered]
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
        """How many tasks a stage had that is over; else `otherwise`, and what it left with another number is forgotten.

        The number may follow from data.memory_mb, which may be lowered between two processes.
        """
        path = self.folder / f"{name}.json"
        if path.exists():
            return len(json.loads(path.read_bytes())["results"])
        begun = self.folder / f"{name}.tasks"
        if not begun.exists() or begun.read_text() != str(otherwise):
            self.remove(f"{name}.results")
            write_atomically(begun, str(otherwise))
        return otherwise

    def timings(self) -> dict[str, dict[str, float]]:
        """What every stage took, by name: seconds, cpu_seconds of its tasks, bytes of text gone through."""
        found = {}
        for path in sorted(self.folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
            content = json.loads(path.read_bytes())
            if isinstance(content, dict) and "seconds" in content:
                found[path.stem] = {name: content[name] for name in ("seconds", "cpu_seconds", "bytes")}
        return found

    def remove(self, stage: str) -> None:
        """Remove a stage's files, which nothing needs any more."""
        shutil.rmtree(self.folder / stage, ignore_errors=True)


def _run(function: Callable[[Any], dict[str, Any]], task: tuple[Path, Any]) -> int:
    path, content = task
    begun = time.process_time()
    result = function(content)
    write_atomically(path, json.dumps({**result, "cpu_seconds": time.process_time() - begun}))
    return int(result.get("bytes", 0))


@contextmanager
def exclusive_lock(lock: Path, say: Say) -> Iterator[None]:
    """Lets one process at a time go on; the lock of a process that dies is free at once.

    On some network file systems locks do not hold between machines. So the holder gives a sign of life every few
    seconds, by the time and contents of the lock's file; a sign of another machine is waited for to grow old.
    """
    me = f"{socket.gethostname()} {os.getpid()}"
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process is preparing this text; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        said = False
        while (
            (holder := lock.read_text())
            and holder.split()[0] != me.split()[0]
            and _age(lock) < HEARTBEAT_TIMEOUT_SECONDS
        ):
            if not said:
                say(f"The machine {holder.split()[0]} is preparing this text; waiting for it")
                said = True
            time.sleep(1)
        lock.write_text(me)
        stop = threading.Event()

        def give_signs() -> None:
            while not stop.wait(HEARTBEAT_SECONDS):
                os.utime(lock)

        signs = threading.Thread(target=give_signs, daemon=True)
        signs.start()
        try:
            yield
        finally:
            stop.set()
            signs.join()
            lock.write_text("")


def remove_stale_folders(cache: Path) -> None:
    """Remove folders of runner that nobody holds and nobody has touched for a week: of text that has changed since."""
    for place in cache.glob(".*.runner"):
        lock = place.with_suffix(".lock")
        if min(_age(path) for path in (place, *place.glob("*"))) < STALE_AFTER_SECONDS:
            continue
        with lock.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(place, ignore_errors=True)


def _is_other_machine(holder: str, me: str) -> bool:
    return holder.split()[0] != me.split()[0]


def _age(path: Path) -> float:
    """Seconds since a file was written or touched; 0 when it has gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
