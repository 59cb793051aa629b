"""The synthetic tasks of RULER, reimplemented (Hsieh et al., arXiv 2404.06654, section 3, and its synthetic.yaml).

Eight needle-in-a-haystack tasks, variable tracking, common words and frequent words, with the published numbers of
keys, values, queries, chains, hops and counts. There are three differences. Lengths are in characters, not in tokens of
a tokenizer. Sentences and words are generated for every example, where RULER repeats five fixed sentences or uses a
word list. Needles are at any position between sentences, not at one of forty depths. The two question-answering tasks
need data sets and are not included. The score is the share of references in the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_lowercase, ascii_uppercase

from cdrmix.data.tasks.example import ANSWER, Example, Length, listed, task
from cdrmix.data.tasks.rng import Rng, joined
from cdrmix.errors import ConfigError

REPEATED = 5  # sentences of the passage that a haystack of one passage repeats
HAYSTACKS = ("passage", "text", "needles")
KINDS = {"numbers": "number", "words": "word", "uuids": "code"}  # kinds of keys and values, and their names in needles
ASKED_RANKS = (2, 3, 4)  # of frequent words; the first rank is noise


@dataclass(frozen=True)
class Needles(Length):
    """Harder with more keys, more values per key, more keys in the question, and a haystack similar to the needles.

    haystack: passage (repeat in RULER), text (essay in RULER: the filler), needles (the same sentence with other keys).
    key_kind, value_kind: numbers, words, uuids.
    """

    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1
    haystack: str = "text"
    key_kind: str = "words"
    value_kind: str = "numbers"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries > self.keys:
            raise ConfigError(f"difficulty: queries = {self.queries} of keys = {self.keys}; ask for fewer")
        for name, known in (("haystack", HAYSTACKS), ("key_kind", tuple(KINDS)), ("value_kind", tuple(KINDS))):
            if getattr(self, name) not in known:
                raise ConfigError(f"difficulty: {name} = {getattr(self, name)!r}; it must be {' or '.join(known)}")


def passage_repeated(rng: Rng, characters: int) -> list[str]:
    """A passage of a few sentences, repeated; at most one sentence too long."""
    source = rng.source()
    passage = [next(source) for _ in range(REPEATED)]
    sentences: list[str] = []
    while characters > 0:
        sentences.append(passage[len(sentences) % REPEATED])
        characters -= len(sentences[-1]) + 1
    return sentences


def uuids(rng: Rng, count: int) -> list[str]:
    """Different random UUIDs, version 4 (RFC 9562)."""
    digits = rng.random_words(count, 30, "0123456789abcdef")
    return [f"{text[:8]}-{text[8:12]}-4{text[12:15]}-{rng.choice('89ab')}{text[15:18]}-{text[18:]}" for text in digits]


def things(rng: Rng, kind: str, count: int) -> list[str]:
    """Different keys or values: numbers of seven digits, words or UUIDs."""
    if kind == "numbers":
        return [str(number) for number in rng.sample(count, 1_000_000, 10_000_000)]
    return rng.names(count) if kind == "words" else uuids(rng, count)


def needle(difficulty: Needles, key: str, value: str) -> str:
    """The sentence with a value."""
    return f"The hidden {KINDS[difficulty.value_kind]} of {key} is {value}."


def haystack(rng: Rng, difficulty: Needles, keys: Sequence[str], characters: int) -> list[str]:
    """Lines of about `characters` characters in total, without the keys."""
    if difficulty.haystack == "passage":
        return passage_repeated(rng, characters)
    if difficulty.haystack == "text":
        return rng.passage(characters, keys)
    short = len(needle(difficulty, "", "")) + {"numbers": 7, "words": 6, "uuids": 36}[difficulty.value_kind] + 7
    count = max(0, characters) // short + 1
    others = [key for key in things(rng, difficulty.key_kind, count + len(keys)) if key not in keys]
    lines: list[str] = []
    for key, value in zip(others, things(rng, difficulty.value_kind, len(others)), strict=True):
        if characters <= 0:
            break
        lines.append(needle(difficulty, key, value))
        characters -= len(lines[-1]) + 1
    return lines


@task("ruler_niah_single_1", Needles(haystack="passage"))
@task("ruler_niah_single_2", Needles())
@task("ruler_niah_single_3", Needles(value_kind="uuids"))
@task("ruler_niah_multikey_1", Needles(keys=4))
@task("ruler_niah_multikey_2", Needles(haystack="needles"))
@task("ruler_niah_multikey_3", Needles(haystack="needles", key_kind="uuids", value_kind="uuids"))
@task("ruler_niah_multivalue", Needles(values=4))
@task("ruler_niah_multiquery", Needles(keys=4, queries=4))
def needles(rng: Rng, difficulty: Needles) -> Example:
    """Needles in a haystack. Asked: all values of some keys, in the order of the keys and then of the text."""
    keys = things(rng, difficulty.key_kind, difficulty.keys)
    values = things(rng, difficulty.value_kind, difficulty.keys * difficulty.values)
    told = rng.shuffled([(key, values[index :: difficulty.keys]) for index, key in enumerate(keys)])
    facts = rng.shuffled([(key, value) for key, those in told for value in those])
    asked = [keys[index] for index in rng.sample(difficulty.queries, 0, difficulty.keys)]
    answers = [value for key in asked for other, value in facts if other == key]
    kind = KINDS[difficulty.value_kind]
    be, noun = ("is", kind) if len(answers) == 1 else ("are all", f"{kind}s")
    before = f"In this text the {kind}s of some names are hidden. Remember them.\n"
    question = f"\nQuestion: What {be} the hidden {noun} of {listed(asked)}?\n{ANSWER}"
    lines = [needle(difficulty, key, value) for key, value in facts]
    missing = difficulty.characters - len(before) - len(question) - sum(len(line) + 1 for line in lines)
    pieces = rng.interleaved(lines, haystack(rng, difficulty, keys, missing))
    text = joined(pieces) if difficulty.haystack == "text" else "\n".join(pieces)
    return Example(before + text + question, "", f" {', '.join(answers)}", tuple(answers))


@dataclass(frozen=True)
class Tracking(Length):
    """Harder with more chains and more hops per chain."""

    chains: int = 1
    hops: int = 4


@task("ruler_vt", Tracking())
def variable_tracking(rng: Rng, difficulty: Tracking) -> Example:
    """Chains of assignments in a repeated passage. Asked: all variables with the value of one chain."""
    steps = difficulty.hops + 1
    names = rng.random_words(difficulty.chains * steps, 5, ascii_uppercase)
    values = rng.sample(difficulty.chains, 10_000, max(100_000, 4 * difficulty.chains))
    chains = [names[start : start + steps] for start in range(0, len(names), steps)]
    waiting = [
        iter([f"Let {chain[0]} = {value}."] + [f"Let {name} = {before}." for before, name in pairwise(chain)])
        for chain, value in zip(chains, values, strict=True)
    ]
    order = rng.shuffled([chain for chain in range(difficulty.chains) for _ in range(steps)])
    facts = [next(waiting[chain]) for chain in order]
    asked = rng.randrange(difficulty.chains)
    before = "In this text variables are given values, one from another. Keep track of them.\n"
    question = f"\nQuestion: Which variables have the value {values[asked]}?\n{ANSWER}"
    missing = difficulty.characters - len(before) - len(question) - sum(len(fact) + 1 for fact in facts)
    text = joined(rng.interleaved(facts, passage_repeated(rng, missing)))
    return Example(before + text + question, "", f" {', '.join(chains[asked])}", tuple(chains[asked]))


@dataclass(frozen=True)
class CommonWords(Length):
    """Harder with more common words and a smaller difference in frequency; in RULER 30 times and 3 times."""

    words: int = 10
    times: int = 30
    other_times: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.other_times >= self.times:
            raise ConfigError(
                f"difficulty: other_times = {self.other_times} and times = {self.times}; others must come less often"
            )


@task("ruler_cwe", CommonWords())
def common_words(rng: Rng, difficulty: CommonWords) -> Example:
    """A numbered list of words; the most frequent ones are asked for, in the order of their first occurrence.

    There are as many other words as fit the length, at least one.
    """
    before = "In this numbered list some words come more often than others. Remember those.\n"
    question = f"\nQuestion: Which {difficulty.words} words come most often in the list?\n{ANSWER}"
    left = difficulty.characters - len(before) - len(question)
    items, others, longest = difficulty.words * difficulty.times, 0, 6
    left -= sum(len(f"{number}. ") + longest + 1 for number in range(1, items + 1))
    while left > 0 or not others:
        others += 1
        left -= sum(len(f"{items + more}. ") + longest + 1 for more in range(1, difficulty.other_times + 1))
        items += difficulty.other_times
    if left < 0 and others > 1:  # the last one was too much
        others -= 1
    names = [name.lower() for name in rng.names(difficulty.words + others)]
    common = names[: difficulty.words]
    shuffled = rng.shuffled(common * difficulty.times + names[difficulty.words :] * difficulty.other_times)
    text = " ".join(f"{number}. {word}" for number, word in enumerate(shuffled, 1))
    ordered = sorted(common, key=shuffled.index)
    return Example(before + text + question, "", f" {', '.join(ordered)}", tuple(ordered))


@dataclass(frozen=True)
class FrequentWords(Length):
    """Harder with alpha near 1, because the frequencies of neighbouring ranks are then similar."""

    alpha: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alpha > 1:
            raise ConfigError(f"difficulty: alpha = {self.alpha}; the zeta distribution needs more than 1")


def zeta(alpha: float, terms: int = 30) -> float:
    """The Riemann zeta function above 1, by the Euler-Maclaurin formula; the error is below 10^-11."""
    head = sum(rank**-alpha for rank in range(1, terms))
    tail = terms ** (1 - alpha) / (alpha - 1) + terms**-alpha / 2 + alpha * terms ** (-alpha - 1) / 12
    return head + tail - alpha * (alpha + 1) * (alpha + 2) * terms ** (-alpha - 3) / 720


def frequencies(total: int, alpha: float, ranks: int) -> list[int]:
    """The frequency of each rank among about `total` words: floor(total * rank^-alpha / zeta(alpha))."""
    whole = zeta(alpha)
    return [int(total * rank**-alpha / whole) for rank in range(1, ranks + 1)]


def frequent_total(characters: int, alpha: float, ranks: int) -> int:
    """The largest total number of words that fits `characters` and gives different frequencies to the asked ranks."""

    def fits(total: int) -> bool:
        counts = frequencies(total, alpha, ranks)
        return 4 * counts[0] + 7 * sum(counts[1:]) <= characters  # '... ' and six letters with a blank

    def clear(total: int) -> bool:
        counts = frequencies(total, alpha, ranks)
        return all(counts[rank - 1] > counts[rank] for rank in ASKED_RANKS)

    low, high = 0, max(1, characters)  # the words that fit are from low to below high
    while fits(high):
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    fewer = next((total for total in range(low, 0, -1) if clear(total)), None)
    if fewer is not None:
        return fewer
    total = low + 1
    while not clear(total):
        total += 1
    return total


@task("ruler_fwe", FrequentWords())
def frequent_words(rng: Rng, difficulty: FrequentWords) -> Example:
    """Words of random letters with zeta-distributed frequencies; the first is dots. Asked: the next three.

    One word per 200 characters (in RULER per 50 tokens), at least five.
    """
    before = "In this coded text some words come more often than others. Keep count of them, not of the dots.\n"
    question = f"\nQuestion: Which {len(ASKED_RANKS)} words come most often in the coded text?\n{ANSWER}"
    ranks = max(ASKED_RANKS[-1] + 1, difficulty.characters // 200)
    words = ["...", *rng.random_words(ranks - 1, 6, ascii_lowercase)]
    total = frequent_total(difficulty.characters - len(before) - len(question), difficulty.alpha, ranks)
    counts = frequencies(total, difficulty.alpha, ranks)
    drawn = Counter(dict(zip(words, counts, strict=True)))
    answer = [words[rank - 1] for rank in ASKED_RANKS]
    text = " ".join(rng.shuffled(list(drawn.elements())))
    return Example(before + text + question, "", f" {', '.join(answer)}", tuple(answer))
