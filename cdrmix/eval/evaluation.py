"""What an evaluation by length is, the registry of all, and how one is run: questions in a text of so many tokens.

An evaluation is one entry of EVALUATIONS. A file of this package adds one by itself:

    @EVALUATIONS("parity")
    def parity(seed: int, number: int, characters: int) -> Question:
        ...

Names that begin alike are one family: `ruler` stands for ruler_cwe, ruler_vt and all others of that beginning.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cdrmix.eval
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError, VocabularyError
from cdrmix.registry import Registry, nearest

EVERYTHING = "all"
CHARACTERS_A_TOKEN = 4.0  # where the search for a length begins
SHORT = 0.8  # questions of fewer of the tokens asked for are noted
ATTEMPTS = 8  # lengths of text that are tried for a number of tokens
NEAR, LEAST = 0.9, 0.25  # shares of the tokens asked for: no longer text is tried; the question is taken
SPARE = 8  # tokens that a model may write beyond those of the right answer
BATCH_TOKENS = 16384  # of the prompts that are answered together


class Question(NamedTuple):
    """A prompt, what a right model writes behind it, and how right an answer is, from 0 to 1."""

    prompt: str
    answer: str
    score: Callable[[str], float]


Evaluation = Callable[[int, int, int], Question]  # seed, number of the question, about how many characters it has
Answerer = Callable[[Sequence[str], Sequence[int]], Sequence[str]]  # prompts and most new tokens of each, to answers

EVALUATIONS = Registry[Evaluation]("evaluation")


@dataclass(frozen=True)
class Score:
    """An evaluation's result at one length.

    tokens: asked for. count: questions; mean_tokens: of these, prompt and answer. accuracy: mean score; its
    standard_error is that of a mean of `count` scores, None for one. problem: why there are no questions of that
    length, where there are none; the figures are None then.
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
    """What a model got right, by evaluation and length. training_length: tokens of a row that it was trained on."""

    scores: tuple[Score, ...]
    training_length: int
    seed: int

    @property
    def names(self) -> list[str]:
        """Every evaluation, in the order asked for."""
        return list(dict.fromkeys(score.name for score in self.scores))

    @property
    def lengths(self) -> list[int]:
        """Every length, ascending."""
        return sorted({score.tokens for score in self.scores})

    def at(self, name: str, tokens: int) -> Score:
        """The score of one evaluation at one length."""
        return next(score for score in self.scores if (score.name, score.tokens) == (name, tokens))

    @property
    def problems(self) -> list[str]:
        """The lengths of which an evaluation has no questions, and why."""
        return [f"{score.name} at {spelled(score.tokens)}: {score.problem}" for score in self.scores if score.problem]

    @property
    def notes(self) -> list[str]:
        """What a reader of the figures must know besides."""
        notes, beyond = self.problems, [spelled(tokens) for tokens in self.lengths if tokens > self.training_length]
        notes += [
            f"{score.name} at {spelled(score.tokens)}: its questions have {score.mean_tokens:,.0f} tokens in the mean"
            for score in self.scores
            if score.mean_tokens is not None and score.mean_tokens < SHORT * score.tokens
        ]
        if beyond:
            rows = f"rows of {self.training_length:,} tokens"
            notes.append(f"{', '.join(beyond)}: longer than what the model was trained on, {rows}")
        return notes

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "seed": self.seed,
            "training_length": self.training_length,
            "scores": [vars(score) for score in self.scores],
            "notes": self.notes,
        }

    def table(self) -> str:
        """Accuracies as aligned lines: a row an evaluation, a column a length; notes below."""
        width = max(len("accuracy"), *map(len, self.names)) + 2
        lines = [f"{'accuracy':<{width}}" + "".join(f"{spelled(tokens):>9}" for tokens in self.lengths) + "  tokens"]
        for name in self.names:
            found = [self.at(name, tokens).accuracy for tokens in self.lengths]
            lines.append(f"{name:<{width}}" + "".join(f"{'-' if x is None else f'{x:.3f}':>9}" for x in found))
        count = max(score.count for score in self.scores)
        return "\n".join([*lines, f"{count} questions each, seed {self.seed}", *self.notes])


