"""Evaluation by length: generated questions in texts of given token counts, the registry of evaluations, and scores.

An evaluation is one entry of EVALUATIONS. A file in this package can add one:

    @EVALUATIONS("parity")
    def parity(seed: int, number: int, characters: int) -> Question:
        ...

Names with the same first part are a family: `ruler` stands for ruler_cwe, ruler_vt and all others that begin with it.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import cdrmix.eval
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError, VocabularyError
from cdrmix.registry import Registry, nearest

EVERYTHING = "all"
CHARACTERS_A_TOKEN = 4.0  # the first estimate in the search for a length
SHORT = 0.8  # a note is made if the mean length is below this share of the length asked for
ATTEMPTS = 8  # text lengths that are tried for one question
NEAR, LEAST = 0.9, 0.25  # shares of the length asked for: from NEAR the search ends; below LEAST there is no question
SPARE = 8  # tokens that an answer may have beyond the right one
BATCH_TOKENS = 16384  # prompt tokens in one batch


Made = TypeVar("Made")


class Question(NamedTuple):
    """A prompt, the right answer to it, and a function that scores an answer from 0 to 1."""

    prompt: str
    answer: str
    score: Callable[[str], float]


Evaluation = Callable[[int, int, int], Question]  # (seed, number of the question, approximate characters)
Answerer = Callable[[Sequence[str], Sequence[int]], Sequence[str]]  # (prompts, most new tokens of each) -> answers

EVALUATIONS = Registry[Evaluation]("evaluation")


@dataclass(frozen=True)
class Score:
    """An evaluation's result at one length.

    tokens: the length asked for. count: number of questions. mean_tokens: mean length of a question with its answer.
    accuracy: mean score. standard_error: of the accuracy; None for one question. problem: why the evaluation has no
    questions of this length; None if it has, else the numbers are None.
    """

    name: str
    tokens: int
    count: int = 0
    mean_tokens: float | None = None
    accuracy: float | None = None
    standard_error: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Scores:
    """The scores of a model by evaluation and length. training_length: tokens of a row in its training."""

    scores: tuple[Score, ...]
    training_length: int
    seed: int

    @property
    def names(self) -> list[str]:
        """The evaluations, in the order asked for."""
        return list(dict.fromkeys(score.name for score in self.scores))

    @property
    def lengths(self) -> list[int]:
        """The lengths, ascending."""
        return sorted({score.tokens for score in self.scores})

    def at(self, name: str, tokens: int) -> Score:
        """The score of one evaluation at one length."""
        return next(score for score in self.scores if (score.name, score.tokens) == (name, tokens))

    @property
    def problems(self) -> list[str]:
        """One line for each length at which an evaluation has no questions, with the reason."""
        return [
            f"{score.name} at {length_text(score.tokens)}: {score.problem}" for score in self.scores if score.problem
        ]

    @property
    def notes(self) -> list[str]:
        """Notes for readers of the scores: problems, short questions, and lengths beyond the training length."""
        notes, beyond = self.problems, [length_text(tokens) for tokens in self.lengths if tokens > self.training_length]
        notes += [
            f"{score.name} at {length_text(score.tokens)}: the mean length of its questions is {score.mean_tokens:,.0f}"
            " tokens"
            for score in self.scores
            if score.mean_tokens is not None and score.mean_tokens < SHORT * score.tokens
        ]
        if beyond:
            notes.append(f"{', '.join(beyond)}: longer than the {self.training_length:,} tokens of a row in training")
        return notes

    def as_json(self) -> dict[str, Any]:
        """The scores and notes as JSON data."""
        return {
            "seed": self.seed,
            "training_length": self.training_length,
            "scores": [vars(score) for score in self.scores],
            "notes": self.notes,
        }

    def table(self) -> str:
        """Accuracies as aligned lines, with a row for each evaluation and a column for each length; notes below."""
        width = max(len("accuracy"), *map(len, self.names)) + 2
        header = "".join(f"{length_text(tokens):>9}" for tokens in self.lengths)
        lines = [f"{'accuracy':<{width}}{header}  tokens"]
        for name in self.names:
            accuracies = [self.at(name, tokens).accuracy for tokens in self.lengths]
            lines.append(f"{name:<{width}}" + "".join(f"{'-' if x is None else f'{x:.3f}':>9}" for x in accuracies))
        count = max(score.count for score in self.scores)
        return "\n".join([*lines, f"{count} questions each, seed {self.seed}", *self.notes])


def length_text(tokens: int) -> str:
    """A length as text: 4096 is 4k; numbers that are not multiples of 1024 are written in full."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def evaluations(asked: Sequence[str]) -> list[str]:
    """The evaluations of names, families or `all`, each once.

    Raises ConfigError for an unknown name, with the nearest name and the list of all.
    """
    for module in pkgutil.iter_modules(cdrmix.eval.__path__):
        importlib.import_module(f"cdrmix.eval.{module.name}")
    known = EVALUATIONS.names()
    selected: dict[str, None] = {}
    for name in asked:
        family = [each for each in known if name in (EVERYTHING, each) or each.startswith(f"{name}_")]
        if not family:
            close = nearest(name, [*known, *{each.partition("_")[0] for each in known}])
            hint = f"; did you mean {close!r}?" if close else "."
            raise ConfigError(
                f"--tasks: there is no task {name!r}{hint} The tasks are {', '.join(known)}. A family name such as "
                f"ruler means all tasks that begin with it; {EVERYTHING} means every task."
            )
        selected |= dict.fromkeys(family)
    return list(selected)


