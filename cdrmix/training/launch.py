"""Several processes of one run on this machine: started by torchrun, ended and explained as if they were one.

Three processes stand above each other: the launcher (what the person started), torchrun's agent in a
session of its own, and the workers. A Ctrl-C, SIGTERM or hangup reaches the launcher alone, which hands it to every
worker once, also to one that begins later; before the first has begun, it ends the agent. The first worker that fails
leaves its exit code and message in a file, because torchrun would answer 1 to all.
"""

from __future__ import annotations

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
            # Without it `-m` would put the current folder on sys.path, and our kernels/ over the PyPI package's name.
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // processes))),
        }
        command = [sys.executable, "-m", "cdrmix.training.launch", str(processes), *arguments]

        received: list[int] = []
        # Before the agent starts: a signal is at no time lost, nor leaves the agent behind.
        former = {
            number: signal.signal(number, lambda number, frame: received.append(number))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup's wish holds for the workers too
        }
        agent: subprocess.Popen[bytes] | None = None
        try:
            agent = subprocess.Popen(command, env=environment, start_new_session=True)
            status, told = _wait(agent, folder, received)
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
        if told:
            return 128 + told, "cdrmix: interrupted"
        return 1, "cdrmix: error: a process of the run crashed or was killed"


def _wait(agent: subprocess.Popen[bytes], folder: Path, received: list[int]) -> tuple[int, int]:
    """Waits for the agent and hands on what is received; the agent's status and the last signal handed on, or 0."""
    told = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return agent.wait(timeout=0.1), told
        while received:
            told = received.pop(0)
            if not signal_workers(folder, told):
                agent.terminate()


def signal_workers(folder: Path, number: int) -> bool:
    """Sends a signal to every worker at work, and to those that begin later; False when none has begun yet."""
    with _locked(folder):
        with (folder / "signals").open("a") as file:
            file.write(f"{number}\n")
        for registered in folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):  # killed, and so without an end of its own
                os.kill(int(registered.stem), number)
        return any(folder.glob("*.pid")) or any(folder.glob("*.done"))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # Between the launcher, which tells the workers of a signal, and a worker that begins: it gets each signal once.
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_processes(config: Config, processes: int) -> None:
    """Raises ConfigError unless the rows of a step, and the experts, can be dealt evenly to that many processes, and
    ZeRO has somebody to share out with."""
    train = config.train
    together = train.micro_batch_rows * processes
    if train.batch_rows % together:
        raise ConfigError(
            f"train.batch_rows: must be a multiple of train.micro_batch_rows={train.micro_batch_rows} times the "
            f"{processes} processes, {together}; found {train.batch_rows}"
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
    """A worker's first act: it can be signalled from now on, and dies with its parent.

    A signal that came before goes off here, as if it came now.
    """
    folder = Path(os.environ[FOLDER])
    # A worker that outlives a killed run would go on writing into the folder that the resumed run writes.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with _locked(folder):
        (folder / f"{os.getpid()}.pid").touch()
        earlier = folder / "signals"
        numbers = earlier.read_text().split() if earlier.exists() else []
    if numbers:
        signal.raise_signal(int(numbers[0]))


def end_work() -> None:
    """A worker's last act: no signal is sent to it any more, nor to a process that gets its number afterwards."""
    folder = Path(os.environ[FOLDER])
    registered = folder / f"{os.getpid()}.pid"
    with _locked(folder):
        if registered.exists():
            registered.rename(registered.with_suffix(".done"))


def report_failure(status: int, message: str) -> None:
    """What a worker does when it fails: the first one is heard."""
    folder = Path(os.environ[FOLDER])
    temporary = folder / f"failure-{os.getpid()}.tmp"
    temporary.write_text(json.dumps({"status": status, "message": message}), encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, folder / "failure.json")  # in one move, and never over an earlier one
    temporary.unlink()


def agent(processes: int, arguments: Sequence[str]) -> int:
    """torchrun on this machine alone, without the stack traces that it prints when a worker fails."""
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable(logging.ERROR)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # When a process fails, the others get this long to end by themselves.
    options = ["--standalone", "--nproc-per-node", str(processes), "--shutdown-timeout", "60"]
    options += ["-m", "cdrmix.cli", *arguments]
    try:
        run(parse_args(options))
    except ChildFailedError:
        return 1
    except SignalException as error:  # from the launcher, before a worker had begun
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(agent(int(sys.argv[1]), sys.argv[2:]))
