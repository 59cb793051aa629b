"""Random rng that are the same on every machine, and the filler text between which facts are hidden."""

from __future__ import annotations

import hashlib
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import TypeVar

Item = TypeVar("Item")

SYLLABLES = [consonant + vowel for consonant in "bdklmnr" for vowel in "aeiou"]
ADJECTIVES = [
    "old",
    "quiet",
    "narrow",
    "yellow",
    "distant",
    "broken",
    "early",
    "warm",
    "heavy",
    "plain",
    "silver",
    "hidden",
]
NOUNS = [
    "bridge",
    "garden",
    "letter",
    "river",
    "lamp",
    "market",
    "window",
    "orchard",
    "harbour",
    "clock",
    "meadow",
    "stair",
]
VERBS = ["stood", "waited", "turned", "rested", "shone", "leaned", "remained", "slept", "faded", "moved"]
PREPOSITIONS = ["beside", "under", "behind", "above", "near", "beyond", "before"]

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
LONGEST_SENTENCE = 400  # characters; what has no full stop for longer, a table or code, is cut here


class Filler:
    """Sentences of a corpus, of which examples take a run to hide their facts in, as RULER and BABILong do.

    documents: texts of any length, read once; white space counts as one blank.
    max_characters: where reading stops; the sentences are held in memory.
    Raises ValueError when the documents hold no text.
    """

    def __init__(self, documents: Iterable[str], max_characters: int = 50_000_000) -> None:
        self.sentences: list[str] = []
        left = max_characters
        for sentence in chain.from_iterable(map(sentences_of, documents)):
            self.sentences.append(sentence)
            left -= len(sentence)
            if left <= 0:
                break
        if not self.sentences:
            raise ValueError("the filler's documents hold no text; give at least one sentence, or no filler at all")

    def run(self, start: int) -> Iterator[str]:
        """The sentences from number `start` on, from the beginning again behind the last one, without end."""
        while True:
            yield self.sentences[start % len(self.sentences)]
            start += 1


def sentences_of(document: str) -> Iterator[str]:
    """The sentences of a text, none empty, none longer than LONGEST_SENTENCE."""
    for sentence in SENTENCE_END.split(document):
        words = " ".join(sentence.split())
        while len(words) > LONGEST_SENTENCE:
            cut = words.rfind(" ", 1, LONGEST_SENTENCE + 1)
            cut = LONGEST_SENTENCE if cut < 0 else cut
            yield words[:cut]
            words = words[cut:].lstrip()
        if words:
            yield words


class Rng:
    """Random choices that depend on the seed, the task and the number of the example, on any version of Python.

    filler: where the text between facts is taken from; None: sentences that are made up.
    """

    def __init__(self, seed: int, task: str, number: int, filler: Filler | None = None) -> None:
        digest = hashlib.blake2b(repr((seed, task, number)).encode(), digest_size=16).digest()
        # random() is what Python promises to keep; how choice and shuffle use it may change
        self._random = random.Random(int.from_bytes(digest, "big")).random
        self.filler = filler

    def randrange(self, limit: int) -> int:
        """An integer from 0 to limit - 1."""
        return int(self._random() * limit)

    def choice(self, items: Sequence[Item]) -> Item:
        return items[self.randrange(len(items))]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        items = list(items)
        for last in range(len(items) - 1, 0, -1):
            other = self.randrange(last + 1)
            items[last], items[other] = items[other], items[last]
        return items

    def sample(self, count: int, first: int, end: int) -> list[int]:
        """Different integers from `first` to end - 1, in random order; there must be so many."""
        if 2 * count > end - first:
            return self.shuffled(range(first, end))[:count]
        found: dict[int, None] = {}
        while len(found) < count:
            found[first + self.randrange(end - first)] = None
        return list(found)

    def weighted_sample(self, count: int, weights: Sequence[float]) -> list[int]:
        """Different indices in `weights`, one after another, each drawn in proportion to the weights still left."""
        sums = list(accumulate(weights))
        found: dict[int, None] = {}
        while len(found) < count:  # a index drawn again is drawn anew: the same as taking it out of the weights
            index = bisect_right(sums, self._random() * sums[-1])
            found[min(index, len(sums) - 1)] = None
        return list(found)

    def names(self, count: int) -> list[str]:
        """Different names of three syllables or, where those run short, more."""
        names: dict[str, None] = {}
        while len(names) < count:
            length = 3 if len(names) < len(SYLLABLES) ** 3 // 4 else 5
            names["".join(self.choice(SYLLABLES) for _ in range(length)).capitalize()] = None
        return list(names)

    def random_words(self, count: int, length: int, letters: str) -> list[str]:
        """Different words of `length` random letters."""
        words: dict[str, None] = {}
        while len(words) < count:
            words["".join(self.choice(letters) for _ in range(length))] = None
        return list(words)

    def sentence(self) -> str:
        """A sentence that says nothing of any task."""
        first, second = self.choice(NOUNS), self.choice(NOUNS)
        return f"The {self.choice(ADJECTIVES)} {first} {self.choice(VERBS)} {self.choice(PREPOSITIONS)} the {second}."

    def source(self) -> Iterator[str]:
        """Filler sentences without end: a run of the corpus from a random index, or made up."""
        if self.filler is not None:
            return self.filler.run(self.randrange(len(self.filler.sentences)))
        return iter(self.sentence, None)

    def passage(self, characters: int, without: Sequence[str] = ()) -> list[str]:
        """Filler sentences of about `characters` in all, blanks between them counted: at most one too long.

        without: words that the sentences must not have, as a reader would take them for a part of the example.
        Raises ValueError where the corpus has no sentence without them.
        """
        excluded = re.compile(rf"\b({'|'.join(map(re.escape, without))})\b", re.IGNORECASE) if without else None
        source = self.source()
        sentences: list[str] = []
        skipped = 0
        while characters > 0:
            sentence = next(source)
            if excluded is None or not excluded.search(sentence):
                sentences.append(sentence)
                characters -= len(sentence) + 1
                skipped = 0
            elif self.filler is not None:
                skipped += 1
                if skipped > len(self.filler.sentences):
                    raise ValueError(f"every sentence of the filler has one of {', '.join(without)}; give more text")
        return sentences

    def among_filler(self, facts: Sequence[str], characters: int, without: Sequence[str] = ()) -> str:
        """The facts in their order, spread at random among filler sentences to about `characters` in all."""
        filler = self.passage(characters - sum(len(fact) + 1 for fact in facts), without)
        return " ".join(self.interleaved(facts, filler))

    def interleaved(self, facts: Sequence[str], filler: Sequence[str]) -> list[str]:
        """Facts and filler in one list, each in its own order, every way of it equally likely."""
        marks = self.shuffled([True] * len(facts) + [False] * len(filler))
        given, noise = iter(facts), iter(filler)
        return [next(given) if mark else next(noise) for mark in marks]
