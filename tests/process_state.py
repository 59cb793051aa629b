"""The state of a process that a test must leave as it found it, because the tests after it share the process."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import forked
import numpy as np
import pytest
import torch

from cdrmix.kernels.common.products import multiplies_on_one_thread, multiply_on_all_threads, multiply_on_one_thread

try:
    from threadpoolctl import ThreadpoolController
except ModuleNotFoundError:  # a bare GPU machine
    ThreadpoolController = None

ENDING = 1.0  # seconds for a thread that is about to end
LIBRARIES = ("/dev/", "/proc/", "/memfd:", "/usr/", sys.prefix)  # where no test writes
PYTEST_VARIABLES = ("PYTEST_CURRENT_TEST",)  # changes with the test


class Part(NamedTuple):
    """A part of the state. `read` returns a value that can be compared; `restore` takes one."""

    read: Callable[[], Any]
    restore: Callable[[Any], None]


@functools.cache
def _pools() -> Sequence[Any]:
    """The thread pools of OpenMP and BLAS libraries that are loaded when this is called first."""
    return () if ThreadpoolController is None else ThreadpoolController().lib_controllers


def _read_threads() -> dict[str, object]:
    threads: dict[str, object] = {"PyTorch": torch.get_num_threads(), "products on one": multiplies_on_one_thread()}
    for number, library in enumerate(_pools()):
        threads[f"{library.user_api} {library.internal_api} {number}"] = library.get_num_threads()
    # Asking numba starts its threads, which a fork does not survive. It has its own number until then.
    parallel = sys.modules.get("numba.np.ufunc.parallel")
    if parallel is not None and parallel._is_initialized:
        threads["numba"] = parallel.get_num_threads()
    elif "numba" in sys.modules:
        threads["numba"] = sys.modules["numba"].config.NUMBA_NUM_THREADS
    return threads


def _restore_threads(threads: Mapping[str, Any]) -> None:
    torch.set_num_threads(threads["PyTorch"])
    for number, library in enumerate(_pools()):
        library.set_num_threads(threads[f"{library.user_api} {library.internal_api} {number}"])
    if threads["products on one"]:
        multiply_on_one_thread()
    else:
        multiply_on_all_threads()
    if threads.get("numba") != _read_threads().get("numba"):
        sys.modules["numba"].set_num_threads(threads["numba"])


def _read_handlers() -> dict[int, object]:
    """But for SIGALRM, which pytest-timeout takes, and gives back early after a failure."""
    return {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGALRM}}


def _restore_handlers(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _read_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in PYTEST_VARIABLES}


def _restore_environment(environment: Mapping[str, str]) -> None:
    for name in _read_environment():
        if name not in environment:
            del os.environ[name]
    os.environ.update(environment)


FLAGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "filled memory": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda value: setattr(torch.utils.deterministic, "fill_uninitialized_memory", value),
    ),
    "cuDNN's search": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
}


def _restore_flags(flags: Mapping[str, Any]) -> None:
    for name, value in flags.items():
        FLAGS[name][1](value)


def _read_random() -> dict[str, object]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {"random": random.getstate(), "NumPy": (kind, keys.tobytes(), *rest)}


def _restore_random(states: Mapping[str, Any]) -> None:
    random.setstate(states["random"])
    kind, keys, *rest = states["NumPy"]
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002


def _read_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a folder that is gone"


def _restore_folder(folder: str) -> None:
    os.chdir(folder)


def _read_files() -> dict[str, str]:
    """The file of each open descriptor, but for those of libraries, which keep fonts open, and for those without a
    name, as pytest's for output. Not pipes and sockets: the process group has them until the process ends."""
    files = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("/") and not target.startswith(LIBRARIES) and not target.endswith(" (deleted)"):
                files[name] = target
    return files


def _close_files(files: Mapping[str, str]) -> None:
    """Nothing: who holds a descriptor may close it later, and then it could be another's."""


