"""Packing: documents to rows of exactly `row_length` positions, best-fit (Ding et al. 2024, arXiv 2404.10830).

A document of n tokens (its last is end-of-text) has n positions: the input is a token, the target the next
one, and the first input is the end-of-text before the document. So every token is a target exactly once.
The positions are cut into pieces of row_length, which are rows by themselves; what remains of each document
is shorter than a row, and these remainders, longest first, each go into the fullest row that still has room.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit


class PackedRows(NamedTuple):
    """Rows of a block of documents. Segment s holds the positions starts[s] .. starts[s] + lengths[s] - 1.

    first_segment: int64 [rows + 1], row r has the segments first_segment[r] .. first_segment[r + 1] - 1.
    starts: int64 [segments], token numbers. lengths: int32 [segments], at most row_length a row in sum.
    """

    first_segment: np.ndarray[Any, np.dtype[np.int64]]
    starts: np.ndarray[Any, np.dtype[np.int64]]
    lengths: np.ndarray[Any, np.dtype[np.int32]]


def pack(
    starts: np.ndarray[Any, np.dtype[np.int64]], positions: np.ndarray[Any, np.dtype[np.int64]], row_length: int
) -> PackedRows:
    """Pack the documents whose first input is token number starts[i], of positions[i] positions each.

    starts, positions: int64 [documents]. A function of its arguments only.
    """
    assert (positions > 0).all(), "a document has at least its end-of-text token"
    whole, remainders = np.divmod(positions, row_length)

    # The whole pieces: piece k of document i starts at starts[i] + k * row_length.
    owner = np.repeat(np.arange(len(positions)), whole)
    piece = np.arange(len(owner)) - (np.cumsum(whole) - whole)[owner]
    whole_starts = starts[owner] + piece * row_length

    # The remainders, longest first, documents in order among equals; then row by row.
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
    """The bin of every length, in the order given, and the number of bins of `capacity`.

    Each goes to the bin with the least room that is enough, or to a new one: O(n log capacity) by a segment
    tree over the amounts of room. lengths: int64 [n], each in 1 .. capacity.
    """
    leaves = 1
    while leaves <= capacity:
        leaves *= 2
    occupied = np.zeros(2 * leaves, np.bool_)  # node: some bin's room is a leaf below it
    top = np.full(capacity + 1, -1, np.int64)  # room: the bin opened or filled last that has exactly this room
    below = np.full(len(lengths), -1, np.int64)  # bin: the next one with the same room
    bins = np.empty(len(lengths), np.int64)
    count = 0
    for item in range(len(lengths)):
        length = lengths[item]
        node = leaves + length
        while node > 1 and not occupied[node]:
            # The least room above is in the right neighbour's subtree of the first ancestor that has one.
            while node > 1 and (node % 2 == 1 or not occupied[node + 1]):
                node //= 2
            if node > 1:
                node += 1
                while node < leaves:
                    node = 2 * node if occupied[2 * node] else 2 * node + 1
        if node > 1:
            room = node - leaves
            chosen = top[room]
            top[room] = below[chosen]
            if top[room] < 0:
                occupied[node] = False
                node //= 2
                while node >= 1:
                    occupied[node] = occupied[2 * node] or occupied[2 * node + 1]
                    node //= 2
        else:
            room = capacity
            chosen = count
            count += 1
        bins[item] = chosen
        room -= length
        if room > 0:
            below[chosen] = top[room]
            top[room] = chosen
            node = leaves + room
            while node >= 1 and not occupied[node]:
                occupied[node] = True
                node //= 2
    return bins, count
