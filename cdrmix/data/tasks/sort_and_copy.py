"""Sorting of numbers and copying of words."""

from __future__ import annotations

from cdrmix.data.tasks.example import ANSWER, Example, Length, task
from cdrmix.data.tasks.rng import SYLLABLES, Rng


@task("sorting", Length())
def sorting(rng: Rng, difficulty: Length) -> Example:
    """Sort numbers in ascending order."""
    numbers = [rng.randrange(10_000) for _ in range(max(3, difficulty.characters // 12))]
    prompt = f"Numbers: {' '.join(map(str, numbers))}\nQuestion: What is their order, the smallest first?\n{ANSWER}"
    return Example(prompt, "", f" {' '.join(map(str, sorted(numbers)))}")


@task("copying", Length())
def copying(rng: Rng, difficulty: Length) -> Example:
    """Copy random words."""
    count = max(3, difficulty.characters // 10)
    words = " ".join(rng.choice(SYLLABLES) + rng.choice(SYLLABLES) for _ in range(count))
    return Example(f"Words: {words}\nQuestion: What were the words?\n{ANSWER}", "", f" {words}")
