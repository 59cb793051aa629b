"""How numba's loops are compiled, and when what is kept of them on disk is out of date."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numba import njit

SHARED = ("elementwise.py", "numba_cache.py", "simd.py")  # sources that are compiled into the loops of other files


@functools.cache
def shared_sources() -> str:
    """A hash of SHARED."""
    sources = [Path(__file__).with_name(name).read_bytes() for name in SHARED]
    return hashlib.blake2b(b"".join(sources), digest_size=16).hexdigest()


def compiled(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """njit(function, **options), kept on disk; where no folder can be written, compiled in every process.

    Numba takes what it kept for current while the function's own file has its time and size, although the code of
    others is compiled into it: their hash stands beside those here.
    """
    try:
        dispatcher = njit(function, cache=True, **options)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return njit(function, **options)
    index = dispatcher._cache._cache_file
    index._source_stamp = (index._source_stamp, shared_sources())
    return dispatcher
