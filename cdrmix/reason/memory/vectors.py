"""Exact search of vectors with ids by inner product, in NumPy; faiss_vectors.py searches by FAISS.

Both return for every query the vectors with the largest products, of equal products the older vector first. They sum
a product in different orders, so their scores agree to the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from cdrmix.reason.memory.episode_log import Episode, Floats

Integers = np.ndarray[Any, np.dtype[np.int64]]
BLOCK = 1 << 22  # float32 numbers that a search by NumPy holds at once


class Vectors(Protocol):
    """A structure that searches vectors with ids by inner product."""

    def add(self, ids: Integers, keys: Floats) -> None:
        """Adds keys [n, dim] with new ids, ascending and above all present ids."""

    def remove(self, ids: Integers) -> None:
        """Removes ids."""

    def search(self, queries: Floats, count: int, hidden: Integers) -> tuple[Integers, Floats]:
        """Ids and values of the largest products of every query [Q, dim], both [Q, count]; id -1 means no result.

        hidden: ids that the search leaves out.
        """


def update(vectors: Vectors, removed: Integers, added: Sequence[Episode]) -> None:
    """Removes ids, and adds the keys of episodes."""
    if len(removed):
        vectors.remove(removed)
    if added:
        ids = np.array([episode.id for episode in added], np.int64)
        vectors.add(ids, np.stack([episode.key for episode in added]))


class ExactVectors:
    """Vectors in one array. A search reads all of them."""

    def __init__(self, dim: int) -> None:
        self._ids: Integers = np.empty(0, np.int64)
        self._keys: Floats = np.empty((0, dim), np.float32)

    def add(self, ids: Integers, keys: Floats) -> None:
        """See Vectors."""
        self._ids, self._keys = np.concatenate([self._ids, ids]), np.concatenate([self._keys, keys])

    def remove(self, ids: Integers) -> None:
        """See Vectors."""
        kept = ~np.isin(self._ids, ids)
        self._ids, self._keys = self._ids[kept], self._keys[kept]

    def search(self, queries: Floats, count: int, hidden: Integers) -> tuple[Integers, Floats]:
        """See Vectors."""
        visible = ~np.isin(self._ids, hidden)
        ids, scores = np.full((len(queries), count), -1, np.int64), np.full((len(queries), count), -np.inf, np.float32)
        for row, query in enumerate(queries):
            products = self._products(query)
            products[~visible] = -np.inf
            best = np.argsort(-products, kind="stable")[: min(count, int(visible.sum()))]
            ids[row, : len(best)], scores[row, : len(best)] = self._ids[best], products[best]
        return ids, scores

    def _products(self, query: Floats) -> Floats:
        """One inner product at a time: a matrix product may round equal keys differently, by their position."""
        rows = max(1, BLOCK // max(1, self._keys.shape[1]))
        blocks = [(query * self._keys[start : start + rows]).sum(-1) for start in range(0, len(self._keys), rows)]
        return np.concatenate(blocks) if blocks else np.empty(0, np.float32)
