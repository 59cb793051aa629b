"""Work shared out over as many Python threads as PyTorch may use, for code that releases the lock.

Numba's own pools are not used: `workqueue` ends the process when two threads enter it at once, `omp` when a forked
child does, and `tbb` is a package of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_pools: dict[int, ThreadPoolExecutor] = {}  # by process: a forked child inherits the entry but not the threads


def run_parts(part: Callable[[int], None], count: int) -> None:
    """part(0), ..., part(count - 1), the first in this thread. What a busy pool has not begun, this thread does."""
    if count > 1:
        pool = _pools.get(os.getpid())
        if pool is None:
            pool = _pools.setdefault(os.getpid(), ThreadPoolExecutor(os.cpu_count(), "cdrmix-kernel"))
        waiting = [(number, pool.submit(part, number)) for number in range(1, count)]
    else:
        waiting = []
    part(0)
    for number, future in waiting:
        if future.cancel():
            part(number)
        else:
            future.result()
