"""What an example, a difficulty and a task are; the registry of tasks; how an answer is scored.

A difficulty is a frozen record of the numbers that make a task hard: how long its text is and how much must be kept in
mind to answer. Every family has its own, checked when it is made; a task is registered with the one that its benchmark
is published with. `at_length` gives the same difficulty in a text of another length.
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
IGNORED = -100  # a target that no loss and no score looks at: PyTorch's ignore_index
Value = bool | int | float | str


class Example(NamedTuple):
    """A task's text in three parts; `steps` may be empty, `answer` begins with what parts it from the text before.

    references: what an answer is searched for, where the score is the share of them that it has; empty: the answer as
    a whole is compared.
    """

    prompt: str
    steps: str
    answer: str
    references: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.prompt + self.steps + self.answer


class TokenExample(NamedTuple):
    """An example as token ids of a vocabulary of its own; targets are as many, IGNORED where nothing is asked.

    targets[t] is what is right behind inputs[: t + 1]: they need no shift.
    """

    inputs: list[int]
    targets: list[int]
    vocabulary: int


class Fact(NamedTuple):
    """One key and value of an episode, and the number of the chunk that tells it."""

    key: str
    value: str
    chunk: int


class Episode(NamedTuple):
    """An example in chunks, for readers that see one at a time: which facts are captured and kept can be counted.

    facts, asked: of a chain each behind those that it builds on. bad: numbers of chunks that are not to be believed.
    kept: words of the sentences that a chunk must not lose when it is cut to a length; none: those with a fact's key.
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
    """Named numbers that make an example hard; counts are at least 1. Raises ConfigError for what cannot be."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ConfigError(f"difficulty: {field.name} = {value}; it must be at least 1")

    def changed(self, changes: Mapping[str, Value]) -> Self:
        """With other values of the fields named; ConfigError for a field that there is not or another type."""
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
        """The names of its fields."""
        return [field.name for field in fields(self)]


@dataclass(frozen=True)
class TextDifficulty(Difficulty, ABC):
    """Of a task that is text, which can be made longer without being made harder."""

    @abstractmethod
    def at_length(self, characters: int) -> Self:
        """As hard, in a text of about so many characters."""


@dataclass(frozen=True)
class Length(TextDifficulty):
    """About how long the text is; examples that need more take more."""

    characters: int = 4000

    def at_length(self, characters: int) -> Self:
        return replace(self, characters=characters)


Level = TypeVar("Level", bound=TextDifficulty)


@dataclass(frozen=True)
class Task(Generic[Level]):
    """A generator and the difficulty that it is published with; token ids and chunks where the task has them."""

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
    """A decorator that adds a generator to TASKS under `name`; the same one may have several names."""

    def add(make: Callable[[Rng, Level], Example]) -> Callable[[Rng, Level], Example]:
        TASKS(name)(Task(make, standard, tokens, episode))
        return make

    return add


def listed(items: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def normalised(answer: str) -> str:
    """What an answer says: its first line that is not empty behind the last `Answer:`, with single blanks."""
    lines = answer.rpartition(ANSWER)[2].strip().splitlines()
    return " ".join(lines[0].split()) if lines else ""


def score(example: Example, answer: str) -> float:
    """How right an answer is, from 0 to 1; `answer` is what a model wrote behind the prompt, steps and all.

    With references, the share of them that stands anywhere in the answer, in capitals or not: RULER's string_match_all
    (arXiv 2404.06654). Without, 1 for exactly the answer, else 0; what follows the answer's line is not
    read, as a model may go on writing.
    """
    if example.references:
        found = answer.lower()
        return sum(reference.lower() in found for reference in example.references) / len(example.references)
    return float(normalised(answer) == normalised(example.answer))


def score_tokens(example: TokenExample, predicted: Sequence[int]) -> float:
    """The share of the targets that were predicted; predicted[t] is a model's choice behind inputs[: t + 1].

    Raises ValueError where there are not as many predictions as targets.
    """
    if len(predicted) != len(example.targets):
        raise ValueError(f"{len(predicted)} predictions for {len(example.targets)} targets; give one for each")
    asked = [(target, choice) for target, choice in zip(example.targets, predicted, strict=True) if target != IGNORED]
    return sum(target == choice for target, choice in asked) / len(asked)
