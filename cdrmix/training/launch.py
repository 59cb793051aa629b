"""Starts the processes of one run on this machine, forwards signals, and reports the first failure.

The launcher, which the user started, has the workers in sessions of their own, so that the signals of a terminal reach
the launcher only. It forwards each of STOP_SIGNALS once to every worker, also to a worker that begins later. Before the
first worker has begun, it ends them. The first worker that fails writes its exit code and message to a file; the others
then get SIGTERM, and SIGKILL a minute later.

torchrun is not used: its agents meet over a port that everyone who reaches the machine can write to, and unpickle what
they find there. Here the workers of one machine meet in a file of the launcher's folder, which its user alone can read
(rendezvous.py), and exchange tensors over the loopback interface.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from cdrmix.config.schema import Config
from cdrmix.errors import UNEXPECTED, CdrmixError, ConfigError, HangError, OutOfMemoryError
from cdrmix.json_text import parse_json
from cdrmix.training.zero import check_zero_stage

FOLDER = "CDRMIX_LAUNCH"  # set for workers: where they leave their process ids and their failure
PR_SET_PDEATHSIG = 1
LAST_WORDS = 60.0  # seconds that the others have when a worker has failed
POLL = 0.1  # seconds
LAUNCHER = "launcher"  # file of the launcher's folder: its process id
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_A_LAUNCHER = (FOLDER, *PLACE)  # environment variables of a worker
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # SIGUSR1: of schedulers that are told so
CRASHED = "cdrmix: error: a process of the run crashed or was killed"
OF_A_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "gloo/transport")  # in messages of gloo
RESTARTED = (CdrmixError.exit_code, HangError.exit_code, UNEXPECTED)  # exit codes of what may not happen again
EXHAUSTED = "exhausted"  # file of the launcher's folder: a micro-batch did not fit in memory
RUNS = "runs"  # file of the launcher's folder: a line for each run folder, with the hash of its configuration


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, each with a launcher of its own and as many processes.

    count: of machines. rank: this one's, from 0. The first process of the run is on machine 0. host, port: where all
    processes meet: a name of machine 0, and a free port of it. The processes of a single machine need none.
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

    def places(self, processes: int) -> list[dict[str, str]]:
        """The environment of each of `processes` processes on this machine that says which it is and how it meets the
        others. A single machine's exchange tensors over its loopback interface."""
        shared = {"WORLD_SIZE": str(self.count * processes), "LOCAL_WORLD_SIZE": str(processes)}
        if self.count > 1:
            shared |= {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port)}
        else:
            shared |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback())
        first = self.rank * processes
        return [shared | {"RANK": str(first + each), "LOCAL_RANK": str(each)} for each in range(processes)]


