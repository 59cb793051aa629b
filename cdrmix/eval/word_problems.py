"""Generated word problems in the manner of GSM8K: a story of one to four steps, the steps written out, and a number.

Problem n depends only on (seed, n); it has 1 + n % 4 steps. The answer is computed step by step, not parsed.
"""

from __future__ import annotations

from typing import NamedTuple

from cdrmix.data.tasks.rng import Rng

STEPS = 4  # at most
NAMES = ("Ada", "Ben", "Carla", "Deniz", "Emil", "Farah", "Goran", "Hana", "Ivo", "June")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "tickets", "tiles")


class WordProblem(NamedTuple):
    """The story with what is asked; the reasoning, which ends with `So the answer is N.`; N; the steps of the story."""

    question: str
    reasoning: str
    answer: int
    steps: int


def word_problem(seed: int, number: int, purpose: str = "word problem") -> WordProblem:
    """Problem `number`. purpose: another string gives other problems, such as those of examples in a prompt."""
    rng = Rng(seed, purpose, number)
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    value = 3 + rng.randrange(40)
    story, reasons = [f"{name} has {value} {thing}."], []
    steps = 1 + number % STEPS
    for _ in range(steps):
        sentence, after, reason = _step(rng, name, thing, value)
        story.append(sentence)
        reasons.append(f"{reason} = {after}.")
        value = after
    question = f"{' '.join(story)} How many {thing} does {name} have now?"
    return WordProblem(question, f"{' '.join(reasons)} So the answer is {value}.", value, steps)


def _step(rng: Rng, name: str, thing: str, value: int) -> tuple[str, int, str]:
    """A sentence, the number after it, and the calculation without its result."""
    few = 2 + rng.randrange(8)
    kinds = ["find", "bags"]
    if value > 2:
        kinds.append("give")
    if value < 200:
        kinds.append("times")
    divisors = [each for each in (2, 3, 4, 5) if value % each == 0 and value > each]
    if divisors:
        kinds.append("share")
    kind = rng.choice(kinds)
    if kind == "bags":
        each = 2 + rng.randrange(6)
        text = f"{name} buys {few} bags with {each} {thing} in each."
        return text, value + few * each, f"{few} * {each} = {few * each}. {value} + {few * each}"
    if kind == "give":
        given = 1 + rng.randrange(value - 1)
        return f"{name} gives {given} of them to a friend.", value - given, f"{value} - {given}"
    if kind == "times":
        return f"Then {name} wins until there are {few} times as many.", value * few, f"{value} * {few}"
    if kind == "share":
        parts = rng.choice(divisors)
        text = f"{name} sorts them into {parts} equal parts and keeps one."
        return text, value // parts, f"{value} / {parts}"
    return f"{name} finds {few} more {thing}.", value + few, f"{value} + {few}"
