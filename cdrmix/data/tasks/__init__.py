"""Generated tasks whose answers follow from their text: recall, tracking, counting, arithmetic, stories.

They are new implementations of common benchmarks for long context: RULER (arXiv 2404.06654), BABILong (arXiv
2406.10149), associative recall of zoology (arXiv 2312.04927), permutation tracking (arXiv 2404.08819). Example n of a
task depends only on (seed, task, n, difficulty, filler). So an evaluation can generate unseen examples with another
seed.

A document is the concatenation of prompt, steps and answer. Steps are between THINK_BEGIN and THINK_END, so that
data.objectives.spans can weight them. `score` gives the score of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cdrmix.config import schema_data as schema

# each module registers its tasks
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
    """The task with this name. Raises ConfigError if there is none."""
    if task not in TASKS.names():
        close = nearest(task, TASKS.names())
        hint = f"; did you mean {close!r}?" if close else ""
        raise ConfigError(f"tasks: there is no task {task!r}; there are {', '.join(TASKS.names())}{hint}")
    return TASKS[task]


def difficulty_of(task: Task[Any], asked: int | TextDifficulty | None) -> TextDifficulty:
    """A difficulty; for a number of characters the published one at that length; for None the published one."""
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

    difficulty: a record of the class of the task (TASKS[task].standard, or a copy by `changed`); or a number of
        characters, for the published difficulty in a text of about that length (longer if the task needs more); or
        None, for the published difficulty.
    filler: the text in which facts are hidden; None: generated sentences.
    Raises ConfigError for an unknown task and for an invalid difficulty.
    """
    known = known_task(task)
    return known.make(Rng(seed, task, number, filler), difficulty_of(known, difficulty))


def make_token_example(
    task: str, seed: int, number: int, difficulty: int | TextDifficulty | None = None
) -> TokenExample:
    """As `make_example`, in token ids of the vocabulary of the task. ConfigError for a task without token ids."""
    known = known_task(task)
    if known.tokens is None:
        those = [name for name in TASKS.names() if TASKS[name].tokens]
        raise ConfigError(f"tasks: {task!r} has no token ids; {', '.join(those)} have. Tokenize its text instead")
    return known.tokens(Rng(seed, task, number), difficulty_of(known, difficulty))


def episode(
    task: str, seed: int, number: int, difficulty: int | TextDifficulty | None = None, *, filler: Filler | None = None
) -> Episode:
    """As `make_example`, in chunks. Raises ConfigError for a task without chunks."""
    known = known_task(task)
    if known.episode is None:
        those = [name for name in TASKS.names() if TASKS[name].episode]
        raise ConfigError(f"tasks: {task!r} has no chunks; {', '.join(those)} have")
    return known.episode(Rng(seed, task, number, filler), difficulty_of(known, difficulty))


def difficulties(section: schema.TasksSource) -> dict[str, TextDifficulty]:
    """The difficulty of each task of a source: the published one at section.characters, with section.difficulty.

    A key of section.difficulty applies to every task that has it. Raises ConfigError for an unknown task, a key that no
    task has, and an invalid value.
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
    """(location, text, metadata) of section.documents documents, the tasks in turn. Metadata: task, prompt, answer.

    Raises ConfigError for an unknown task or an invalid difficulty.
    """
    levels = difficulties(section)
    for index in range(section.documents):
        number, of_tasks = divmod(index, len(section.tasks))
        task = section.tasks[of_tasks]
        made = make_example(task, section.seed, number, levels[task], filler=filler)
        yield f"{task} {number}", made.text, {"task": task, "prompt": made.prompt, "answer": made.answer}
