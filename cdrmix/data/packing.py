"""Packing: documents to rows of exactly `row_length` positions, best-fit (Ding et al. 2024, arXiv 2404.10830).

A document of n tokens, the last one end-of-text, has n positions. At a position the input is a token and the target is
the next token; the first input is the end-of-text before the document, or its begin-of-text token. So every token is a
target exactly once. The positions are cut into pieces of row_length, and each whole piece is a row. The remainders are
shorter than a row. They are packed by best fit, longest first: each goes into the fullest row with enough free
positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit


class PackedRows(NamedTuple):
    """Rows of a block of documents. Segment s has the positions starts[s] .. starts[s] + lengths[s] - 1.

    first_segment: int64 [rows + 1], row r has the segments first_segment[r] .. first_segment[r + 1] - 1.
    starts: int64 [segments], token numbers. lengths: int32 [segments], at most row_length in total per row.
    """

    first_segment: np.ndarray[Any, np.dtype[np.int64]]
    starts: np.ndarray[Any, np.dtype[np.int64]]
    lengths: np.ndarray[Any, np.dtype[np.int32]]


def pack(
    starts: np.ndarray[Any, np.dtype[np.int64]], positions: np.ndarray[Any, np.dtype[np.int64]], row_length: int
) -> PackedRows:
    """Packs documents. Document i has positions[i] positions, and its first input is token number starts[i].

    starts, positions: int64 [documents]. The result depends only on the arguments.
    """
    assert (positions > 0).all(), "a document has at least its end-of-text token"
    whole, remainders = np.divmod(positions, row_length)

    # Whole pieces: piece k of document i starts at starts[i] + k * row_length.
    owner = np.repeat(np.arange(len(positions)), whole)
    piece = np.arange(len(owner)) - (np.cumsum(whole) - whole)[owner]
    whole_starts = starts[owner] + piece * row_length

    # Remainders: longest first, equal ones in the order of the documents; then sorted by row.
    longest_first = np.argsort(-remainders, kind="stable")[: np.count_nonzero(remainders)]
    rows, row_count = best_fit(remainders[longest_first], row_length)
    by_row = np.argsort(rows, kind="stable")
    packed = longest_first[by_row]

    segments_in_row = np.concatenate([np.ones(len(owner), np.int64), np.bincount(rows, minlength=row_count)])
    return PackedRows(
        first_segment=np.concatenate([[0], np.cumsum(segments_in_row)]).astype(np.int64),
        starts=np.concatenate([whole_starts, starts[packed] + whole[packed] * row_length]).astype(np.int64),
        lengths=np.concatenate([np.full(len(owner), row_length), remainders[packed]]).astype(np.int32),
    )


@njit(cache=True)
def best_fit(
    lengths: np.ndarray[Any, np.dtype[np.int64]], capacity: int
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """The bin of each length, in the given order, and the number of bins of `capacity`.

    Each length goes to the bin with the smallest sufficient free capacity, or to a new bin. A segment tree over the
    free capacities makes this O(n log capacity). lengths: int64 [n], each in 1 .. capacity.
    """
    leaves = 1
    while leaves <= capacity:
        leaves *= 2
    occupied = np.zeros(2 * leaves, np.bool_)  # node: whether a bin has its free capacity as a leaf below
    top = np.full(capacity + 1, -1, np.int64)  # free capacity: the bin that was last opened or filled to it
    below = np.full(len(lengths), -1, np.int64)  # bin: the next bin with the same free capacity
    bins = np.empty(len(lengths), np.int64)
    count = 0
    for item in range(len(lengths)):
        length = lengths[item]
        node = leaves + length
        while node > 1 and not occupied[node]:
            # The next larger free capacity is in the right sibling subtree of the first ancestor that has one.
            while node > 1 and (node % 2 == 1 or not occupied[node + 1]):
                node //= 2
            if node > 1:
                node += 1
                while node < leaves:
                    node = 2 * node if occupied[2 * node] else 2 * node + 1
        if node > 1:
            free = node - leaves
            chosen = top[free]
            top[free] = below[chosen]
            if top[free] < 0:
                occupied[node] = False
                node //= 2
                while node >= 1:
                    occupied[node] = occupied[2 * node] or occupied[2 * node + 1]
                    node //= 2
        else:
            free = capacity
            chosen = count
            count += 1
        bins[item] = chosen
        free -= length
        if free > 0:
            below[chosen] = top[free]
            top[free] = chosen
            node = leaves + free
            while node >= 1 and not occupied[node]:
                occupied[node] = True
                node //= 2
    return bins, count
