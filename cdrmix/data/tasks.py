"""Generated exercises whose answer follows from their text: recall, tracking, arithmetic, sorting, copying.

They are of the kinds on which models of long context are compared (RULER, arXiv 2404.06654; zoology's associative
recall, arXiv 2312.04927; permutation tracking, arXiv 2404.08819), written out anew. Exercise n of a task is a
function of (seed, task, n, length) alone, so that an evaluation can make the ones that no training has seen.

A document is prompt, steps and answer, one behind the other; steps, where a task has any, stand between THINK_BEGIN
and THINK_END, so that data.objectives.spans can weigh them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from cdrmix.config import schema_data as schema
from cdrmix.errors import ConfigError
from cdrmix.registry import Registry, nearest

Item = TypeVar("Item")

THINK_BEGIN, THINK_END = "<think>", "</think>"
HOPS = 4  # of a chain of variables, as RULER's
BOXES = 5  # S5, the smallest group whose tracking needs more than fixed depth (Barrington 1989)

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
PLACES = ["beside", "under", "behind", "above", "near", "beyond", "before"]
THINGS = ["a key", "a coin", "a ring", "a shell", "a map", "a stone", "a bell", "a feather"]


class Exercise(NamedTuple):
    """A task's text in three parts; `steps` may be empty, `answer` begins with what parts it from the text before."""

    prompt: str
    steps: str
    answer: str

    @property
    def text(self) -> str:
        return self.prompt + self.steps + self.answer


class Draws:
    """Random choices that depend on the seed, the task and the number of the exercise, on any version of Python."""

    def __init__(self, seed: int, task: str, number: int) -> None:
        digest = hashlib.blake2b(repr((seed, task, number)).encode(), digest_size=16).digest()
        # random() is what Python promises to keep; how choice and shuffle use it may change
        self._random = random.Random(int.from_bytes(digest, "big")).random

    def below(self, limit: int) -> int:
        """An integer from 0 to limit - 1."""
        return int(self._random() * limit)

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        items = list(items)
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
        return items

    def names(self, count: int) -> list[str]:
        """Different names of three syllables or, where those run short, more."""
        names: dict[str, None] = {}
        while len(names) < count:
            length = 3 if len(names) < len(SYLLABLES) ** 3 // 4 else 5
            names["".join(self.pick(SYLLABLES) for _ in range(length)).capitalize()] = None
        return list(names)

    def sentence(self) -> str:
        """A sentence that says nothing of any task."""
        first, second = self.pick(NOUNS), self.pick(NOUNS)
        return f"The {self.pick(ADJECTIVES)} {first} {self.pick(VERBS)} {self.pick(PLACES)} the {second}."

    def among_filler(self, facts: Sequence[str], characters: int) -> str:
        """The facts in their order, spread at random among filler sentences to about `characters` in all."""
        missing = characters - sum(len(fact) + 1 for fact in facts)
        filler = []
        while missing > 0:
            filler.append(self.sentence())
            missing -= len(filler[-1]) + 1
        marks = self.shuffled([True] * len(facts) + [False] * len(filler))
        given, noise = iter(facts), iter(filler)
        return " ".join(next(given) if mark else next(noise) for mark in marks)


TASKS: Registry[Callable[[Draws, int], Exercise]] = Registry("task")


