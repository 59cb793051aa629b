"""Several processes of one run on this machine: started by torchrun, ended and explained as if they were one.

Three processes stand above each other: the launcher (what the person started), torchrun's agent in a
session of its own, and the workers. A Ctrl-C or SIGTERM reaches the launcher alone, which hands it to every worker
once; the first worker that fails leaves its exit code and message in a file, because torchrun would answer 1 to all.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError

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
        command = [sys.executable, "-m", "cdrmix.train.launch", str(processes), *arguments]

        def forward(number: int, frame: FrameType | None) -> None:
            for file in folder.glob("*.pid"):
                os.kill(int(file.read_text()), number)

        agent = subprocess.Popen(command, env=environment, start_new_session=True)
        former = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            status = agent.wait()
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            if agent.poll() is None:
                agent.kill()
        failure = folder / "failure.json"
        if failure.exists():
            content = json.loads(failure.read_text(encoding="utf-8"))
            return int(content["status"]), str(content["message"])
        return (0, "") if status == 0 else (1, "cdrmix: error: a process of the run crashed or was killed")


def check_processes(config: Config, processes: int) -> None:
    """Raises ConfigError unless the rows of a step can be dealt evenly to that many processes."""
    train = config.train
    together = train.micro_batch_rows * processes
    if train.batch_rows % together:
        raise ConfigError(
            f"train.batch_rows: must be a multiple of train.micro_batch_rows={train.micro_batch_rows} times the "
            f"{processes} processes, {together}; found {train.batch_rows}"
        )


def is_worker() -> bool:
    """Whether this process was started by `launch`."""
    return FOLDER in os.environ


def begin_work() -> None:
    """A worker's first act: it can be signalled from now on, and dies with its parent."""
    folder = Path(os.environ[FOLDER])
    # A worker that outlives a killed run would go on writing into the folder that the resumed run writes.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    temporary = folder / f"{os.getpid()}.tmp"
    temporary.write_text(str(os.getpid()))
    temporary.rename(folder / f"{os.getpid()}.pid")


def report_failure(status: int, message: str) -> None:
    """A worker's last act when it fails: the first one is heard."""
    folder = Path(os.environ[FOLDER])
    temporary = folder / f"failure-{os.getpid()}.tmp"
    temporary.write_text(json.dumps({"status": status, "message": message}), encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, folder / "failure.json")  # in one move, and never over an earlier one
    temporary.unlink()


def agent(processes: int, arguments: Sequence[str]) -> int:
    """torchrun on this machine alone, without the stack traces that it prints when a worker fails."""
    import logging

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
    return 0


if __name__ == "__main__":
    sys.exit(agent(int(sys.argv[1]), sys.argv[2:]))
