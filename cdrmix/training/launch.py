"""Starts several processes of one run on this machine by torchrun, forwards signals, and reports the first failure.

There are three levels of processes: the launcher, which the user started; torchrun's agent, in a session of its own;
and the workers. SIGINT, SIGTERM and SIGHUP reach the launcher only. It forwards each signal once to every worker, also
to a worker that starts later. Before the first worker has started, it ends the agent. The first worker that fails
writes its exit code and message to a file, because torchrun exits with 1 for every failure.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.training.zero import check_zero_stage

FOLDER = "CDRMIX_LAUNCH"  # set for workers: where they leave their process ids and their failure
PR_SET_PDEATHSIG = 1


def launch(processes: int, arguments: Sequence[str]) -> tuple[int, str]:
    """Runs `cdrmix <arguments>` in that many processes; returns the exit code and the message of the first failure."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="cdrmix-launch-") as name:
        folder = Path(name)
        environment = os.environ | {
            FOLDER: name,
            # Without it `-m` puts the current folder on sys.path, where kernels/ hides the PyPI package of that name.
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // processes))),
        }
        command = [sys.executable, "-m", "cdrmix.training.launch", str(processes), *arguments]

        received: list[int] = []
        # Set before the agent starts, so that no signal is lost and none ends the launcher alone.
        former = {
            number: signal.signal(number, lambda number, frame: received.append(number))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # a signal that nohup ignores stays ignored
        }
        agent: subprocess.Popen[bytes] | None = None
        try:
            agent = subprocess.Popen(command, env=environment, start_new_session=True)
            status, forwarded = _wait(agent, folder, received)
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            if agent is not None and agent.poll() is None:
                agent.kill()
        failure = folder / "failure.json"
        if failure.exists():
            content = json.loads(failure.read_text(encoding="utf-8"))
            return int(content["status"]), str(content["message"])
        if status == 0:
            return 0, ""
        if forwarded:
            return 128 + forwarded, "cdrmix: interrupted"
        return 1, "cdrmix: error: a process of the run crashed or was killed"


def _wait(agent: subprocess.Popen[bytes], folder: Path, received: list[int]) -> tuple[int, int]:
    """Waits for the agent and forwards signals. Returns the agent's status and the last forwarded signal, or 0."""
    forwarded = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return agent.wait(timeout=0.1), forwarded
        while received:
            forwarded = received.pop(0)
            if not signal_workers(folder, forwarded):
                agent.terminate()


def signal_workers(folder: Path, number: int) -> bool:
    """Sends a signal to every running worker and to those that start later. Returns False before the first start."""
    with _locked(folder):
        with (folder / "signals").open("a") as file:
            file.write(f"{number}\n")
        for registered in folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):  # it was killed and could not unregister
                os.kill(int(registered.stem), number)
        return any(folder.glob("*.pid")) or any(folder.glob("*.done"))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # A worker that starts while the launcher forwards a signal must get the signal exactly once.
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_processes(config: Config, processes: int) -> None:
    """Raises ConfigError unless rows and experts divide evenly among the processes, and ZeRO has something to shard."""
    train = config.train
    together = train.micro_batch_rows * processes
    for key, rows in (("batch_rows", train.batch_rows), ("batch_warmup.rows", train.batch_sizes.first)):
        if rows % together:
            raise ConfigError(
                f"train.{key}: must be a multiple of train.micro_batch_rows={train.micro_batch_rows} times the "
                f"{processes} processes, {together}; found {rows}"
            )
    if processes % train.expert_parallel:
        raise ConfigError(
            f"train.expert_parallel: must divide the number of processes (--nproc), {processes}; "
            f"found {train.expert_parallel}"
        )
    check_zero_stage(train, processes)


def is_worker() -> bool:
    """Whether this process was started by `launch`."""
    return FOLDER in os.environ


def begin_work() -> None:
    """Registers a worker, so that signals reach it, and makes it die with its parent.

    A signal that was forwarded before is raised here.
    """
    folder = Path(os.environ[FOLDER])
    # A worker that outlived a killed run would write into the folder of the resumed run.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with _locked(folder):
        (folder / f"{os.getpid()}.pid").touch()
        earlier = folder / "signals"
        numbers = earlier.read_text().split() if earlier.exists() else []
    if numbers:
        signal.raise_signal(int(numbers[0]))


def end_work() -> None:
    """Unregisters a worker: signals go neither to it nor to a later process with the same id."""
    folder = Path(os.environ[FOLDER])
    registered = folder / f"{os.getpid()}.pid"
    with _locked(folder):
        if registered.exists():
            registered.rename(registered.with_suffix(".done"))


def exit_worker(status: int) -> NoReturn:
    """Ends a worker without finalising the interpreter, during which a thread of gloo could abort the process.

    See distributed._leave, which is not sufficient with ZeRO.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def report_failure(status: int, message: str) -> None:
    """Reports a worker's failure. Only the first report of a run is kept."""
    folder = Path(os.environ[FOLDER])
    temporary = folder / f"failure-{os.getpid()}.tmp"
    temporary.write_text(json.dumps({"status": status, "message": message}), encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, folder / "failure.json")  # atomic, and never replaces an earlier report
    temporary.unlink()


def agent(processes: int, arguments: Sequence[str]) -> int:
    """Runs torchrun on this machine, without the stack traces that it prints when a worker fails."""
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable(logging.ERROR)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # When a process fails, the others have 60 s to end by themselves.
    options = ["--standalone", "--nproc-per-node", str(processes), "--shutdown-timeout", "60"]
    options += ["-m", "cdrmix.cli", *arguments]
    try:
        run(parse_args(options))
    except ChildFailedError:
        return 1
    except SignalException as error:  # sent by the launcher before a worker had started
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(agent(int(sys.argv[1]), sys.argv[2:]))
