"""Arithmetic in many steps: repeated changes of a number, and nested brackets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from cdrmix.data.tasks.example import ANSWER, THINK_BEGIN, THINK_END, Example, Length, TextDifficulty, task
from cdrmix.data.tasks.rng import Rng


@task("arithmetic", Length())
def arithmetic(rng: Rng, difficulty: Length) -> Example:
    """A number that is changed step by step. The steps contain all intermediate numbers."""
    value = 1 + rng.randrange(99)
    orders, steps = [f"Start with {value}."], []
    for _ in range(max(2, difficulty.characters // 30)):
        kind, number = rng.randrange(3), 2 + rng.randrange(98)
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
    return Example(prompt, f"{THINK_BEGIN}{' '.join(steps)}{THINK_END}\n", f"{ANSWER} {value}")


@dataclass(frozen=True)
class Expression(TextDifficulty):
    """Nested brackets: harder with more operators and larger numbers; 7 as in BIG-Bench Hard (arXiv 2210.09261)."""

    operators: int = 7
    largest: int = 9  # number in the expression
    bound: int = 9999  # of the absolute value of intermediate results

    def at_length(self, characters: int) -> Self:
        return replace(self, operators=max(1, characters // 23))  # of prompt and steps together


class Part(NamedTuple):
    """A part of an expression: its value, its text, and the steps to the value, innermost first."""

    value: int
    text: str
    steps: list[str]


def joined(rng: Rng, left: Part, right: Part, bound: int) -> Part:
    """Two parts joined by a random operator, or by another operator if the result would exceed the bound."""
    results = {"+": left.value + right.value, "-": left.value - right.value, "*": left.value * right.value}
    sign = rng.choice("+-*")
    if abs(results[sign]) > bound:  # the sum or the difference of two numbers within the bound is within it
        sign = min("+-", key=lambda symbol: abs(results[symbol]))
    step = f"{left.value} {sign} {right.value} = {results[sign]}."
    return Part(results[sign], f"({left.text} {sign} {right.text})", [*left.steps, *right.steps, step])


@task("multi_step_arithmetic", Expression())
def multi_step_arithmetic(rng: Rng, difficulty: Expression) -> Example:
    """An expression with brackets, joined from random neighbours. The steps evaluate the brackets one by one."""
    largest = min(difficulty.largest, difficulty.bound)
    numbers = [1 + rng.randrange(largest) for _ in range(difficulty.operators + 1)]
    parts = [Part(number, str(number), []) for number in numbers]
    while len(parts) > 1:
        index = rng.randrange(len(parts) - 1)
        parts[index : index + 2] = [joined(rng, parts[index], parts[index + 1], difficulty.bound)]
    whole = parts[0]
    steps = f"{THINK_BEGIN}{' '.join(whole.steps)}{THINK_END}\n"
    return Example(f"Question: What is {whole.text[1:-1]}?\n", steps, f"{ANSWER} {whole.value}")