@TASKS("recall")
def recall(draws: Draws, characters: int) -> Exercise:
    """Key and value pairs among filler; the value of one key is asked for."""
    names = draws.names(max(2, characters // 200))
    codes = [1000 + draws.below(9000) for _ in names]
    facts = [f"The code of {name} is {code}." for name, code in zip(names, codes, strict=True)]
    asked = draws.below(len(names))
    question = f"\nQuestion: What is the code of {names[asked]}?\nAnswer:"
    return Exercise(draws.among_filler(facts, characters - len(question)) + question, "", f" {codes[asked]}")


@TASKS("update")
def update(draws: Draws, characters: int) -> Exercise:
    """As recall, but codes change: the latest one counts."""
    names = draws.names(max(2, characters // 600))
    codes: dict[str, int] = {}
    facts = []
    for place in range(max(4, characters // 200)):
        name = names[place] if place < len(names) else draws.pick(names)  # everyone once, then changes
        codes[name] = 1000 + draws.below(9000)
        facts.append(f"From now on the code of {name} is {codes[name]}.")
    asked = draws.pick(names)
    question = f"\nQuestion: What is the code of {asked} now?\nAnswer:"
    return Exercise(draws.among_filler(facts, characters - len(question)) + question, "", f" {codes[asked]}")


@TASKS("variables")
def variables(draws: Draws, characters: int) -> Exercise:
    """Chains of assignments among filler; all variables with a certain value are asked for, in order."""
    chains = max(2, characters // 1500)
    names = draws.names(chains * (HOPS + 1))
    first = 10_000 + draws.below(80_000)
    values = draws.shuffled(range(first, first + chains))  # neighbours: telling them apart takes every digit
    lines = [
        [f"Let {chain[0]} = {value}."] + [f"Let {name} = {before}." for before, name in pairwise(chain)]
        for chain, value in zip((names[start::chains] for start in range(chains)), values, strict=True)
    ]
    order = draws.shuffled([chain for chain in range(chains) for _ in range(HOPS + 1)])
    waiting = [iter(chain) for chain in lines]
    facts = [next(waiting[chain]) for chain in order]
    asked = draws.below(chains)
    question = f"\nQuestion: Which variables have the value {values[asked]}?\nAnswer:"
    return Exercise(
        draws.among_filler(facts, characters - len(question)) + question, "", f" {', '.join(names[asked::chains])}"
    )


@TASKS("hops")
def hops(draws: Draws, characters: int) -> Exercise:
    """Who guards whom, out of order among filler; the guard of a guard is asked for, two to four times over."""
    names = draws.names(max(6, characters // 200))
    facts = [f"The guard of {one} is {other}." for one, other in zip(names, names[1:] + names[:1], strict=True)]
    count = 2 + draws.below(3)
    start = draws.below(len(names))
    chain = [names[(start + step) % len(names)] for step in range(count + 1)]
    question = f"\nQuestion: Who is {'the guard of ' * count}{chain[0]}?\n"
    steps = " ".join(f"The guard of {one} is {other}." for one, other in pairwise(chain))
    text = draws.among_filler(draws.shuffled(facts), characters - len(question) - len(steps) - 30)
    return Exercise(text + question, f"{THINK_BEGIN}{steps}{THINK_END}\n", f"Answer: {chain[-1]}")


@TASKS("arithmetic")
def arithmetic(draws: Draws, characters: int) -> Exercise:
    """A number changed step by step; the steps give every number in between."""
    value = 1 + draws.below(99)
    orders, steps = [f"Start with {value}."], []
    for _ in range(max(2, characters // 30)):
        kind, number = draws.below(3), 2 + draws.below(98)
        before = value
        if kind == 2 and abs(value) < 1000:
            number = 2 + number % 8
            value *= number
            orders.append(f"Multiply by {number}.")
            steps.append(f"{before} * {number} = {value}.")
        elif kind == 1:
            value -= number
            orders.append(f"Subtract {number}.")
            steps.append(f"{before} - {number} = {value}.")
        else:
            value += number
            orders.append(f"Add {number}.")
            steps.append(f"{before} + {number} = {value}.")
    prompt = f"{' '.join(orders)}\nQuestion: What is the result?\n"
    return Exercise(prompt, f"{THINK_BEGIN}{' '.join(steps)}{THINK_END}\n", f"Answer: {value}")


@TASKS("state")
def state(draws: Draws, characters: int) -> Exercise:
    """Things in boxes whose contents are swapped again and again; what a box holds at the end is asked for."""
    # names of its own in every exercise: with numbers all of them would be near-duplicates, of ten different swaps
    boxes, things = draws.names(BOXES), draws.shuffled(THINGS)[:BOXES]
    facts = [f"Box {box} holds {thing}." for box, thing in zip(boxes, things, strict=True)]
    for _ in range(max(2, (characters - 180) // 27)):
        one, other = draws.shuffled(range(BOXES))[:2]
        things[one], things[other] = things[other], things[one]
        facts.append(f"Swap {boxes[one]} and {boxes[other]}.")
    asked = draws.below(BOXES)
    question = f"Question: What does box {boxes[asked]} hold?\nAnswer:"
    return Exercise(f"{' '.join(facts)}\n{question}", "", f" {things[asked]}")


@TASKS("sorting")
def sorting(draws: Draws, characters: int) -> Exercise:
    """Numbers to be put in order, the smallest first."""
    numbers = [draws.below(10_000) for _ in range(max(3, characters // 12))]
    prompt = f"Numbers: {' '.join(map(str, numbers))}\nQuestion: What is their order, the smallest first?\nAnswer:"
    return Exercise(prompt, "", f" {' '.join(map(str, sorted(numbers)))}")


@TASKS("copying")
def copying(draws: Draws, characters: int) -> Exercise:
    """Words that mean nothing, to be said again."""
    words = " ".join(draws.pick(SYLLABLES) + draws.pick(SYLLABLES) for _ in range(max(3, characters // 10)))
    return Exercise(f"Words: {words}\nQuestion: What were the words?\nAnswer:", "", f" {words}")


def known_task(task: str) -> Callable[[Draws, int], Exercise]:
    """The generator of a task; ConfigError for one that there is not."""
    if task not in TASKS.names():
        close = nearest(task, TASKS.names())
        hint = f"; did you mean {close!r}?" if close else ""
        raise ConfigError(f"tasks: there is no task {task!r}; there are {', '.join(TASKS.names())}{hint}")
    return TASKS[task]


def exercise(task: str, seed: int, number: int, characters: int) -> Exercise:
    """Exercise `number` of a task, of about so many characters (more where the task needs them).

    Raises ConfigError for a task that there is not.
    """
    return known_task(task)(Draws(seed, task, number), characters)


def generate(section: schema.TasksSource) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(where, text, meta) of section.documents documents, the tasks in turn; meta has task, prompt and answer.

    Raises ConfigError for a task that there is not.
    """
    for place in range(section.documents):
        number, of_tasks = divmod(place, len(section.tasks))
        task = section.tasks[of_tasks]
        made = exercise(task, section.seed, number, section.characters)
        yield f"{task} {number}", made.text, {"task": task, "prompt": made.prompt, "answer": made.answer}
