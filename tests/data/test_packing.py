"""Packing: every token is a target exactly once, in rows that are as few as best-fit gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.data.packing import best_fit, pack

lengths_of_documents = st.lists(st.integers(1, 60), max_size=40)


@given(lengths_of_documents, st.integers(1, 24), st.integers(0, 10**12))
def test_every_target_once_and_rows_full_enough(documents: list[int], row_length: int, origin: int) -> None:
    starts = np.cumsum([origin, *documents]).astype(np.int64)
    packed = pack(starts[:-1], np.diff(starts), row_length)
    # the target of position p is token p + 1
    targets = [
        start + position + 1
        for start, length in zip(packed.starts, packed.lengths, strict=True)
        for position in range(length)
    ]
    assert sorted(targets) == list(range(origin + 1, int(starts[-1]) + 1))
    # no segment crosses a border of documents
    owner = np.searchsorted(starts, packed.starts, "right")
    assert (owner == np.searchsorted(starts, packed.starts + packed.lengths - 1, "right")).all()
    # rows hold at most row_length positions, and none is empty
    filled = np.add.reduceat(packed.lengths, packed.first_segment[:-1]) if len(packed.starts) else np.zeros(0)
    assert packed.first_segment[0] == 0
    assert packed.first_segment[-1] == len(packed.starts)
    assert (filled <= row_length).all()
    assert (filled > 0).all()
    # only documents longer than a row are cut, and those into the fewest pieces
    pieces = np.bincount(owner - 1, minlength=len(documents))
    assert pieces.tolist() == [-(-length // row_length) for length in documents]
    # two rows that are not full never fit into one
    open_rows = np.sort(filled[filled < row_length])
    assert len(open_rows) < 2 or open_rows[0] + open_rows[1] > row_length


@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=50))))
def test_best_fit_takes_the_fullest_bin_that_has_room(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    bins, count = best_fit(np.array(lengths, np.int64), capacity)
    room: list[int] = []
    for length, chosen in zip(lengths, bins, strict=True):
        enough = [left for left in room if left >= length]
        if not enough:
            assert chosen == len(room)
            room.append(capacity)
        else:
            assert room[chosen] == min(enough)
        room[chosen] -= length
    assert count == len(room)


def test_packing_repeats_itself() -> None:
    starts = np.cumsum([0, *np.random.default_rng(1).integers(1, 500, 2000)])
    documents = (starts[:-1], np.diff(starts))
    for one, other in zip(pack(*documents, 64), pack(*documents, 64), strict=True):
        np.testing.assert_array_equal(one, other)


def test_little_of_the_rows_is_filling() -> None:
    """Documents shorter than a row, as in text cut by nothing: best-fit leaves well under a percent."""
    starts = np.cumsum([0, *np.random.default_rng(1).integers(2, 256, 20_000)])
    packed = pack(starts[:-1], np.diff(starts), 256)
    rows = len(packed.first_segment) - 1
    assert packed.lengths.sum() / (rows * 256) > 0.99