def evaluate_by_length(
    names: Sequence[str],
    lengths: Sequence[int],
    answer: Answerer,
    tokenizer: TextTokenizer,
    *,
    count: int,
    seed: int,
    training_length: int,
    say: Callable[[str], None],
) -> Scores:
    """Scores `count` questions of each evaluation (names from `evaluations`) at each length in tokens.

    A question with its answer has at most that many tokens, and at least the share LEAST of them. answer: generates the
    model's answers. An answer may have SPARE tokens more than the right one, so evaluations with long answers (copying,
    sorting) take long. Raises VocabularyError if the tokenizer cannot encode the text of a question.
    """
    scores: list[Score] = []
    for name in names:
        for tokens in sorted(set(lengths)):
            score = _score(name, tokens, answer, tokenizer, count, seed)
            scores.append(score)
            say(f"{name} at {length_text(tokens)} tokens: {score.problem or f'{score.accuracy:.3f}'}")
    return Scores(tuple(scores), training_length, seed)


def _score(name: str, tokens: int, answer: Answerer, tokenizer: TextTokenizer, count: int, seed: int) -> Score:
    try:
        questions = list(_questions(name, tokens, tokenizer, count, seed))
    except _NoQuestionError as problem:
        return Score(name, tokens, problem=str(problem))
    batch_size = max(1, BATCH_TOKENS // tokens)
    points: list[float] = []
    for first in range(0, count, batch_size):
        batch = [question for question, _ in questions[first : first + batch_size]]
        limits = [len(tokenizer.encode(question.answer)) + SPARE for question in batch]
        answers = answer([question.prompt for question in batch], limits)
        points += [question.score(text) for question, text in zip(batch, answers, strict=True)]
    mean = sum(points) / count
    error = None
    if count > 1:
        error = math.sqrt(sum((point - mean) ** 2 for point in points) / (count - 1) / count)
    return Score(name, tokens, count, sum(length for _, length in questions) / count, mean, error)


class _NoQuestionError(Exception):
    """An evaluation has no question of the length asked for; the message names the nearest length."""


def _questions(
    name: str, tokens: int, tokenizer: TextTokenizer, count: int, seed: int
) -> Iterator[tuple[Question, int]]:
    """Questions of at most `tokens` tokens, each with its length in tokens."""
    characters: int | None = None
    for number in range(count):
        question, length, used = _fitted(name, tokens, tokenizer, seed, number, characters)
        if number == 0:
            characters = used  # all others start from this: a question does not depend on `count`
        yield question, length


def _fitted(
    name: str, tokens: int, tokenizer: TextTokenizer, seed: int, number: int, characters: int | None
) -> tuple[Question, int, int]:
    """The longest question of at most `tokens` tokens that is found; its tokens; the characters asked for."""

    def length_of(question: Question) -> int:
        return 1 + _tokens(name, question.prompt, tokenizer) + _tokens(name, question.answer, tokenizer)

    question, length, used = of_length(partial(EVALUATIONS[name], seed, number), length_of, tokens, characters)
    if length > tokens:
        raise _NoQuestionError(f"its shortest question has {length:,} tokens")
    if length < LEAST * tokens:
        raise _NoQuestionError(f"its longest question up to this length has only {length:,} tokens")
    return question, length, used


def of_length(
    make: Callable[[int], Made], length_of: Callable[[Made], int], tokens: int, characters: int | None = None
) -> tuple[Made, int, int]:
    """The longest text of at most `tokens` tokens that is found, else the shortest; its tokens; its characters.

    make: a text of about so many characters. characters: to try first; None: an estimate. The search ends at the share
    NEAR of the tokens, and after ATTEMPTS texts.
    """
    characters = round(CHARACTERS_A_TOKEN * tokens) if characters is None else characters
    tried: dict[int, int] = {}  # characters asked for -> tokens
    best: tuple[Made, int, int] | None = None
    while characters not in tried and len(tried) < ATTEMPTS:
        made = make(characters)
        length = tried[characters] = length_of(made)
        fits = length <= tokens
        if best is None or (length > best[1] if fits and best[1] <= tokens else length < best[1]):
            best = made, length, characters
        if NEAR * tokens <= length <= tokens:
            break
        characters = max(1, round(characters * (1 + NEAR) / 2 * tokens / length))
    assert best is not None
    return best


def _tokens(name: str, text: str, tokenizer: TextTokenizer) -> int:
    ids = tokenizer.encode(text)
    if tokenizer.decode_bytes(ids) != text.encode():
        raise VocabularyError(
            f"{name}: the model's tokenizer cannot encode the text of its questions: {text[:60]!r} ..."
        )
    return len(ids)
