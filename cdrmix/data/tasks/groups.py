"""Word problems of groups: parity, S3 and S5 (Merrill, Petty and Sabharwal, arXiv 2404.08819, section 5).

A word is a sequence of elements of a group, and its value is their product. A model of fixed depth can compute parity
and S3, but not S5 unless NC1 = TC0 (Barrington 1989). The length of the word is the difficulty. With token ids, as in
the paper, target t is the product of inputs 0 .. t. As text, only the value of the whole word is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations
from typing import ClassVar, Self

from cdrmix.data.tasks.example import ANSWER, Example, TextDifficulty, TokenExample, task
from cdrmix.data.tasks.rng import Rng

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Word(TextDifficulty):
    """Harder with more elements."""

    size: ClassVar[int]  # of the set that the group permutes
    width: ClassVar[int]  # characters of an element as text, its blank included

    elements: int = 16

    def at_length(self, characters: int) -> Self:
        return replace(self, elements=max(1, (characters - 100) // self.width))


class Parity(Word):
    """Words of the group of two elements."""

    size, width = 2, 7


class S3(Word):
    """Words of the six permutations of three things."""

    size, width = 3, 4


class S5(Word):
    """Words of the 120 permutations of five things."""

    size, width = 5, 6


def elements_of(size: int) -> list[tuple[int, ...]]:
    """The permutations of 0 .. size - 1 in the order of their token ids; the identity is 0."""
    return list(permutations(range(size)))


def product(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """The composition: first, then second. Element i of the result is first[second[i]]."""
    return tuple(first[index] for index in second)


def word_tokens(rng: Rng, difficulty: Word) -> TokenExample:
    """Random elements, and the product of every prefix."""
    elements = elements_of(difficulty.size)
    number_of = {element: number for number, element in enumerate(elements)}
    inputs = [rng.randrange(len(elements)) for _ in range(difficulty.elements)]
    targets, value = [], elements[0]
    for number in inputs:
        value = product(value, elements[number])
        targets.append(number_of[value])
    return TokenExample(inputs, targets, len(elements))


@task("parity", Parity(), tokens=word_tokens)
def parity(rng: Rng, difficulty: Parity) -> Example:
    """Two words in random order. Asked: does one of them occur an even or an odd number of times?

    Every example has other words, because with 0 and 1 all examples would be near-duplicates.
    """
    made = word_tokens(rng, difficulty)
    words = [name.lower() for name in rng.names(2)]
    text = " ".join(words[number] for number in made.inputs)
    question = f"Question: Is the number of times that {words[1]} stands there even or odd?\n{ANSWER}"
    return Example(f"Words: {text}\n{question}", "", " odd" if made.targets[-1] else " even")


def symmetric(rng: Rng, difficulty: Word) -> Example:
    """Letters that are permuted repeatedly. Asked: their last order."""
    made = word_tokens(rng, difficulty)
    letters = "".join(rng.shuffled(LETTERS)[: difficulty.size])  # different in every example, as above
    elements = ["".join(letters[index] for index in element) for element in elements_of(difficulty.size)]
    orders = " ".join(elements[number] for number in made.inputs)
    prompt = (
        f"The letters {letters} stand in a row. Each order below moves the row as it moves {letters} itself: the "
        f"order says of which place each letter is taken.\nOrders: {orders}\n"
        f"Question: How does the row stand at the end?\n{ANSWER}"
    )
    return Example(prompt, "", f" {elements[made.targets[-1]]}")


task("s3", S3(), tokens=word_tokens)(symmetric)
task("s5", S5(), tokens=word_tokens)(symmetric)
