"""Keyed permutations of 0 .. n - 1 whose values are computed, not stored: orders of rows without state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

ROUNDS = 8  # of the Feistel network; four are pseudorandom (Luby and Rackoff 1988), and more cost microseconds


def permute(positions: Array, size: int, key: tuple[int, ...]) -> Array:
    """int64 [n]: the values of the permutation of 0 .. size - 1 with key `key` at `positions`, int64 [n].

    A Feistel network on the smallest even number of bits that holds `size`, with cycle walking (Black and Rogaway
    2002).
    Raises IndexError for a position outside of 0 .. size - 1, for which cycle walking may not end.
    """
    positions = np.asarray(positions, np.int64)
    return permute_each(positions, np.zeros(len(positions), np.int64), [size], [key])


def permute_each(positions: Array, which: Array, sizes: Sequence[int], keys: Sequence[tuple[int, ...]]) -> Array:
    """As `permute`, but position i uses the permutation number which[i] of `sizes` and `keys`.

    positions, which: int64 [n]. Returns int64 [n].
    """
    size_of = np.array(sizes, np.uint64)
    if len(positions):
        outside = (positions < 0) | (positions >= size_of.astype(np.int64)[which])
        if outside.any():
            size = sizes[int(which[outside.argmax()])]
            raise IndexError(f"positions {positions.min()} .. {positions.max()} are not all in 0 .. {size - 1}")
    half_bits = np.array([max(2, ((size - 1).bit_length() + 1) // 2) for size in sizes], np.uint64)
    round_keys = np.stack([_round_keys(key) for key in keys], axis=1)  # [ROUNDS, permutations]
    result = positions.astype(np.uint64)
    walking = np.arange(len(positions))
    while len(walking):
        chosen = which[walking]
        result[walking] = _feistel(result[walking], half_bits[chosen], round_keys[:, chosen])
        walking = walking[result[walking] >= size_of[chosen]]
    return result.astype(np.int64)


def _round_keys(key: tuple[int, ...]) -> Array:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def _feistel(values: Array, half_bits: Array, round_keys: Array) -> Array:
    """A bijection of uint64 values [n] below 2 ** (2 * half_bits [n]), by round_keys [ROUNDS, n]."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for round_key in round_keys:
        # The finalizer of splitmix64: every input bit affects every output bit.
        mixed = right ^ round_key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        left, right = right, left ^ (mixed & mask)
    return (left << half_bits) | right
