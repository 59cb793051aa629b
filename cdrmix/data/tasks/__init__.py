"""Generated examples whose answer follows from their text: recall, tracking, counting, arithmetic, stories.

They are of the kinds on which models of long context are compared, written out anew: RULER (arXiv 2404.06654),
BABILong (arXiv 2406.10149), zoology's associative recall (arXiv 2312.04927), permutation tracking (arXiv 2404.08819).
Example n of a task is a function of (seed, task, n, difficulty, filler) alone, so that an evaluation can make the ones
that no training has seen, by a seed of its own.

A document is prompt, steps and answer, one behind the other; steps, where a task has any, stand between THINK_BEGIN
and THINK_END, so that data.objectives.spans can weigh them. `score` says how right a model's answer is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cdrmix.config import schema_data as schema

# each family adds its tasks to TASKS
from cdrmix.data.tasks import arithmetic, babilong, chunked, groups, mqar, recall, ruler, sort_and_copy, state_tracking
from cdrmix.data.tasks.example import (
    IGNORED,
    TASKS,
    THINK_BEGIN,
    THINK_END,
    Episode,
    Example,
    Task,
    TextDifficulty,
    TokenExample,
    score,
    score_tokens,
)
from cdrmix.data.tasks.rng import Filler, Rng
from cdrmix.errors import ConfigError
from cdrmix.registry import nearest

__all__ = [
    "IGNORED",
    "TASKS",
    "THINK_BEGIN",
    "THINK_END",
    "Episode",
    "Example",
    "Filler",
    "TokenExample",
    "episode",
    "generate",
    "known_task",
    "make_example",
    "make_token_example",
    "score",
    "score_tokens",
]

FAMILIES = (arithmetic, babilong, chunked, groups, mqar, recall, ruler, sort_and_copy, state_tracking)


def known_task(task: str) -> Task[Any]:
    """The task of that name; ConfigError for one that there is not."""
    if task not in TASKS.names():
        close = nearest(task, TASKS.names())
        hint = f"; did you mean {close!r}?" if close else ""
        raise ConfigError(f"tasks: there is no task {task!r}; there are {', '.join(TASKS.names())}{hint}")
    return TASKS[task]


def difficulty_of(task: Task[Any], asked: int | TextDifficulty | None) -> TextDifficulty:
    """The difficulty asked for: itself, the published one at a number of characters or, for None, as it is."""
    if asked is None:
        return task.standard
    if isinstance(asked, int):
        return task.standard.at_length(asked)
    if type(asked) is not type(task.standard):
        raise ConfigError(
            f"difficulty: {type(asked).__name__} is of other tasks; this one has {type(task.standard).__name__}"
        )
    return asked


def make_example(
    task: str, seed: int, number: int, difficulty: int | TextDifficulty | None = None, *, filler: Filler | None = None
) -> Example:
    """Example `number` of a task.

    difficulty: a record of the task's own kind (TASKS[task].standard and what `changed` makes of it), or a number of
        characters, for the published difficulty in a text of about that length (more where the task needs more), or
        None, for the published one.
    filler: the text among which facts are hidden; None: sentences that are made up.
    Raises ConfigError for a task that there is not and for a difficulty that cannot be.
    """
    known = known_task(task)
    return known.make(Rng(seed, task, number, filler), difficulty_of(known, difficulty))


def make_token_example(
    task: str, seed: int, number: int, difficulty: int | TextDifficulty | None = None
) -> TokenExample:
    """As `example`, in token ids of the task's own vocabulary; ConfigError for a task that is text alone."""
    known = known_task(task)
    if known.tokens is None:
        those = [name for name in TASKS.names() if TASKS[name].tokens]
        raise ConfigError(f"tasks: {task!r} has no token ids; {', '.join(those)} have. Tokenize its text instead")
    return known.tokens(Rng(seed, task, number), difficulty_of(known, difficulty))


def episode(
    task: str, seed: int, number: int, difficulty: int | TextDifficulty | None = None, *, filler: Filler | None = None
) -> Episode:
    """As `example`, the same one in chunks; ConfigError for a task that has none."""
    known = known_task(task)
    if known.episode is None:
        those = [name for name in TASKS.names() if TASKS[name].episode]
        raise ConfigError(f"tasks: {task!r} has no chunks; {', '.join(those)} have")
    return known.episode(Rng(seed, task, number, filler), difficulty_of(known, difficulty))


def difficulties(section: schema.TasksSource) -> dict[str, TextDifficulty]:
    """The difficulty of each task of a source: the published one, of section.characters, with section.difficulty.

    A key of section.difficulty counts for every task that has it. Raises ConfigError for a task that there is not, a
    key that no task has, a value that cannot be.
    """
    standards = {task: known_task(task).standard for task in section.tasks}
    known = sorted({name for standard in standards.values() for name in standard.names()})
    for name in section.difficulty:
        if name not in known:
            close = nearest(name, known)
            hint = f"; did you mean {close!r}?" if close else ""
            raise ConfigError(f"difficulty: no task of the source has {name!r}; they have {', '.join(known)}{hint}")
    return {
        task: standard.at_length(section.characters).changed(
            {name: value for name, value in section.difficulty.items() if name in standard.names()}
        )
        for task, standard in standards.items()
    }


def generate(section: schema.TasksSource, filler: Filler | None = None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(where, text, meta) of section.documents documents, the tasks in turn; meta has task, prompt and answer.

    Raises ConfigError for a task or a difficulty that there is not.
    """
    levels = difficulties(section)
    for index in range(section.documents):
        number, of_tasks = divmod(index, len(section.tasks))
        task = section.tasks[of_tasks]
        made = make_example(task, section.seed, number, levels[task], filler=filler)
        yield f"{task} {number}", made.text, {"task": task, "prompt": made.prompt, "answer": made.answer}
