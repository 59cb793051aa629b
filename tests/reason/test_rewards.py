"""Rewards of answers: by text, by a function of the user, and by the likelihood of the right answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")

from cdrmix.errors import ConfigError, PluginError
from cdrmix.reason.episodes import Asked
from cdrmix.reason.rl.rewards import REWARDS, Reward, reward_of, scored

RIGHT = ("The White House", "Washington")


@pytest.mark.parametrize(
    ("answer", "exact", "contains", "f1"),
    [
        ("the white  house.", 1, 1, 1.0),
        ("Washington", 1, 1, 1.0),
        ("a white house in Washington", 0, 1, 2 * 2 / (4 + 2)),
        ("whitehouse", 0, 0, 0.0),
        ("Washingtonian", 0, 0, 0.0),
        ("white", 0, 0, 2 * 1 / (1 + 2)),
        ("", 0, 0, 0.0),
    ],
)
def test_texts_are_compared_as_in_squad(answer: str, exact: float, contains: float, f1: float) -> None:
    assert REWARDS["exact"](answer, RIGHT) == exact
    assert REWARDS["contains"](answer, RIGHT) == contains
    assert REWARDS["f1"](answer, RIGHT) == pytest.approx(f1, abs=1e-15)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of a user in the folder in which the command runs."""
    path = tmp_path / "user_rewards_of_a_test.py"
    path.write_text(
        "def half(question, answer, row):\n"
        "    assert row['answers'] == ['yes'] and row['note'] == 3 and question == 'Is it?'\n"
        "    return {'yes': 1, 'no': float('nan')}[answer] / 2\n"
        "def two(question, answer):\n    return 1\n"
        "value = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return path


@pytest.mark.usefixtures("module")
def test_a_function_of_the_user_scores_answers_and_its_failures_are_told() -> None:
    reward = reward_of("user_rewards_of_a_test:half")
    asked = [Asked("Is it?", ("yes",), {"note": 3})] * 4
    values, errors = scored(reward, asked, ["yes", "maybe", "no", "perhaps"])
    assert values == [0.5, None, None, None]
    assert errors == [
        "KeyError: 'maybe' (user_rewards_of_a_test.py:3)",
        "a reward is finite, and at most 1e+06 in size: it returned nan",
        "KeyError: 'perhaps' (user_rewards_of_a_test.py:3)",
    ]


@pytest.mark.parametrize(
    ("answer", "right", "same"),
    [
        ("", "A", 0),
        ("A", "A", 1),
        ("15", "1.5", 0),
        ("1,500", "1500", 1),
        ("5", "-5", 0),
        ("x-5", "x5", 1),
        ("東京。", "東京", 1),
        ("Zu\u0308rich", "Zürich", 1),
        ("?", "!", 0),
    ],
)
def test_numbers_letters_and_other_scripts(answer: str, right: str, same: int) -> None:
    assert REWARDS["exact"](answer, [right]) == same


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (lambda *_: None, "it returned NoneType, not a number"),
        (lambda *_: "0.5", "it returned str, not a number"),
        (lambda *_: 1e300, "a reward is finite, and at most 1e+06 in size: it returned 1e+300"),
        (lambda *_: 10**400, "it returned int, which is no number: int too large to convert to float"),
        (lambda *_: np.array([1.0, 2.0]), "it returned ndarray, which is no number"),
        (lambda *_: sys.exit(0), "SystemExit: 0"),
        (lambda _question, _answer, row: row["facts"].append(1), "it returned NoneType"),
    ],
)
def test_what_is_no_reward_is_told(reward: Reward, said: str) -> None:
    facts: list[int] = []
    values, (error,) = scored(reward, [Asked("Is it?", ("yes",), {"facts": facts})], ["yes"])
    assert values == [None]
    assert error.startswith(said)
    assert not facts, "a function has a row of its own"


def test_numbers_of_other_kinds_are_rewards() -> None:
    for number in (True, 1, np.float32(1), torch.tensor(1.0)):
        assert scored(lambda *_, number=number: number, [Asked("?", ("a",), {})], ["a"]).values == [1.0]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("exakt", ConfigError, "reward=exakt is none of contains, exact, f1, likelihood.*did you mean 'exact'"),
        ("nowhere_at_all:score", PluginError, "there is no module 'nowhere_at_all' in this folder"),
        ("user_rewards_of_a_test:missing", PluginError, "has no attribute 'missing'; name it as package.module:fun"),
        ("user_rewards_of_a_test:two", PluginError, "must be a function of three: question, answer, row"),
        ("user_rewards_of_a_test:value", PluginError, "must be a function of three"),
    ],
)
def test_a_reward_that_is_no_function_is_refused(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        reward_of(name)


def test_an_entry_point_is_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name, value = "length", "user_rewards_by_entry:length"

    def entries(group: str) -> list[Any]:
        return [Entry] if group == "cdrmix.rewards" else []

    monkeypatch.setattr("cdrmix.reason.rl.rewards.entry_points", entries)
    with pytest.raises(PluginError, match="length = user_rewards_by_entry:length: there is no module"):
        reward_of("length")