def loopback() -> str:
    """The name of the network interface that reaches only this machine."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), "lo")


class Ended(NamedTuple):
    """How the processes ended: the exit code and the message of the first failure here; whether a signal was forwarded
    to them; the run folders that they noted, by the hash of the configuration; whether a micro-batch of stage A was too
    large for the memory."""

    status: int
    message: str
    signalled: bool
    runs: dict[str, Path]
    exhausted: bool = False


def launch(
    processes: int,
    arguments: Sequence[str],
    nodes: Nodes | None = None,
    *,
    restarts: int = 0,
    config: Config | None = None,
) -> tuple[int, str]:
    """Runs `cdrmix <arguments>`, whose overrides are the last, in that many processes of this machine; returns the exit
    code and the message of the first failure here.

    restarts: how often they are started again after one of them crashed, was killed, hung or ran out of memory. Then
    they continue their run of this configuration, out of memory with half of the rows in a micro-batch, or fewer. What
    was lost is recorded in the run folder. An unexpected error that comes twice, with the same message, is not tried a
    third time.
    """
    before = ""
    rows, parts = (1, 1) if config is None else (config.train.micro_batch_rows, config.train.micro_batch_parts)
    for attempt in itertools.count(1):
        started = time.time()
        ended = _attempt(processes, arguments, nodes or Nodes())
        exhausted = ended.exhausted and ended.status == OutOfMemoryError.exit_code and rows > 1
        if ended.signalled or attempt > restarts or not (exhausted or ended.status in RESTARTED):
            break
        if ended.status == UNEXPECTED and ended.message == before:
            break
        before = ended.message
        changed = ""
        if exhausted:
            rows, parts = fewer_rows(rows, parts)
            fewer = [f"train.micro_batch_rows={rows}", f"train.micro_batch_parts={parts}"]
            arguments, changed = [*arguments, *fewer], f" with {' '.join(fewer)}"
        print(ended.message, file=sys.stderr)
        print(f"cdrmix: starting the processes again ({attempt} of {restarts}){changed}", file=sys.stderr)
        if config is not None and config.hash() in ended.runs:
            from cdrmix.run_folder import RunFolder  # its imports take a second

            run = ended.runs[config.hash()]
            arguments = _resuming(arguments, run)
            message = f"{ended.message}; continued{changed}" if changed else ended.message
            RunFolder.open(run).record_fault(ended.status, message, started)
    return ended.status, ended.message


def fewer_rows(rows: int, parts: int) -> tuple[int, int]:
    """train.micro_batch_rows and train.micro_batch_parts after rows above 1 are divided by their smallest factor."""
    divisor = next(number for number in range(2, rows + 1) if rows % number == 0)
    return rows // divisor, parts * divisor


def _resuming(arguments: Sequence[str], run: Path) -> list[str]:
    command, *others = arguments
    place = others.index("--resume") if "--resume" in others else len(others)
    return [command, "--resume", str(run), *others[:place], *others[place + 2 :]]


def _attempt(processes: int, arguments: Sequence[str], nodes: Nodes) -> Ended:
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="cdrmix-launch-") as name:
        folder = Path(name)
        # A launcher around this one may have left places.
        environment = {key: value for key, value in os.environ.items() if key not in OF_A_LAUNCHER} | {
            FOLDER: name,
            # Without it `-m` puts the current folder on sys.path, where kernels/ hides the PyPI package of that name.
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // processes))),
        }
        (folder / LAUNCHER).write_text(str(os.getpid()))
        command = [sys.executable, "-m", "cdrmix.cli", *arguments]

        received: list[int] = []
        # Set before the workers start, so that no signal is lost and none ends the launcher alone.
        former = {
            number: signal.signal(number, lambda number, frame: received.append(number))
            for number in STOP_SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN  # a signal that nohup ignores stays ignored
        }
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for place in nodes.places(processes):
                worker = subprocess.Popen(command, env=environment | place, start_new_session=True)
                workers.append(worker)  # at once, so that those that have started are ended if one cannot start
            status, forwarded = _wait(workers, folder, received)
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            for each in workers:
                each.kill()
                each.wait()
        noted = (folder / RUNS).read_text(encoding="utf-8").splitlines() if (folder / RUNS).exists() else []
        runs = {key: Path(path) for key, _, path in (line.partition(" ") for line in noted)}
        failure = folder / "failure.json"
        if failure.exists():
            content = parse_json(failure.read_text(encoding="utf-8"))
            exhausted = (folder / EXHAUSTED).exists()
            return Ended(int(content["status"]), str(content["message"]), forwarded > 0, runs, exhausted)
        if status == 0:
            return Ended(0, "", False, runs)
        if forwarded:
            return Ended(128 + forwarded, "cdrmix: interrupted", True, runs)
        return Ended(1, CRASHED, False, runs)


def _wait(workers: Sequence[subprocess.Popen[bytes]], folder: Path, received: list[int]) -> tuple[int, int]:
    """Waits for the workers and forwards signals. Returns the first status that is not 0, and the last signal that was
    forwarded, or 0."""
    forwarded, status, end = 0, 0, math.inf
    while True:
        running = [worker for worker in workers if worker.poll() is None]
        if status == 0:
            status = next((worker.returncode for worker in workers if worker.returncode), 0)
            if status and running:
                end = time.monotonic() + LAST_WORDS
                _stop(running, signal.SIGTERM)
        if not running:
            return status, received[-1] if received else forwarded
        if time.monotonic() > end:
            _stop(running, signal.SIGKILL)
        while received:
            forwarded = received.pop(0)
            if not signal_workers(folder, forwarded):
                _stop(running, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].wait(timeout=POLL)


def _stop(workers: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for worker in workers:
        worker.send_signal(number)


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
    """Raises ConfigError unless rows, their tokens and experts divide evenly among the processes, and ZeRO has
    something to shard."""
    train = config.train
    parallel = {key: getattr(train, key) for key in ("sequence_parallel", "tensor_parallel", "pipeline_parallel")}
    parallel = {key: size for key, size in parallel.items() if size > 1}
    keys, alike = " times ".join(f"train.{key}" for key in parallel), math.prod(parallel.values())
    if processes % alike:
        raise ConfigError(f"{keys}: must divide the number of processes (--nproc), {processes}; found {alike}")
    together = train.micro_batch_rows * processes // alike
    shared = f" over {keys}={alike}" if parallel else ""
    for key, rows in (("batch_rows", train.batch_rows), ("batch_warmup.rows", train.batch_sizes.first)):
        if rows % together:
            raise ConfigError(
                f"train.{key}: must be a multiple of train.micro_batch_rows={train.micro_batch_rows} times the "
                f"{processes} processes{shared}, {together}; found {rows}"
            )
    stage = processes // train.pipeline_parallel
    if stage % train.expert_parallel:
        of_stage = " of a stage" if train.pipeline_parallel > 1 else " (--nproc)"
        raise ConfigError(
            f"train.expert_parallel: must divide the number of processes{of_stage}, {stage}; "
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
    launcher = folder / LAUNCHER
    if launcher.exists() and os.getppid() != int(launcher.read_text()):
        os._exit(1)  # the launcher died before
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


def note_run(run: Path, config_hash: str) -> None:
    """Tells the launcher of this worker, if there is one, which run folder it continues."""
    if is_worker():
        with (Path(os.environ[FOLDER]) / RUNS).open("a", encoding="utf-8") as file:
            file.write(f"{config_hash} {run.absolute()}\n")


def note_exhausted() -> None:
    """Tells the launcher of this worker, if there is one, that a micro-batch of stage A did not fit in memory."""
    if is_worker():
        (Path(os.environ[FOLDER]) / EXHAUSTED).touch()


def lost_peer(error: RuntimeError) -> bool:
    """Whether a collective or the store of a worker failed, because another process of the run has ended or its
    connection was disturbed."""
    of_the_store = any(kind.__name__ == "DistError" for kind in type(error).__mro__)  # of torch, which is not imported
    return is_worker() and (of_the_store or any(text in str(error) for text in OF_A_CONNECTION))


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
