"""Random numbers that are the same on every machine, and the filler text in which facts are hidden."""

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

SENTENCE_ENDS = (".", "!", "?")
SENTENCE_END = re.compile(rf"(?<=[{''.join(SENTENCE_ENDS)}])\s+|\n+")
LONGEST_SENTENCE = 400  # characters; longer text without a full stop, such as a table or code, is cut


class Filler:
    """Sentences of a corpus in which examples hide their facts, as in RULER and BABILong.

    documents: texts of any length, read once; white space is normalised to single spaces.
    max_characters: limit of the text, which is kept in memory.
    Raises ValueError if the documents have no text.
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
        """An infinite sequence of the sentences from number `start` on, cyclically."""
        while True:
            yield self.sentences[start % len(self.sentences)]
            start += 1


def sentences_of(document: str) -> Iterator[str]:
    """The non-empty sentences of a text, of at most LONGEST_SENTENCE characters."""
    for sentence in SENTENCE_END.split(document):
        words, start = " ".join(sentence.split()), 0
        while len(words) - start > LONGEST_SENTENCE:
            cut = words.rfind(" ", start + 1, start + LONGEST_SENTENCE + 1)
            cut = start + LONGEST_SENTENCE if cut < 0 else cut
            yield words[start:cut]
            start = cut + (words[cut] == " ")
        if start < len(words):
            yield words[start:]


def joined(sentences: Iterable[str]) -> str:
    """Sentences as one text: with a space after each, and a line break after what has no end, such as a line of code.

    A space there would make the next sentence a part of that line.
    """
    return "".join(f"{text} " if text.endswith(SENTENCE_ENDS) else f"{text}\n" for text in sentences)[:-1]


def paragraphs(chunks: Iterable[str]) -> str:
    """Chunks as one text, each a paragraph: a line, without the line breaks in it."""
    return "\n".join(chunk.replace("\n", " ") for chunk in chunks if chunk)


class Rng:
    """Random choices that depend on the seed, the task and the number of the example, in every version of Python.

    filler: the source of the text between facts; None: generated sentences.
    """

    def __init__(self, seed: int, task: str, number: int, filler: Filler | None = None) -> None:
        digest = hashlib.blake2b(repr((seed, task, number)).encode(), digest_size=16).digest()
        # Python guarantees the values of random(); those of choice and shuffle may change
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
        """`count` different integers from `first` to end - 1, in random order."""
        if 2 * count > end - first:
            return self.shuffled(range(first, end))[:count]
        found: dict[int, None] = {}
        while len(found) < count:
            found[first + self.randrange(end - first)] = None
        return list(found)

    def weighted_sample(self, count: int, weights: Sequence[float]) -> list[int]:
        """Different indices of `weights`, drawn one after another in proportion to the remaining weights."""
        sums = list(accumulate(weights))
        found: dict[int, None] = {}
        while len(found) < count:  # rejecting a repeated index is the same as removing it from the weights
            index = bisect_right(sums, self._random() * sums[-1])
            found[min(index, len(sums) - 1)] = None
        return list(found)

    def names(self, count: int) -> list[str]:
        """Different names of three syllables, or of five for many names."""
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
        """A sentence without information for any task."""
        first, second = self.choice(NOUNS), self.choice(NOUNS)
        return f"The {self.choice(ADJECTIVES)} {first} {self.choice(VERBS)} {self.choice(PREPOSITIONS)} the {second}."

    def source(self) -> Iterator[str]:
        """An infinite sequence of filler sentences: of the corpus from a random sentence on, or generated."""
        if self.filler is not None:
            return self.filler.run(self.randrange(len(self.filler.sentences)))
        return iter(self.sentence, None)

    def passage(self, characters: int, without: Sequence[str] = ()) -> list[str]:
        """Filler sentences of about `characters` characters in total with spaces, at most one sentence too long.

        without: words that the sentences must not contain, because they could be taken for a part of the example.
        Raises ValueError if the corpus has no sentence without them.
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
        """The facts in their order, at random positions among filler sentences, about `characters` in total."""
        passage = self.passage(characters - sum(len(fact) + 1 for fact in facts), without)
        return joined(self.interleaved(facts, passage))

    def interleaved(self, facts: Sequence[str], filler: Sequence[str]) -> list[str]:
        """Facts and filler in one list, each in its own order. Every interleaving has the same probability."""
        marks = self.shuffled([True] * len(facts) + [False] * len(filler))
        given, noise = iter(facts), iter(filler)
        return [next(given) if mark else next(noise) for mark in marks]
