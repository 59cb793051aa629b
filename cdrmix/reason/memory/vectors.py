"""Vectors searched by inner product, under ids, by NumPy: exactly. faiss_vectors.py does the same by FAISS.

Both give of every query the largest products, and of equal ones the older vector first. Products are summed in another
order, so that they agree to float32's rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cdrmix.reason.memory.episode_log import Floats

Integers = np.ndarray[Any, np.dtype[np.int64]]
BLOCK = 1 << 22  # products of float32 that are held at once, of a search by NumPy


class ExactVectors:
    """Vectors in one array, all of which a search reads."""

    def __init__(self, dim: int) -> None:
        self._ids: Integers = np.empty(0, np.int64)
        self._keys: Floats = np.empty((0, dim), np.float32)

    def add(self, ids: Integers, keys: Floats) -> None:
        """Keys [n, dim] under new ids, ascending and above all there are."""
        self._ids, self._keys = np.concatenate([self._ids, ids]), np.concatenate([self._keys, keys])

    def remove(self, ids: Integers) -> None:
        """Takes ids out."""
        kept = ~np.isin(self._ids, ids)
        self._ids, self._keys = self._ids[kept], self._keys[kept]

    def search(self, queries: Floats, count: int, hidden: Integers) -> tuple[Integers, Floats]:
        """Of every query [Q, dim] the ids of the largest products, [Q, count], and those; id -1 where there are fewer.

        hidden: ids that are not to be found.
        """
        seen = ~np.isin(self._ids, hidden)
        ids, scores = np.full((len(queries), count), -1, np.int64), np.full((len(queries), count), -np.inf, np.float32)
        for place, query in enumerate(queries):
            products = self._products(query)
            products[~seen] = -np.inf
            best = np.argsort(-products, kind="stable")[: min(count, int(seen.sum()))]
            ids[place, : len(best)], scores[place, : len(best)] = self._ids[best], products[best]
        return ids, scores

    def _products(self, query: Floats) -> Floats:
        """Each by itself: a product of matrices may round equal keys differently, by where they stand."""
        rows = max(1, BLOCK // max(1, self._keys.shape[1]))
        blocks = [(query * self._keys[start : start + rows]).sum(-1) for start in range(0, len(self._keys), rows)]
        return np.concatenate(blocks) if blocks else np.empty(0, np.float32)
