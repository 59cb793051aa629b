"""Tasks: every answer is what a solver that reads only the prompt finds."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdrmix.config.schema_data import TasksSource
from cdrmix.data.tasks import TASKS, THINK_BEGIN, THINK_END, exercise, generate
from cdrmix.errors import ConfigError


def question_of(prompt: str, pattern: str) -> str:
    found = re.search(rf"Question: {pattern}\n", prompt)
    assert found
    return found[1]


def solve_codes(prompt: str) -> str:
    """The latest code of the one who is asked for: recall and update."""
    name = question_of(prompt, r"What is the code of (\w+)(?: now)?\?")
    return re.findall(rf"code of {name} is (\d+)\.", prompt)[-1]


def solve_variables(prompt: str) -> str:
    value = question_of(prompt, r"Which variables have the value (\d+)\?")
    values: dict[str, str] = {}
    for name, source in re.findall(r"Let (\w+) = (\w+)\.", prompt):
        values[name] = values.get(source, source)
    return ", ".join(name for name, held in values.items() if held == value)


def solve_hops(prompt: str) -> str:
    asked = question_of(prompt, r"Who is ((?:the guard of )+\w+)\?")
    guards = dict(re.findall(r"The guard of (\w+) is (\w+)\.", prompt))
    name = asked.split()[-1]
    for _ in range(asked.count("the guard of")):
        name = guards[name]
    return name


def solve_arithmetic(prompt: str) -> str:
    start, *orders = re.findall(r"(Start with|Add|Subtract|Multiply by) (\d+)\.", prompt)
    value = int(start[1])
    for order, number in orders:
        value = {"Add": value.__add__, "Subtract": value.__sub__, "Multiply by": value.__mul__}[order](int(number))
    return str(value)


def solve_state(prompt: str) -> str:
    boxes = dict(re.findall(r"Box (\w+) holds ([a-z ]+)\.", prompt))
    for one, other in re.findall(r"Swap (\w+) and (\w+)\.", prompt):
        boxes[one], boxes[other] = boxes[other], boxes[one]
    return boxes[question_of(prompt, r"What does box (\w+) hold\?")]


def solve_sorting(prompt: str) -> str:
    numbers = re.findall(r"\d+", prompt)
    return " ".join(sorted(numbers, key=int))


def solve_copying(prompt: str) -> str:
    return prompt.split("\n")[0].removeprefix("Words: ")


SOLVERS: dict[str, Callable[[str], str]] = {
    "recall": solve_codes,
    "update": solve_codes,
    "variables": solve_variables,
    "hops": solve_hops,
    "arithmetic": solve_arithmetic,
    "state": solve_state,
    "sorting": solve_sorting,
    "copying": solve_copying,
}


@pytest.mark.parametrize("task", TASKS.names())
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**63 - 1), number=st.integers(0, 10**9), characters=st.integers(1, 9000))
def test_the_answer_follows_from_the_prompt(task: str, seed: int, number: int, characters: int) -> None:
    made = exercise(task, seed, number, characters)
    assert made.answer.removeprefix("Answer:").strip() == SOLVERS[task](made.prompt)
    assert made.text == made.prompt + made.steps + made.answer
    if made.steps:
        assert made.steps.startswith(THINK_BEGIN)
        assert made.steps.endswith(f"{THINK_END}\n")
    if characters > 1000:
        assert 0.7 * characters < len(made.text) < 1.4 * characters
    assert made == exercise(task, seed, number, characters)


def test_steps_are_true() -> None:
    for number in range(20):
        steps = exercise("arithmetic", 1, number, 2000).steps
        for one, sign, other, result in re.findall(r"(-?\d+) ([-+*]) (\d+) = (-?\d+)\.", steps):
            signs = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
            assert signs[sign](int(one), int(other)) == int(result)
        made = exercise("hops", 1, number, 2000)
        assert set(re.findall(r"The guard of \w+ is \w+\.", made.steps)) <= set(
            re.findall(r"The guard of \w+ is \w+\.", made.prompt)
        )


def test_exercises_differ_and_answers_lie_everywhere() -> None:
    places = []
    for number in range(200):
        made = exercise("recall", 1, number, 3000)
        fact = f"{question_of(made.prompt, 'What is the code of ([A-Za-z]+)[?]')} is{made.answer}."
        places.append(made.prompt.index(fact) / len(made.prompt))
    assert len({exercise("recall", 1, number, 500).text for number in range(200)}) == 200
    # uniform over the text: mean 1/2, standard deviation 0.29 / sqrt(200); five of these are passed once in 10^6
    assert abs(sum(places) / 200 - 0.5) < 5 * 0.29 / 200**0.5
    assert min(places) < 0.1 < 0.9 < max(places)
    assert exercise("recall", 2, 0, 500) != exercise("recall", 1, 0, 500)


@pytest.mark.parametrize("task", TASKS.names())
@pytest.mark.parametrize("characters", [1000, 12_000])
def test_no_two_exercises_are_near_duplicates(task: str, characters: int) -> None:
    """Else a corpus would keep one of them: the Jaccard similarity of their five-word shingles, at most 0.8 there."""
    shingles = []
    for number in range(12):
        words = re.findall(r"\w+", exercise(task, 1, number, characters).text.lower())
        shingles.append({tuple(words[place : place + 5]) for place in range(len(words) - 4)})
    for one, other in combinations(shingles, 2):
        assert len(one & other) / len(one | other) < 0.2


def test_a_known_exercise_stays_what_it_is() -> None:
    """Corpora made by another version of this or of Python must be the same: the text of the first one."""
    words = "buda kile buna lebi kamu kiku"
    assert exercise("copying", 1, 0, 60).text == f"Words: {words}\nQuestion: What were the words?\nAnswer: {words}"


def test_documents_of_a_source() -> None:
    section = TasksSource(kind="tasks", tasks=["recall", "sorting"], documents=5, characters=300, seed=4)
    made = list(generate(section))
    assert [where for where, _, _ in made] == ["recall 0", "sorting 0", "recall 1", "sorting 1", "recall 2"]
    for where, text, meta in made:
        task, number = where.split()
        assert text == exercise(task, 4, int(number), 300).text
        assert meta["task"] == task
        assert text.startswith(meta["prompt"])
        assert text.endswith(meta["answer"])
    wrong = section.model_copy(update={"tasks": ["recal"]})
    with pytest.raises(ConfigError, match=r"there is no task 'recal'; there are arithmetic,.* did you mean 'recall'"):
        list(generate(wrong))
