"""Registers the tasks of cdrmix.data.tasks as evaluations: generated questions whose text determines the answer."""

from __future__ import annotations

from functools import partial

from cdrmix.data.tasks import TASKS, make_example, score
from cdrmix.eval.evaluation import EVALUATIONS, Question

FIRST_HELD_OUT = 1 << 41  # the first example used here; training starts at 0, stage B's evaluation at 2^40


def question(task: str, seed: int, number: int, characters: int) -> Question:
    """Held-out example `number` of a task at its published difficulty, in a text of about `characters` characters."""
    made = make_example(task, seed, FIRST_HELD_OUT + number, characters)
    return Question(made.prompt, made.steps + made.answer, partial(score, made))


for task in TASKS.names():
    EVALUATIONS(task)(partial(question, task))
