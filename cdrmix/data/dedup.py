"""Near-duplicate texts: 64-bit SimHash fingerprints and their exact join within a Hamming radius.

A fingerprint votes over word frequencies: texts that share nearly all of their words differ in few bits. That makes
it a cheap estimate, not proof; see csrc/simhash.hpp for the definition.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import IO

import numpy as np
from numpy.typing import NDArray

from cdrmix import _dedup

BLOCK = 2**22  # fingerprints of one side that are in memory and joined at a time: 32 MiB, the join some times that


def simhash(texts: Iterable[str], *, threads: int = 0) -> NDArray[np.uint64]:
    """The fingerprint of each text, uint64 [n]; `threads` 0 means one a core, and never changes the result.

    Raises ValueError for negative `threads` and for text that UTF-8 cannot hold (lone surrogates).
    """
    if threads < 0:
        raise ValueError(f"threads must not be negative; found {threads}")
    blobs = [text.encode() for text in texts]
    offsets = np.zeros(len(blobs) + 1, dtype=np.uint64)
    np.cumsum([len(blob) for blob in blobs], out=offsets[1:])
    return _dedup.simhash(b"".join(blobs), offsets, threads or len(os.sched_getaffinity(0)))


def near_duplicates(
    fingerprints_a: NDArray[np.uint64], fingerprints_b: NDArray[np.uint64], *, radius: int = 3
) -> NDArray[np.int64]:
    """Every pair (i, j) of fingerprints within `radius` bits, int64 [m, 2], sorted.

    Raises ValueError for a radius outside 0..63 or arrays of more than one dimension, TypeError for another dtype.
    """
    return _dedup.near_duplicates(fingerprints_a, fingerprints_b, radius)


def contaminated(held_out: NDArray[np.uint64], training: NDArray[np.uint64], *, radius: int = 3) -> NDArray[np.bool_]:
    """Which of the held-out fingerprints have a training fingerprint within `radius` bits, bool [n].

    Equal fingerprints are joined once, so that boilerplate repeated n times costs one pair, not n * n.
    """
    unique, inverse = np.unique(held_out, return_inverse=True)
    pairs = near_duplicates(unique, np.unique(training), radius=radius)
    found = np.zeros(len(unique), dtype=np.bool_)
    found[pairs[:, 0]] = True
    return found[inverse]


class FingerprintFile:
    """Any number of fingerprints in an open binary file of their own, 8 bytes each, read back in blocks."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def add(self, fingerprints: NDArray[np.uint64]) -> None:
        """Append an array, uint64 [n]."""
        self._file.write(fingerprints.tobytes())

    def blocks(self) -> Iterator[NDArray[np.uint64]]:
        """All that were added, in order, in arrays of BLOCK; what is added meanwhile is not seen."""
        position, end = 0, self._file.seek(0, os.SEEK_END)
        while position < end:
            self._file.seek(position)
            block = np.frombuffer(self._file.read(min(8 * BLOCK, end - position)), np.uint64)
            position += block.nbytes
            yield block


def count_contaminated(held_out: FingerprintFile, training: FingerprintFile, *, radius: int = 3) -> int:
    """How many of the held-out fingerprints have a training one within `radius` bits, block by block."""
    count = 0
    for block in held_out.blocks():
        found = np.zeros(len(block), np.bool_)
        for other in training.blocks():
            found |= contaminated(block, other, radius=radius)
        count += int(found.sum())
    return count
