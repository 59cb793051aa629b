"""How kernels are measured: interleaved timings, peak and kept memory, relative error, and which peers take part."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from cases import Options
from torch import Tensor
from triton.errors import TritonError

# Bytes that are written before a GPU timing, many times the 60 MB of an H200's L2. This takes 0.3 ms, in which the CPU
# launches the timed kernels, so that the time is the GPU's and not that of the first launch.
FLUSH_BYTES = 1 << 30
WRONG = 0.05  # relative error from which a peer counts as wrong and is not timed: 10 times bfloat16's
# Exceptions of a peer's code that does not run; nothing else is caught, and nothing of ours.
FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError),
    *(SyntaxError, TypeError, ValueError, TritonError, subprocess.SubprocessError),
)

Candidate = TypeVar("Candidate")  # an implementation
Runner = TypeVar("Runner")  # an implementation with its inputs


def admit(
    candidates: dict[str, Candidate],
    ours: str,
    weigh: Callable[[str, Candidate], tuple[Runner, dict[str, Any]]],
    options: Options,
) -> tuple[dict[str, Runner], dict[str, dict[str, Any]], dict[str, str]]:
    """Runners to be timed; the results of each that ran, with its "errors"; which were left out, and why.

    weigh: prepares, runs and checks one. Exceptions and errors of `ours` are not caught.
    """
    runners: dict[str, Runner] = {}
    found: dict[str, dict[str, Any]] = {}
    absent: dict[str, str] = {}
    deadline = time.monotonic() + options.seconds
    for who, implementation in candidates.items():
        if who == ours:
            runners[who], found[who] = weigh(who, implementation)
            continue
        if any(part in who for part in options.without):
            absent[who] = "left out by --without"
            continue
        try:
            with time_limit(deadline - time.monotonic()):
                runner, found[who] = weigh(who, implementation)
        except FAILURES as error:
            absent[who] = f"{type(error).__name__}: {error}"[:400]
        else:
            if all(value < WRONG for value in found[who]["errors"].values()):
                runners[who] = runner
            else:
                absent[who] = "gives wrong values, so its time means nothing: " + json.dumps(found[who]["errors"])
            del runner
        if who in absent and options.device == "cuda":
            torch.cuda.empty_cache()
    return runners, found, absent


def interleaved(calls: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of every call in every round, in turns, starting with another one in each round.

    On a GPU by CUDA events, with L2 overwritten before each. On a CPU by the clock, with warm caches.
    """
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    flush = torch.empty(FLUSH_BYTES // 4, device=device) if device.type == "cuda" else None
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(milliseconds(calls[name], flush))
    return samples


def milliseconds(call: Callable[[], object], flush: Tensor | None) -> float:
    """Milliseconds of one call; flush: a large tensor of the GPU that it runs on, None on a CPU."""
    if flush is None:
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1000
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(flush.device)
    return start.elapsed_time(end)


def peak_on_gpu(call: Callable[[], object], device: torch.device) -> int:
    """The peak of GPU bytes allocated during the call, beyond those allocated before."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def peak_of_process(call: Callable[[], object]) -> int | None:
    """The peak of the process's resident memory during the call, beyond that before; None where it is unknown.

    Linux keeps the peak; writing 5 to clear_refs resets it to the present value. Memory that was freed before but kept
    by malloc would hide the call's memory: glibc is told to return it, and a fresh process has little of it.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):  # another system, another C library
        return None
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def kept_for_backward(forward: Callable[[], Tensor], inputs: list[Tensor]) -> int:
    """Bytes that stay allocated between the passes besides inputs and output.

    On a GPU by the allocator, which counts everything; on a CPU the distinct storages that autograd saved.
    """
    if inputs[0].is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = forward()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = forward()
    for x in (*inputs, y):
        storages.pop(x.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def relative_error(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact| over all elements, in float64."""
    return ((found.double() - exact).norm() / exact.norm()).item()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the body after `seconds`, also between the compilations of an autotuner."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the time for preparing peers was over")

    if seconds <= 0:
        raise TimeoutError("the time for preparing peers was over")
    previous = signal.signal(signal.SIGALRM, stop)
    pending = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *pending)
