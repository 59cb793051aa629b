"""Starts the processes of one run on this machine by torchrun, forwards signals, and reports the first failure.

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
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.training.zero import check_zero_stage

FOLDER = "CDRMIX_LAUNCH"  # set for workers: where they leave their process ids and their failure
PR_SET_PDEATHSIG = 1
CRASHED = "cdrmix: error: a process of the run crashed or was killed"


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, each with a launcher of its own and as many processes.

    count: of machines. rank: this one's, from 0. The first process of the run is on machine 0. host, port: where all
    processes meet: a name of machine 0, and a free port of it. A single machine chooses them itself.
    """

    count: int = 1
    rank: int = 0
    host: str = ""
    port: int = 0

    @classmethod
    def of(cls, count: int, rank: int | None, rendezvous: str | None) -> Nodes:
        """From the options --nnodes, --node-rank and --rendezvous. Raises ConfigError."""
        if count == 1:
            if rank or rendezvous:
                raise ConfigError("--node-rank and --rendezvous: allowed with --nnodes above 1 only")
            return cls()
        if rank is None or not 0 <= rank < count:
            raise ConfigError(
                f"--node-rank: needed with --nnodes {count}, the number of this machine: 0 to {count - 1}"
            )
        host, _, port = (rendezvous or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(
                f"--rendezvous: needed with --nnodes {count}, as HOST:PORT: a name of machine 0 and a free port of it; "
                f"found {rendezvous or 'nothing'}"
            )
        return cls(count, rank, host, int(port))

    def torchrun_options(self) -> list[str]:
        """The options of torchrun that say the same."""
        if self.count == 1:
            return ["--standalone"]
        where = ["--master-addr", self.host, "--master-port", str(self.port)]
        return ["--nnodes", str(self.count), "--node-rank", str(self.rank), *where]


def launch(processes: int, arguments: Sequence[str], nodes: Nodes | None = None) -> tuple[int, str]:
    """Runs `cdrmix <arguments>` in that many processes of this machine; returns the exit code and the message of the
    first failure here."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="cdrmix-launch-") as name:
        folder = Path(name)
        environment = os.environ | {
            FOLDER: name,
            # Without it `-m` puts the current folder on sys.path, where kernels/ hides the PyPI package of that name.
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // processes))),
        }
        options = [*(nodes or Nodes()).torchrun_options(), "--nproc-per-node", str(processes)]
        command = [sys.executable, "-m", "cdrmix.training.launch", json.dumps(options), *arguments]

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
        return 1, CRASHED


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


def lost_peer(error: RuntimeError) -> bool:
    """Whether a collective of a worker failed because another process of the run has ended."""
    return is_worker() and any(text in str(error) for text in ("Connection closed by peer", "Connection reset by peer"))


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


def agent(options: Sequence[str], arguments: Sequence[str]) -> int:
    """Runs torchrun on this machine, without the stack traces that it prints when a worker fails."""
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable(logging.ERROR)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # When a process fails, the others have 60 s to end by themselves.
    try:
        run(parse_args([*options, "--shutdown-timeout", "60", "-m", "cdrmix.cli", *arguments]))
    except ChildFailedError:
        return 1
    except SignalException as error:  # sent by the launcher before a worker had started
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(agent(json.loads(sys.argv[1]), sys.argv[2:]))
