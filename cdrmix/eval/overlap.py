"""Contamination: how many problems of a data set share a sequence of 13 words with the training text.

The definition is that of GPT-3 (arXiv 2005.14165, appendix C): words in lower case without punctuation, 13-grams.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cdrmix.errors import CdrmixError

WORDS = 13
BYTES = 64_000_000  # of training text that is read; 64 MB take about a minute
_WORD = re.compile(r"\w+")


class Overlap(NamedTuple):
    """problems: how many share a 13-gram, of `total` that have 13 words. characters: of the text that was read.

    whole: whether that was all training text.
    """

    problems: int
    total: int
    characters: int
    whole: bool

    def note(self, name: str) -> str:
        """The result as a sentence."""
        part = "the training text" if self.whole else f"the first {self.characters:,} characters of the training text"
        return f"{name}: {self.problems} of {self.total} problems share {WORDS} words in a row with {part}"


def overlaps(sets: Sequence[Sequence[str]], documents: Iterable[str], most: int = BYTES) -> list[Overlap]:
    """The overlap of sets of problems with documents, which are read once, up to about `most` characters."""
    owners: dict[int, list[tuple[int, int]]] = {}
    counts = []
    for which, problems in enumerate(sets):
        grams = [set(_grams(text)) for text in problems]
        counts.append(sum(map(bool, grams)))
        for number, own in enumerate(grams):
            for gram in own:
                owners.setdefault(gram, []).append((which, number))
    found: set[tuple[int, int]] = set()
    characters, whole = 0, True
    for document in documents:
        if characters >= most:
            whole = False
            break
        characters += len(document)
        for gram in _grams(document):
            if gram in owners:
                found.update(owners[gram])
    hits = [sum(which == owner for owner, _ in found) for which in range(len(sets))]
    return [Overlap(hit, count, characters, whole) for hit, count in zip(hits, counts, strict=True)]


def contamination(
    sets: Mapping[str, Sequence[str]], training: Callable[[], Iterable[str]]
) -> tuple[dict[str, Any], list[str]]:
    """The overlap of each set of problems by name with the training text, as facts and as notes.

    training: gives the documents; if it raises CdrmixError, there are no facts, and a note tells the reason.
    """
    if not sets:
        return {}, []
    try:
        found = dict(zip(sets, overlaps(list(sets.values()), training()), strict=True))
    except CdrmixError as error:
        return {}, [f"overlap with the training text: not measured: {error}"]
    facts = {name: overlap._asdict() for name, overlap in found.items()}
    return facts, [overlap.note(name) for name, overlap in found.items()]


def _grams(text: str) -> Iterator[int]:
    """Hashes of the 13-grams of a text, of 64 bits; they hold within one process."""
    words = _WORD.findall(text.lower())
    return (hash(tuple(words[start : start + WORDS])) for start in range(len(words) - WORDS + 1))