def _read_children() -> set[int]:
    """The child processes that run or wait for their parent, but for those that serve every test."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{task}/children") as file:
            found.update(map(int, file.read().split()))
    multiprocessing_own = (
        multiprocessing.resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
        multiprocessing.forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
    )
    return found - {forked.server_pid(), *multiprocessing_own}


def _end_children(former: set[int]) -> None:
    for pid in _read_children() - former:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _read_running() -> set[threading.Thread]:
    """But for the one that tqdm starts with its first bar, in whichever test that is."""
    return {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}


def _nothing(_: object) -> None:
    """A thread of Python cannot be ended from outside."""


PARTS: Mapping[str, Part] = {
    "CPU threads": Part(_read_threads, _restore_threads),
    "signal handlers": Part(_read_handlers, _restore_handlers),
    "environment variables": Part(_read_environment, _restore_environment),
    "flags": Part(lambda: {name: read() for name, (read, _) in FLAGS.items()}, _restore_flags),
    "random states": Part(_read_random, _restore_random),
    "working folder": Part(_read_folder, _restore_folder),
    "open files": Part(_read_files, _close_files),
    "child processes": Part(_read_children, _end_children),
    "running threads": Part(_read_running, _nothing),
}
GROWING = {"open files", "child processes", "running threads"}  # fewer of them are no leak


_open: list[dict[str, Any]] = []  # the states before what is running


class Leak(Exception):
    """A test, or a fixture that several tests share, left the process changed."""


@contextlib.contextmanager
def unchanged(what: str, parts: Collection[str] = PARTS.keys()) -> Iterator[None]:
    """Restores the process at its end. Raises Leak with the parts that had changed.

    what: the test or the fixture, for the message. PyTorch's random state begins the same for each, and is restored.
    """
    before = {name: PARTS[name].read() for name in parts}
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    _open.append(before)
    try:
        yield
    finally:
        _open.pop()
        torch.set_rng_state(state)
        leaks = _leaks(before)
        if any(name in GROWING for name in leaks):
            gc.collect()  # what nothing refers to any more was only not freed yet
            if "running threads" in leaks:
                for thread in _read_running() - before["running threads"]:
                    thread.join(ENDING)
            leaks = _leaks(before)
        for name in leaks:
            PARTS[name].restore(before[name])
    if leaks:
        raise Leak(f"{what} left the process changed: " + "; ".join(f"{name}: {leaks[name]}" for name in leaks))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """A fixture that several tests share may not change the process for the tests after it."""
    if fixturedef.scope == "function":
        return (yield)
    with unchanged(f"the fixture {fixturedef.argname}", PARTS.keys() - GROWING):
        value = yield
    for before in _open:  # of a test that asks for the fixture in its body: it may hold these until later tests end
        for name in before.keys() & GROWING:
            before[name] |= PARTS[name].read()
    return value


@pytest.fixture(autouse=True)
def unchanged_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves the process changed fails; the tests after it have the process as it was."""
    with unchanged(request.node.nodeid):
        yield
        request.node.funcargs.clear()  # pytest keeps the values of the fixtures, and the files that these have open


def _leaks(before: Mapping[str, Any]) -> dict[str, str]:
    """The parts that differ from before, and how."""
    found = {}
    for name in PARTS:
        if name not in before or (now := PARTS[name].read()) == before[name]:
            continue
        match now:
            case dict():
                changed = [key for key in now.keys() | before[name].keys() if now.get(key) != before[name].get(key)]
                if name in GROWING:
                    changed = [key for key in changed if key in now]
                shown = ", ".join(
                    f"{key}" if name == "random states" else f"{key} {before[name].get(key)!r} -> {now.get(key)!r}"
                    for key in sorted(changed, key=str)
                )
            case set():
                shown = ", ".join(map(str, now - before[name]))
            case _:
                shown = f"{before[name]!r} -> {now!r}"
        if shown:
            found[name] = shown
    return found
