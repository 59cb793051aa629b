"""Work shared out over as many threads as PyTorch may use, for code that releases Python's lock.

The threads are those of PyTorch's own OpenMP library where it is GNU's. They wait for work by spinning for some
milliseconds, so threads of another pool would share the cores with them: beside Python's threads, two cores made the
kernels of a training step 1.03 to 1.2 times as fast as one, and PyTorch's operations twice (benchmarks/LOG.md). Numba's
own pools are not used: `workqueue` ends the process when two threads enter it at once, `omp` when a forked child does,
and it is a second OpenMP library, and `tbb` is a package of its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from cdrmix.kernels.common.libtorch import torch_function

_pools: dict[int, ThreadPoolExecutor] = {}  # by process: a forked child inherits the entry but not the threads
_process = os.getpid()  # a forked child has the library's record of its threads, but not the threads
_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# GNU OpenMP's entry to a parallel region, which returns to this thread at once (what the others run, its argument, the
# number of threads, this one too), and its end, which waits for the others. GOMP_parallel would call back into Python
# in this thread as well, where a signal's handler may raise before any `try` is reached: the exception is then lost.
_start = torch_function("GOMP_parallel_start", [_Region, ctypes.c_void_p, ctypes.c_uint], None)
_end = torch_function("GOMP_parallel_end", [], None)


def run_parts(part: Callable[[int], None], count: int) -> None:
    """part(0), ..., part(count - 1), shared out over PyTorch's number of threads, of which this is one."""
    if count == 1:
        part(0)
    elif _start is not None and os.getpid() == _process:
        _run_in_openmp(part, count)
    else:
        _run_in_pool(part, count)


def _run_in_openmp(part: Callable[[int], None], count: int) -> None:
    left, errors = iter(range(count)), []

    def others(_: object) -> None:
        try:
            for number in left:
                part(number)
        except BaseException as error:  # noqa: BLE001  it cannot pass through the library: raised again below
            errors.append(error)

    region, threads = _Region(others), torch.get_num_threads()
    try:  # Python looks for signals behind a call, not between `try` and it: the end always follows the start
        _start(region, None, threads)
        for number in left:
            part(number)
    finally:
        _end()
    if errors:
        raise errors[0]


def _run_in_pool(part: Callable[[int], None], count: int) -> None:
    pool = _pools.get(os.getpid())
    if pool is None:
        pool = _pools.setdefault(os.getpid(), ThreadPoolExecutor(os.cpu_count(), "cdrmix-kernel"))
    waiting = [(number, pool.submit(part, number)) for number in range(1, count)]
    part(0)
    for number, future in waiting:  # what a busy pool has not begun, this thread does
        if future.cancel():
            part(number)
        else:
            future.result()
