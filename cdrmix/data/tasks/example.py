"""Examples, difficulties and tasks; the registry of tasks; the scoring of answers.

A difficulty is a frozen record of the parameters of a task: the length of its text and the amount of information that
an answer needs. Each family of tasks has its own class, which checks its values. A task is registered with the
difficulty of the published benchmark. `at_length` gives the same difficulty for a text of another length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, NamedTuple, Self, TypeVar

from cdrmix.data.tasks.rng import Rng
from cdrmix.errors import ConfigError
from cdrmix.registry import Registry, nearest

THINK_BEGIN, THINK_END = "<think>", "</think>"
ANSWER = "Answer:"
IGNORED = -100  # a target without loss and score: the ignore_index of PyTorch
Value = bool | int | float | str


class Note(NamedTuple):
    """A passage of a text, and what a reader who knows the question has to remember after it."""

    passage: str
    memory: str


class Example(NamedTuple):
    """The text of an example in three parts. steps may be empty. answer begins with its separator.

    references: the score is the share of these strings that an answer contains. Empty: the whole answer is compared.
    notes: in the order of the prompt; empty if the task has none.
    """

    prompt: str
    steps: str
    answer: str
    references: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def text(self) -> str:
        return self.prompt + self.steps + self.answer


class TokenExample(NamedTuple):
    """An example as token ids of its own vocabulary. targets has the same length, with IGNORED at positions without a
    question.

    targets[t] is the correct token after inputs[: t + 1], so no shift is needed.
    """

    inputs: list[int]
    targets: list[int]
    vocabulary: int


class Fact(NamedTuple):
    """A key and value of an episode, and the number of its chunk."""

    key: str
    value: str
    chunk: int


class Episode(NamedTuple):
    """An example in chunks, for a model that reads one chunk at a time. Captured and retained facts can be counted.

    facts, asked: in a chain, each fact after the facts it depends on. bad: numbers of the chunks with false facts.
    kept: words of the sentences that must stay when a chunk is cut to a length; empty: sentences with the key of a
    fact.
    """

    question: str
    chunks: tuple[str, ...]
    answer: str
    facts: tuple[Fact, ...]
    asked: tuple[Fact, ...]
    bad: tuple[int, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difficulty:
    """Named parameters of an example. Counts must be at least 1. Raises ConfigError for invalid values."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ConfigError(f"difficulty: {field.name} = {value}; it must be at least 1")

    def changed(self, changes: Mapping[str, Value]) -> Self:
        """A copy with other values. Raises ConfigError for an unknown field or another type."""
        for name, value in changes.items():
            known = self.names()
            if name not in known:
                close = nearest(name, known)
                hint = f"; did you mean {close!r}?" if close else ""
                raise ConfigError(f"difficulty: there is no {name!r}; there are {', '.join(known)}{hint}")
            wanted = type(getattr(self, name))
            if type(value) is not wanted and not (wanted is float and type(value) is int):
                raise ConfigError(f"difficulty: {name} = {value!r}; it must be of type {wanted.__name__}")
        return replace(self, **changes)

    def names(self) -> list[str]:
        """The names of the fields."""
        return [field.name for field in fields(self)]


@dataclass(frozen=True)
class TextDifficulty(Difficulty, ABC):
    """The difficulty of a text task, whose length can change at the same difficulty."""

    @abstractmethod
    def at_length(self, characters: int) -> Self:
        """The same difficulty in a text of about `characters` characters."""


@dataclass(frozen=True)
class Length(TextDifficulty):
    """The approximate length of the text. An example that needs more is longer."""

    characters: int = 4000

    def at_length(self, characters: int) -> Self:
        return replace(self, characters=characters)


Level = TypeVar("Level", bound=TextDifficulty)


@dataclass(frozen=True)
class Task(Generic[Level]):
    """A generator and its published difficulty, and generators of token ids and chunks if the task has them."""

    make: Callable[[Rng, Level], Example]
    standard: Level
    tokens: Callable[[Rng, Level], TokenExample] | None = None
    episode: Callable[[Rng, Level], Episode] | None = None


TASKS: Registry[Task[Any]] = Registry("task")


def task(
    name: str,
    standard: Level,
    *,
    tokens: Callable[[Rng, Level], TokenExample] | None = None,
    episode: Callable[[Rng, Level], Episode] | None = None,
) -> Callable[[Callable[[Rng, Level], Example]], Callable[[Rng, Level], Example]]:
    """A decorator that registers a generator in TASKS. A generator may have several names."""

    def add(make: Callable[[Rng, Level], Example]) -> Callable[[Rng, Level], Example]:
        TASKS(name)(Task(make, standard, tokens, episode))
        return make

    return add


def listed(items: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def normalised(answer: str) -> str:
    """The first non-empty line after the last `Answer:`, with single spaces."""
    lines = answer.rpartition(ANSWER)[2].strip().splitlines()
    return " ".join(lines[0].split()) if lines else ""


def score(example: Example, answer: str) -> float:
    """The score of an answer from 0 to 1. answer: the text of a model after the prompt, with its steps.

    With references: the share of them that the answer contains, ignoring case (string_match_all of RULER, arXiv
    2404.06654). Without references: 1 for the exact answer, otherwise 0. Text after the line of the answer is ignored,
    because a model may continue to write.
    """
    if example.references:
        found = answer.lower()
        return sum(reference.lower() in found for reference in example.references) / len(example.references)
    return float(normalised(answer) == normalised(example.answer))


def score_tokens(example: TokenExample, predicted: Sequence[int]) -> float:
    """The share of correct predictions. predicted[t]: the prediction after inputs[: t + 1].

    Raises ValueError if the numbers of predictions and targets differ.
    """
    if len(predicted) != len(example.targets):
        raise ValueError(f"{len(predicted)} predictions for {len(example.targets)} targets; give one for each")
    asked = [(target, choice) for target, choice in zip(example.targets, predicted, strict=True) if target != IGNORED]
    return sum(target == choice for target, choice in asked) / len(asked)
