"""Cuts a text of tokens into chunks, at ends of sentences where there are some."""

from __future__ import annotations

from collections.abc import Sequence

from cdrmix.data.tasks.rng import SENTENCE_ENDS

ENDS = tuple(mark.encode() for mark in SENTENCE_ENDS)
SEARCHED = 2  # an end of a sentence is looked for in the last 1/2 of a chunk: sentences of prose have some 25 tokens


def chunk_bounds(pieces: Sequence[bytes], chunk: int, first: int | None = None) -> list[int]:
    """The first token of each chunk, and the number of tokens.

    pieces: the bytes of each token. A chunk ends with the last sentence or line that ends in the last half of its
    `chunk` tokens, so that a sentence rarely lies in two chunks; without one it has `chunk` tokens. first: the most
    tokens of the first chunk, if not `chunk`.
    """
    bounds, limit = [0], chunk if first is None else first
    while len(pieces) - bounds[-1] > limit:
        start, end = bounds[-1], bounds[-1] + limit
        least = max(start + 1, end - max(1, chunk // SEARCHED))
        ends = (place for place in range(end, least - 1, -1) if _ends_sentence(pieces[place - 1], pieces[place]))
        bounds.append(next(ends, end))
        limit = chunk
    return [*bounds, len(pieces)] if pieces else [0]


def _ends_sentence(last: bytes, following: bytes) -> bool:
    """Whether a sentence or a line ends between two tokens."""
    return b"\n" in last or (last.endswith(ENDS) and following[:1].isspace())
