"""The division of kernels' work among PyTorch's threads: all of it, once, at the same time, with its errors."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cdrmix.kernels.common import cpu
from cdrmix.kernels.common.cpu import run_parts


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["openmp", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pools: dict[int, ThreadPoolExecutor] = {}
    if request.param == "python":
        monkeypatch.setattr(cpu, "_start", None)
        monkeypatch.setattr(cpu, "_pools", pools)
    elif cpu._start is None:
        pytest.skip("PyTorch is linked with another OpenMP than GNU's")
    yield request.param
    for pool in pools.values():
        pool.shutdown()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_part_runs_once(way: str, count: int) -> None:
    done: list[int] = []
    run_parts(done.append, count)
    assert sorted(done) == list(range(count))


def test_two_parts_run_at_the_same_time(way: str) -> None:
    both, threads = threading.Barrier(2, timeout=60), set()

    def part(_: int) -> None:
        threads.add(threading.get_ident())
        both.wait()  # which raises if only one thread ever comes

    run_parts(part, 2)
    assert len(threads) == 2
    assert threading.get_ident() in threads


def test_the_threads_are_those_of_pytorch() -> None:
    """A further pool's threads would share the cores with PyTorch's, which spin while they wait."""
    if cpu._start is None:
        pytest.skip("PyTorch is linked with another OpenMP than GNU's")

    both, foreign = threading.Barrier(2, timeout=60), []  # foreign: of threads that Python did not start

    def part(_: int) -> None:
        both.wait()
        foreign.append(threading.get_ident() not in {thread.ident for thread in threading.enumerate()})

    def number() -> int:
        return len(os.listdir("/proc/self/task"))

    torch.ones(1 << 20).exp_()  # PyTorch has its threads now
    before = number()
    for _ in range(5):
        run_parts(part, 2)
        torch.ones(1 << 20).exp_()
    assert number() == before
    assert foreign.count(True) == 5


def test_no_exception_of_a_signal_is_lost_and_no_part_is_left_out() -> None:
    """Not of Python's pool: its locks stay taken when a handler raises between one's taking and its `with` block."""
    if cpu._start is None:
        pytest.skip("PyTorch is linked with another OpenMP than GNU's")

    class Alarm(Exception):
        pass

    raised, caught = 0, 0

    def alarm(*_: object) -> None:
        nonlocal raised
        raised += 1
        raise Alarm

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        while raised < 30:
            done: list[int] = []
            finished = False
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                run_parts(done.append, 4)
                finished = True
                time.sleep(1e-2)  # for a signal that comes later
            except Alarm:
                caught += 1
            assert not finished or sorted(done) == [0, 1, 2, 3]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert caught == raised


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("wrong", [0, 1])
def test_an_error_of_any_part_is_raised_here(way: str, wrong: int, error: type[BaseException]) -> None:
    def part(number: int) -> None:
        if number == wrong:
            raise error("this part")

    for _ in range(3):
        with pytest.raises(error, match="this part"):
            run_parts(part, 2)
    test_every_part_runs_once(way, 2)


def test_parts_that_divide_work_themselves(way: str) -> None:
    done: list[tuple[int, int]] = []

    def part(outer: int) -> None:
        torch.set_num_threads(2)  # a new thread starts from the environment's number
        run_parts(lambda inner: done.append((outer, inner)), 2)

    run_parts(part, 2)
    assert sorted(done) == [(0, 0), (0, 1), (1, 0), (1, 1)]
