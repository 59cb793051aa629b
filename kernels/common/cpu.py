"""What the numba kernels share: compilation kept on disk, threads, document starts, addresses and scratch memory.

Threads: `run_parts` uses the threads of PyTorch's own OpenMP library where that library is GNU's. OpenMP threads spin
for some milliseconds while they wait, so a second pool of threads would compete with them for the cores. With a pool
of Python threads, two cores made the kernels of a training step only 1.03 to 1.2 times as fast as one core, and
PyTorch's operations twice as fast (benchmarks/LOG.md). Numba's own pools are not used: `workqueue` ends the process
when two threads enter it at once, `omp` ends it when a forked child enters it and is a second OpenMP library, and
`tbb` is a separate package.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from cdrmix.kernels.common.libtorch import torch_function

SHARED = ("cpu.py", "elementwise.py", "simd.py")  # sources that are compiled into the loops of other files

_pools: dict[int, ThreadPoolExecutor] = {}  # by process id: a forked child inherits the entry but not the threads
_process = os.getpid()  # a forked child inherits OpenMP's record of its threads, but not the threads
_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# GOMP_parallel_start(function, argument, threads) starts `function` on the other threads and returns at once;
# GOMP_parallel_end waits for them. GOMP_parallel would run Python code in this thread too, inside the C call. A signal
# handler may raise there before any `try` is reached, and that exception would be lost.
_start = torch_function("GOMP_parallel_start", [_Region, ctypes.c_void_p, ctypes.c_uint], None)
_end = torch_function("GOMP_parallel_end", [], None)


@functools.cache
def shared_sources() -> str:
    """A hash of the files in SHARED."""
    sources = [Path(__file__).with_name(name).read_bytes() for name in SHARED]
    return hashlib.blake2b(b"".join(sources), digest_size=16).hexdigest()


@functools.cache
def sources_beside(file: str) -> str:
    """A hash of the Python files in the file's folder: their functions and constants may be compiled into its loops."""
    sources = [path.read_bytes() for path in sorted(Path(file).parent.glob("*.py"))]
    return hashlib.blake2b(b"".join(sources), digest_size=16).hexdigest()


def compile_cached(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """njit(function, **options), kept on disk; where no folder is writable, compiled again in every process.

    Numba considers the kept code current while the time and size of the function's own file are unchanged. Functions of
    other files are compiled into it, so the hashes of the shared files and of those beside it are in numba's stamp too.
    """
    try:
        dispatcher = njit(function, cache=True, **options)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return njit(function, **options)
    index = dispatcher._cache._cache_file
    index._source_stamp = (index._source_stamp, shared_sources(), sources_beside(function.__code__.co_filename))
    return dispatcher


def address(x: Tensor | None) -> int:
    """The address of a tensor's data; 0 for None."""
    return 0 if x is None else x.data_ptr()


def documents(cu_seqlens: Tensor | None, batch: int, length: int) -> Tensor:
    """Document starts over the flattened tokens, int64 [N + 1]; one document a row where cu_seqlens is None."""
    if cu_seqlens is None:
        return torch.arange(0, (batch + 1) * length, length)
    return cu_seqlens.long().contiguous()


def check(*tensors: Tensor | None) -> None:
    """Asserts what loops over addresses assume: contiguous float32 tensors on the CPU."""
    for x in tensors:
        assert x is None or (x.dtype == torch.float32 and x.is_contiguous() and x.device.type == "cpu")


class Scratch:
    """Scratch memory for `parts` threads: for each, arrays of the given numbers of floats, aligned to cache lines.

    It is a numpy array and not a tensor: in deterministic mode PyTorch fills every empty tensor, and it does so on
    OpenMP threads, after which a fork is not safe.
    """

    def __init__(self, parts: int, sizes: list[int]) -> None:
        self.offsets, end = [], 0
        for size in sizes:
            self.offsets.append(end)
            end += 4 * size
            end += -end % 64
        self.stride = end
        self.memory = np.empty(parts * end + 64, np.uint8)

    def of(self, part: int) -> list[int]:
        """The addresses of one thread's arrays."""
        start = self.memory.ctypes.data
        start += -start % 64 + part * self.stride
        return [start + offset for offset in self.offsets]


def run_parts(part: Callable[[int], None], count: int) -> None:
    """Calls part(0), ..., part(count - 1) on PyTorch's number of threads; the calling thread is one of them.

    `part` should release Python's lock for most of its time.
    """
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
        except BaseException as error:  # noqa: BLE001  it cannot pass through the C library: raised again below
            errors.append(error)

    region, threads = _Region(others), torch.get_num_threads()
    try:  # Python handles signals after a call, not between `try` and the call: _end always follows _start
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
    for number, future in waiting:  # this thread runs the parts that a busy pool has not started
        if future.cancel():
            part(number)
        else:
            future.result()
