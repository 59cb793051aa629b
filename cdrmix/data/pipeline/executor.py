"""Executors: run the tasks of a stage in processes of this machine or on Ray. The result does not depend on it.

A task is a picklable value. The function of a stage returns a small result and writes large data to a file, which it
renames to its final name. So a task may run twice and on any machine, and an interrupted stage runs its missing tasks.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import current_process, get_context, parent_process
from multiprocessing.context import ForkServerContext
from types import ModuleType
from typing import Any, TypeVar

from cdrmix.durable import LONGEST_WAIT, wait_until
from cdrmix.errors import ConfigError, OutOfMemoryError
from cdrmix.registry import registers

Task = TypeVar("Task")
Part = TypeVar("Part")
Result = TypeVar("Result")

IN_SCRIPT = 96  # exit code of a process that came to a call of this package while it imported the user's script
IN_WORKER = (
    "the script that called cdrmix registers parts, so each process of the preparation imports it, and it came to the "
    'same call again. Put the calls of the script below `if __name__ == "__main__":`, or set data.workers to 1'
)

QUEUED = 2  # tasks in the queue per process: processes are never idle, and memory is bounded


class Executor(ABC):
    """Runs a function on tasks. Results come in any order."""

    workers: int

    @abstractmethod
    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """The result of each task, as soon as it is ready."""

    @abstractmethod
    def run_parts(
        self, function: Callable[[Task], Result], tasks_of: Callable[[Part], Iterable[Task]], parts: Iterable[Part]
    ) -> Iterator[Result]:
        """The result of each task of all parts. `tasks_of` reads a part to make its tasks."""

    @abstractmethod
    def close(self) -> None:
        """Stops the processes and cancels running tasks."""

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalExecutor(Executor):
    """Processes of this machine, started if there is more than one task. With one worker, only this process.

    The processes do not import the script that the user started (`__main__`), as those of multiprocessing do by
    default: without a guard they would begin its work again. Only if it registers a part, such as a source, they must.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers or len(os.sched_getaffinity(0))
        self._pool: ProcessPoolExecutor | None = None

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        waiting = iter(tasks)
        first = list(islice(waiting, 2))
        if self.workers == 1 or len(first) < 2:
            for task in chain(first, waiting):
                yield function(task)
            return
        if self._pool is None:
            # not fork: libraries that have started threads do not survive a fork
            context = get_context("forkserver")
            if registers("__main__"):
                _try_script(context)
            self._pool = ProcessPoolExecutor(self.workers, context, initializer=_begin_worker)
        running: set[Future[Result]] = set()
        try:
            for task in chain(first, waiting):
                running.add(self._submit(self._pool, function, task))
                if len(running) >= QUEUED * self.workers:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        except BrokenProcessPool as error:
            raise OutOfMemoryError(
                "a process of the preparation was killed, usually because memory ran out; lower data.memory_mb or "
                "data.workers. Finished tasks are kept: the same command continues from there"
            ) from error

    def run_parts(
        self, function: Callable[[Task], Result], tasks_of: Callable[[Part], Iterable[Task]], parts: Iterable[Part]
    ) -> Iterator[Result]:
        # This process reads and the others runner, so that one large file keeps all of them busy.
        return self.run(function, (task for part in parts for task in tasks_of(part)))

    @property
    def _processes(self) -> list[Any]:
        return [] if self._pool is None else list((self._pool._processes or {}).values())

    def _submit(self, pool: ProcessPoolExecutor, function: Callable[[Task], Result], task: Task) -> Future[Result]:
        """Submits a task, which may start a process. Multiprocessing tells a process the script by sys.modules."""
        script = sys.modules["__main__"]
        if len(self._processes) < self.workers and not registers("__main__"):
            sys.modules["__main__"] = ModuleType("__main__")
        try:
            return pool.submit(function, task)
        except OSError as error:
            if pool._broken:  # a process was killed while this one started another: the pipes of the pool are closed
                raise BrokenProcessPool from error
            raise
        finally:
            sys.modules["__main__"] = script

    def close(self) -> None:
        if self._pool is not None:
            processes = self._processes
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            self._pool = None


