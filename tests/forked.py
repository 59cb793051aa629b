"""Starts Python programs as copies of one process that has imported the libraries.

Importing PyTorch, its compiler, DeepSpeed and Matplotlib takes ten seconds of processor time, and the tests start some
hundred programs. Each process that runs tests has a server, which imports once and forks itself for every program. On
a machine with a GPU every program imports for itself: CUDA does not survive a fork, and DeepSpeed asks for GPUs while
it is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cdrmix import plugins

MODULES = (
    *("cdrmix.workflow", "cdrmix.cli", "deepspeed", "torch._dynamo", "matplotlib.figure"),
    "deepspeed.runtime.zero.muon.muon_optimizer",  # ZeRO imports it, and it PyTorch's code generator
)
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
MOST = 1 << 20  # bytes of an order: arguments and environment


class Forked:
    """A program that was started: what tests need of `subprocess.Popen`, with stdout and stderr in one file."""

    def __init__(self, server: Server, pid: int, file: int, arguments: Sequence[str]) -> None:
        self.args, self.pid = arguments, pid
        self.returncode: int | None = None
        self._server, self._file = server, file
        weakref.finalize(self, os.close, file)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ended().get(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired(list(self.args), timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    @property
    def output(self) -> str:
        """What it has printed."""
        return os.pread(self._file, os.fstat(self._file).st_size, 0).decode()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the server has not said yet that it ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that imports and forks."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # DeepSpeed prints while it is imported
            )
        self._ended: dict[int, int] = {}
        atexit.register(self._stop)

    def _stop(self) -> None:
        self._socket.close()  # at which the server ends
        self._process.wait()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
        file = os.memfd_create("output")
        order = {"arguments": [*map(str, arguments)], "environment": dict(environment), "folder": os.getcwd()}
        socket.send_fds(self._socket, [json.dumps(order).encode()], [file])
        while "pid" not in (message := self._receive()):
            self._ended[message["ended"]] = message["status"]
        self._ended.pop(message["pid"], None)  # of an earlier program with this number
        return Forked(self, message["pid"], file, arguments)

    def ended(self) -> dict[int, int]:
        """The exit codes of the programs that ended, by their process id; of a signal its number below zero."""
        self._socket.setblocking(False)
        try:
            while True:
                message = self._receive()
                self._ended[message["ended"]] = message["status"]
        except BlockingIOError:  # no other has ended
            pass
        finally:
            self._socket.setblocking(True)
        return self._ended

    def _receive(self) -> dict[str, Any]:
        data = self._socket.recv(MOST)
        assert data, "the server of the tests' programs has ended"
        message: dict[str, Any] = json.loads(data)
        return message


_server = functools.cache(Server)


def server_pid() -> int | None:
    """The process id of the server, which runs until the tests end; None before the first program."""
    return _server()._process.pid if _server.cache_info().currsize else None


def start(arguments: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Forked:
    """Starts `python <arguments>`: a file, `-m` and a module, or `-c` and a program; each with its arguments.

    environment: as for `subprocess.Popen`. What a library reads while it is imported is as where the tests run.
    """
    return _server().start([str(word) for word in arguments], os.environ if environment is None else environment)


def run(arguments: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Starts a program and waits; returns its exit code and what it printed."""
    program = start(arguments, environment)
    return program.wait(), program.output


def _serve(connection: socket.socket) -> None:
    for module in () if any(map(os.path.exists, GPU_DRIVERS)) else MODULES:
        with contextlib.suppress(ModuleNotFoundError):  # on a bare machine
            importlib.import_module(module)
    with contextlib.suppress(ModuleNotFoundError):
        import numba

        numba.njit(lambda: None)()  # loads what the first compiled function of a process needs, in 0.3 s
    gc.collect()
    gc.freeze()  # a collection in a program does not go through, and copy, what it shares with this process
    received, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    before = signal.signal(signal.SIGCHLD, lambda number, frame: None)

    while True:
        ready, _, _ = select.select([connection, received], [], [])
        if received in ready:
            received.recv(MOST)
            while (ended := _reap()) is not None:
                connection.send(json.dumps(ended).encode())
        if connection in ready:
            data, files, _, _ = socket.recv_fds(connection, MOST, 1)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, before)
                for end in (connection, received, waker):
                    end.close()
                _become(files[0], **json.loads(data))
            os.close(files[0])
            connection.send(json.dumps({"pid": pid}).encode())


def _reap() -> dict[str, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return {"ended": pid, "status": os.waitstatus_to_exitcode(status)} if pid else None


def _become(file: int, arguments: list[str], environment: dict[str, str], folder: str) -> NoReturn:
    """Runs a program in this process as the interpreter would, and ends the process."""
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    np.random.seed()  # noqa: NPY002 - as in a new process; the module random does so itself
    if environment.get("PYTHONUNBUFFERED"):
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(write_through=True)
    status = 1
    try:
        plugins._loaded.clear()  # of another environment
        sys.path[:0] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry not in sys.path]
        kind, *words = arguments
        match kind:
            case "-m":
                sys.argv = words
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            case "-c":
                sys.argv = ["-c", *words[1:]]
                exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
            case _:
                sys.argv = arguments
                runpy.run_path(kind, run_name="__main__")
        status = 0
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        status = 0 if ending.code is None else ending.code if isinstance(ending.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter, which prints whatever ends a program
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter, which waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))  # for this import alone
    from flushing import stop_flushing

    sys.path.pop()
    stop_flushing()
    _serve(socket.socket(fileno=int(sys.argv[1])))
