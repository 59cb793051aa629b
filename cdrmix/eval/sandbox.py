"""Runs programs that a model wrote, without root: confined child processes of a small server that never imports torch.

    with Sandbox() as sandbox:
        sandbox.run([Program("assert 1 + 1 == 2")])  # [Verdict("passed", "", 0.01)]

`sandbox_server.py` describes the layers. They are tried at the start and recorded. Without Landlock and seccomp nothing
is run, unless `allow_unsafe` is set. A program passes if it comes to its end: a random token that the child sends then
is believed, nothing else. It is in the memory of the child, so a program that searches its own process for it can send
it early, and a program may redefine what its tests compare. As a reward of reinforcement learning, compare values in
another process.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

from cdrmix.errors import ConfigError
from cdrmix.json_text import parse_json

SERVER = Path(__file__).with_name("sandbox_server.py")
Outcome = Literal["passed", "failed", "timeout", "memory", "forbidden", "crashed"]
NEEDED = ("landlock", "seccomp")
WORKERS = 4  # at most
LATEST = 60.0  # seconds that a server may take longer than its program; it ends what takes longer itself
START = 60.0  # seconds in which a server has to begin


class Program(NamedTuple):
    """Source text of Python. kind "compile": it is compiled only, and its last function must have a body."""

    source: str
    kind: Literal["run", "compile"] = "run"


class Verdict(NamedTuple):
    """What became of a program. detail: the exception or the reason, up to 300 characters. seconds: wall-clock time.

    passed: it came to its end, or compiles. failed: an exception, or an end before the end of the tests. timeout,
    memory: a limit. forbidden: it was stopped at something that a program may not do. crashed: another signal.
    """

    outcome: Outcome
    detail: str
    seconds: float


@dataclass(frozen=True)
class Layers:
    """What confines programs here. reasons: by layer, why it does not work; "" if it works.

    landlock_abi: the version of the kernel's Landlock; 0 if it does not work.
    """

    user: str
    reasons: dict[str, str]
    landlock_abi: int

    @property
    def missing(self) -> dict[str, str]:
        """Layers that do not work, with the reason."""
        return {layer: reason for layer, reason in self.reasons.items() if reason}

    def as_json(self) -> dict[str, object]:
        """user, for each layer true or the reason why it does not work, and landlock_abi."""
        works = {layer: reason or True for layer, reason in self.reasons.items()}
        return {"user": self.user, **works, "landlock_abi": self.landlock_abi}

    def notes(self) -> list[str]:
        """A line for each layer that does not work."""
        return [f"sandbox without {layer.replace('_', ' ')}: {reason}" for layer, reason in self.missing.items()]


class Sandbox:
    """Confined processes for programs; a context manager.

    Args:
        seconds: wall-clock limit of a program.
        megabytes: limit of its address space, in MiB.
        allow_unsafe: run programs even where Landlock or seccomp does not work.
        workers: programs at a time; by default one for each core, at most 4.

    Attributes:
        layers: what confines the programs, as tried on entering.

    Raises ConfigError on entering, with the reason, if Landlock or seccomp does not work here.
    """

    layers: Layers

    def __init__(
        self, *, seconds: float = 10.0, megabytes: int = 512, allow_unsafe: bool = False, workers: int | None = None
    ) -> None:
        if not 0 < seconds <= 3600:
            raise ConfigError(f"the time limit of a program must be above 0 and at most 3600 seconds; found {seconds}")
        if not 64 <= megabytes <= 1 << 20:
            raise ConfigError(f"the memory of a program must be 64 to 1048576 MiB; found {megabytes}")
        self.seconds, self.megabytes, self.allow_unsafe = seconds, megabytes, allow_unsafe
        self._count = workers or min(WORKERS, len(os.sched_getaffinity(0)))
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self._servers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Sandbox:
        try:
            for _ in range(self._count):
                server, self.layers = _start()
                self._servers.append(server)
                self._idle.put(server)
            unsafe = [f"{layer}: {self.layers.missing[layer]}" for layer in NEEDED if layer in self.layers.missing]
            if unsafe and not self.allow_unsafe:
                raise ConfigError(
                    f"generated code is not run: this machine cannot confine it ({'; '.join(unsafe)}). Landlock needs "
                    "Linux 5.13 or later. Use such a machine, or --allow-unsafe-execution, which runs the code of the "
                    "model with the rights of this user"
                )
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def run(self, programs: Sequence[Program]) -> list[Verdict]:
        """What becomes of each program, in their order."""
        with ThreadPoolExecutor(self._count) as pool:
            return list(pool.map(self._judge, programs))

    def _judge(self, program: Program) -> Verdict:
        request = {"kind": program.kind, "source": program.source, "seconds": self.seconds, "megabytes": self.megabytes}
        server = self._idle.get()
        try:
            answer = _answer(server, json.dumps(request), self.seconds + LATEST)
            if answer is None:  # as by a program that is not confined
                _stop(server)
                self._servers.remove(server)
                server, _ = _start()
                self._servers.append(server)
                return Verdict("crashed", "the server of the sandbox ended", 0.0)
        finally:
            self._idle.put(server)
        found = parse_json(answer)
        return Verdict(found["outcome"], found["detail"], found["seconds"])

    def _close(self) -> None:
        for server in self._servers:
            _stop(server)
        self._servers.clear()


def probe() -> Layers:
    """Tries the layers on this machine, without running anything else."""
    server, layers = _start()
    _stop(server)
    return layers


def _start() -> tuple[subprocess.Popen[str], Layers]:
    """A server, and what it found. It gets nothing of this process: no environment, no files, no user's packages."""
    server = subprocess.Popen(
        [sys.executable, "-I", "-S", str(SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"},
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stderr is not None
    line = _line(server, START)
    if not line:
        message = server.stderr.read().strip().rpartition("\n")[2]
        _stop(server)
        raise ConfigError(f"the server of the sandbox cannot start: {message}")
    found = parse_json(line)
    return server, Layers(found["user"], found["layers"], found["landlock_abi"])


def _answer(server: subprocess.Popen[str], request: str, seconds: float) -> str | None:
    """The server's line for a request; None if it has ended, or does not answer in time."""
    assert server.stdin is not None
    try:
        server.stdin.write(request + "\n")
        server.stdin.flush()
    except BrokenPipeError:
        return None
    return _line(server, seconds) or None


def _line(server: subprocess.Popen[str], seconds: float) -> str:
    """The next line of a server; "" if it has ended. One that does not answer in time is ended."""
    assert server.stdout is not None
    late = threading.Timer(seconds, server.kill)
    late.start()
    try:
        return server.stdout.readline()
    finally:
        late.cancel()


def _stop(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.wait()
    for stream in (server.stdin, server.stdout, server.stderr):
        if stream is not None:
            with suppress(BrokenPipeError):  # a request that the server did not read
                stream.close()