class RayExecutor(Executor):
    """Ray Data: tasks are rows of a dataset, one block each. A part is read by the process that runs its tasks.

    It uses the cluster of the environment (RAY_ADDRESS) or of an earlier `ray.init`. Otherwise it starts one on this
    machine with `workers` processors. All machines must see data.cache and the corpus under the same paths.
    """

    def __init__(self, workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("data.engine=ray needs the package ray: pip install 'cdrmix[ray]'") from error
        import ray.data

        self._ray = ray
        self._started = not ray.is_initialized()
        if self._started:
            processors = None if "RAY_ADDRESS" in os.environ else workers or len(os.sched_getaffinity(0))
            ray.init(num_cpus=processors, include_dashboard=False, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        self.workers = max(int(ray.cluster_resources().get("CPU", 1)), 1)

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        return self._map(_run_task, function, None, list(tasks))

    def run_parts(
        self, function: Callable[[Task], Result], tasks_of: Callable[[Part], Iterable[Task]], parts: Iterable[Part]
    ) -> Iterator[Result]:
        for results in self._map(_run_part, function, tasks_of, list(parts)):
            yield from results

    def _map(self, apply: Any, function: Any, tasks_of: Any, items: list[Any]) -> Iterator[Any]:
        if not items:
            return
        rows = [{"task": pickle.dumps((function, tasks_of, item))} for item in items]
        dataset = self._ray.data.from_items(rows, override_num_blocks=len(rows)).map(apply)
        for row in dataset.iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, BaseException):
                raise result
            yield result

    def close(self) -> None:
        if self._started:
            self._ray.shutdown()


def _try_script(context: ForkServerContext) -> None:
    """Imports the script of this process in another one. Raises ConfigError if it comes to a call of this package.

    It is done before the pool starts: the pool does not tell how a process ended, and an exit code is read only once.
    """
    process = context.Process(target=int)
    process.start()
    what = "cdrmix: waiting for a process that imports the script that called cdrmix"
    wait_until(
        lambda: not process.is_alive(),
        LONGEST_WAIT,
        lambda seconds: print(f"{what}; {seconds:.0f} s so far", file=sys.stderr, flush=True),
    )
    if process.exitcode == IN_SCRIPT:
        raise ConfigError(IN_WORKER)


def refuse_in_import() -> None:
    """Ends a process that comes to a call of this package while it imports the script of its parent.

    The script has no guard: it would do all its work again, and wait for its parent, which waits for it.
    """
    if getattr(current_process(), "_inheriting", False):  # what multiprocessing itself looks at
        print(f"cdrmix: error: {IN_WORKER}", file=sys.stderr, flush=True)
        os._exit(IN_SCRIPT)


def make_executor(name: str, workers: int) -> Executor:
    """The executor of `data.engine`. Raises ConfigError if its package is not installed."""
    return RayExecutor(workers) if name == "ray" else LocalExecutor(workers)


def _begin_worker() -> None:
    """Initialises a new process: it ignores Ctrl-C, which the parent handles, and exits when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # there is already one process per core; fastokens has threads of its own besides rayon's
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1"}
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run_task(row: dict[str, Any]) -> dict[str, Any]:
    function, _, task = pickle.loads(row["task"])
    return {"result": _pickled(lambda: function(task))}


def _run_part(row: dict[str, Any]) -> dict[str, Any]:
    function, tasks_of, part = pickle.loads(row["task"])
    return {"result": _pickled(lambda: [function(task) for task in tasks_of(part)])}


def _pickled(call: Callable[[], Any]) -> bytes:
    """The pickled result or exception of a call. Ray would wrap an exception in its own class."""
    try:
        return pickle.dumps(call())
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        return pickle.dumps(error)
