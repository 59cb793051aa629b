"""Rewards of an answer as text: how near it is to one of the right answers, or what a function of the user says.

Texts are compared as in the evaluation of SQuAD (Rajpurkar et al., arXiv 1606.05250, section 6): without case,
punctuation, the articles a, an, the, and with single spaces. Numbers keep their sign and their decimal point, and a
text of which nothing would be left is compared as it is. Of several right answers the nearest counts.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import re
import sys
import traceback
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from cdrmix.errors import ConfigError, PluginError
from cdrmix.reason.episodes import Asked
from cdrmix.registry import Registry, nearest

GROUP = "cdrmix.rewards"
LIKELIHOOD = "likelihood"  # needs the model, and is therefore computed where it is
Reward = Callable[[str, str, Mapping[str, Any]], float]
"""(question, the model's answer, row) -> the reward. row: the object of the file; see `Asked`."""

REWARDS: Registry[Callable[[str, Sequence[str]], float]] = Registry("reward")
"""(the model's answer, one of the right answers or more) -> from 0 to 1, by the name in the configuration."""

LARGEST = 1e6  # size of a reward: larger ones make the loss overflow
_KEPT = re.compile(r"(?<=\d)\.(?=\d)|(?<![\w.])-(?=\d)")  # a decimal point, the sign of a number
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalised(text: str) -> str:
    """A text without case, punctuation and articles, with single spaces."""
    text = unicodedata.normalize("NFKC", text).lower()
    kept = {match.start() for match in _KEPT.finditer(text)}
    plain = "".join(
        letter for place, letter in enumerate(text) if place in kept or not unicodedata.category(letter).startswith("P")
    )
    return " ".join(_ARTICLES.sub(" ", plain).split()) or " ".join(text.split())


@REWARDS("exact")
def exact(answer: str, right: Sequence[str]) -> float:
    """1 if the answer is a right one."""
    return float(normalised(answer) in map(normalised, right))


@REWARDS("contains")
def contains(answer: str, right: Sequence[str]) -> float:
    """1 if the words of a right answer stand in the answer, one after another."""
    words = f" {normalised(answer)} "
    return float(any(f" {normalised(each)} " in words for each in right))


@REWARDS("f1")
def f1(answer: str, right: Sequence[str]) -> float:
    """The harmonic mean of the shares of common words in the answer and in a right one, with their numbers."""
    return max(_f1(normalised(answer).split(), normalised(each).split()) for each in right)


def _f1(answer: list[str], right: list[str]) -> float:
    common = sum((Counter(answer) & Counter(right)).values())
    if not answer or not right:
        return float(answer == right)
    return 2 * common / (len(answer) + len(right))


class Scored(NamedTuple):
    """The rewards of answers; None where the function failed. errors: what it failed with, once each."""

    values: list[float | None]
    errors: list[str]


def reward_of(name: str) -> Reward:
    """The reward of a name in the configuration: one of REWARDS, package:function, or an entry point of GROUP.

    The folder in which the command runs is searched first for a module. Raises ConfigError for a name that is none of
    these, PluginError for a function that cannot be imported or does not take three arguments.
    """
    if name in REWARDS.names():
        compare = REWARDS[name]
        return lambda _question, answer, row: compare(answer, row["answers"])
    if ":" in name:
        return _function(*name.split(":", 1), shown=name)
    known = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    if name in known:
        return _function(*known[name].split(":", 1), shown=f"{name} = {known[name]}")
    names = [*REWARDS.names(), LIKELIHOOD, *sorted(known)]
    close = nearest(name, names)
    hint = f"; did you mean {close!r}?" if close else ""
    raise ConfigError(f"reasoning.rl.reward={name} is none of {', '.join(names)}, and no package:function{hint}")


def check_reward(name: str, *, in_ids: bool) -> None:
    """Raises what `reward_of` raises, and ConfigError for a reward of texts with a task in token ids."""
    if in_ids and name not in ("exact", LIKELIHOOD):
        raise ConfigError(
            f"reasoning.rl.reward={name} compares texts, and the agent's task has none (tokens: true); set it to exact"
            f" or {LIKELIHOOD}"
        )
    if name != LIKELIHOOD:
        reward_of(name)


def scored(reward: Reward, asked: Sequence[Asked], answers: Sequence[str]) -> Scored:
    """The reward of every answer. A function that raises, or returns no finite number, has failed for that answer."""
    values: list[float | None] = []
    errors: dict[str, None] = {}
    for (question, right, row), answer in zip(asked, answers, strict=True):
        try:
            values.append(_called(reward, question, answer, {"question": question, **row, "answers": list(right)}))
        except _FailedError as error:
            values.append(None)
            errors[str(error)] = None
    return Scored(values, list(errors))


class _FailedError(Exception):
    """A reward function failed for an answer. The message is the error and its place in the user's file."""


def _called(reward: Reward, question: str, answer: str, row: Mapping[str, Any]) -> float:
    """The reward. Raises _FailedError."""
    try:
        found: object = reward(question, answer, copy.deepcopy(row))
    except (Exception, SystemExit) as error:  # sys.exit too: a function must not end the run
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        raise _FailedError(f"{type(error).__name__}: {error} ({place})") from error
    if isinstance(found, str) or not hasattr(found, "__float__"):
        raise _FailedError(f"it returned {type(found).__name__}, not a number")
    try:
        value = float(found)
    except (TypeError, ValueError, OverflowError) as error:
        raise _FailedError(f"it returned {type(found).__name__}, which is no number: {error}") from error
    if not abs(value) <= LARGEST:
        raise _FailedError(f"a reward is finite, and at most {LARGEST:g} in size: it returned {value}")
    return value


def _function(module: str, function: str = "", *, shown: str) -> Reward:
    where = f"reasoning.rl.reward={shown}"
    if os.getcwd() not in sys.path:  # a command does not search it, python -m does
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise PluginError(
            f"{where}: there is no module {error.name!r} in this folder ({os.getcwd()}) or among the installed packages"
        ) from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        for part in function.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise PluginError(f"{where}: {error}; name it as package.module:function, without .py") from error
    try:
        inspect.signature(found).bind("", "", {})
    except (TypeError, ValueError) as error:
        raise PluginError(f"{where} must be a function of three: question, answer, row: {error}") from error
    reward: Reward = found
    return reward