def spelled(tokens: int) -> str:
    """4096 as 4k; a number that is no multiple of 1024 as it is."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def evaluations(asked: Sequence[str]) -> list[str]:
    """The names of the evaluations asked for by name or family, or by `all`, none twice.

    Raises ConfigError for one that there is not, with the nearest name and the list.
    """
    for module in pkgutil.iter_modules(cdrmix.eval.__path__):
        importlib.import_module(f"cdrmix.eval.{module.name}")
    known = EVALUATIONS.names()
    found: dict[str, None] = {}
    for name in asked:
        family = [each for each in known if name in (EVERYTHING, each) or each.startswith(f"{name}_")]
        if not family:
            close = nearest(name, [*known, *{each.partition("_")[0] for each in known}])
            hint = f"; did you mean {close!r}?" if close else ""
            raise ConfigError(
                f"--tasks: there is no evaluation {name!r}{hint}; there are {', '.join(known)}; a beginning such as "
                f"ruler stands for its family, {EVERYTHING} for every one"
            )
        found |= dict.fromkeys(family)
    return list(found)


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
    """Scores of `count` questions of each evaluation (`evaluations` gives their names) at each length in tokens.

    A question has at most that many tokens with its answer, and at least LEAST of them. answer: the model at work.
    An answer may have SPARE tokens more than the right one: evaluations whose answer grows with the text (copying,
    sorting) take as long as writing it. Raises ConfigError where none has questions of any of the lengths,
    VocabularyError where the tokenizer cannot write a question's text.
    """
    scores: list[Score] = []
    for name in names:
        for tokens in sorted(set(lengths)):
            score = _score(name, tokens, answer, tokenizer, count, seed)
            scores.append(score)
            say(f"{name} at {spelled(tokens)} tokens: {score.problem or f'{score.accuracy:.3f}'}")
    found = Scores(tuple(scores), training_length, seed)
    if all(score.problem for score in scores):
        raise ConfigError(f"--lengths: none of the evaluations has questions of them; {'; '.join(found.problems)}")
    return found


def _score(name: str, tokens: int, answer: Answerer, tokenizer: TextTokenizer, count: int, seed: int) -> Score:
    try:
        asked = list(_questions(name, tokens, tokenizer, count, seed))
    except _OtherLength as problem:
        return Score(name, tokens, problem=str(problem))
    at_once = max(1, BATCH_TOKENS // tokens)
    points: list[float] = []
    for first in range(0, count, at_once):
        batch = [question for question, _ in asked[first : first + at_once]]
        limits = [len(tokenizer.encode(question.answer)) + SPARE for question in batch]
        answers = answer([question.prompt for question in batch], limits)
        points += [question.score(text) for question, text in zip(batch, answers, strict=True)]
    mean = sum(points) / count
    error = None
    if count > 1:
        error = math.sqrt(sum((point - mean) ** 2 for point in points) / (count - 1) / count)
    return Score(name, tokens, count, sum(length for _, length in asked) / count, mean, error)


class _OtherLength(Exception):
    """An evaluation has no question of the length asked for; says which it has."""


def _questions(
    name: str, tokens: int, tokenizer: TextTokenizer, count: int, seed: int
) -> Iterator[tuple[Question, int]]:
    """Questions of at most so many tokens, and how many each has."""
    characters = round(CHARACTERS_A_TOKEN * tokens)
    for number in range(count):
        question, length, used = _fitted(name, tokens, tokenizer, seed, number, characters)
        if number == 0:
            characters = used  # the others begin with it: a question does not depend on how many are asked
        yield question, length


def _fitted(
    name: str, tokens: int, tokenizer: TextTokenizer, seed: int, number: int, characters: int
) -> tuple[Question, int, int]:
    """One question, its tokens and the characters asked for: the longest found of at most `tokens`."""
    tried: dict[int, int] = {}  # characters asked for, and tokens they gave
    best: tuple[Question, int, int] | None = None
    while characters not in tried and len(tried) < ATTEMPTS:
        question = EVALUATIONS[name](seed, number, characters)
        length = 1 + _tokens(name, question.prompt, tokenizer) + _tokens(name, question.answer, tokenizer)
        tried[characters] = length
        if length <= tokens and (best is None or length > best[1]):
            best = question, length, characters
        if NEAR * tokens <= length <= tokens:
            break
        characters = max(1, round(characters * (1 + NEAR) / 2 * tokens / length))
    if best is None:
        raise _OtherLength(f"its shortest question has {min(tried.values()):,} tokens")
    if best[1] < LEAST * tokens:
        raise _OtherLength(f"the longest of its questions that is not longer has {best[1]:,} tokens")
    return best


def _tokens(name: str, text: str, tokenizer: TextTokenizer) -> int:
    ids = tokenizer.encode(text)
    if tokenizer.decode_bytes(ids) != text.encode():
        raise VocabularyError(
            f"{name}: the model's tokenizer cannot write the text of its questions: {text[:60]!r} ..."
        )
    return len(ids)
