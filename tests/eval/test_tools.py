"""The suite `tools`: the judgement of right and of doctored calls, the forms of a call, and what is not measured."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cdrmix.eval.suites import Likelihood, Measure, Subject, SuiteOptions, ToolQuestion, Writing
from cdrmix.eval.tools import SETS, Call, Case, calls, is_right, read_cases, tools

FUNCTION = {
    "name": "book.table",
    "description": "Books a table.",
    "parameters": {
        "type": "dict",
        "properties": {
            "place": {"type": "string"},
            "guests": {"type": "integer"},
            "price": {"type": "float"},
            "days": {"type": "array", "items": {"type": "string"}},
            "outside": {"type": "boolean"},
            "wishes": {"type": "dict"},
        },
        "required": ["place", "guests"],
    },
}
POSSIBLE: dict[str, list[Any]] = {
    "place": ["Chez Ada", "Ada's"],
    "guests": [4],
    "price": [20.0, ""],
    "days": [["Mon.", "Tue"], ""],
    "outside": ["", True],
    "wishes": [{"view": ["sea", "lake"], "music": ["none", ""]}, ""],
}
CASE = Case([{"role": "user", "content": "Book."}], [FUNCTION], {"book.table": POSSIBLE})
RIGHT: dict[str, Any] = {"place": "chez ada", "guests": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"place": 'ADA"s'},
        {"price": 20},
        {"price": 20.0},
        {"days": ["mon", "TUE"]},
        {"days": ("Mon", "Tue")},
        {"outside": True},
        {"wishes": {"view": "Sea"}},
        {"wishes": {"view": "lake", "music": "none"}},
    ],
)
def test_right_calls(changes: dict[str, Any]) -> None:
    assert is_right([Call("book.table", {**RIGHT, **changes})], CASE)


@pytest.mark.parametrize(
    "changes",
    [
        {"place": "Chez Eve"},
        {"guests": 5},
        {"guests": 4.0},
        {"guests": "4"},
        {"guests": True},
        {"price": 21.0},
        {"price": "20"},
        {"days": ["Tue", "Mon"]},
        {"days": ["Mon"]},
        {"outside": False},
        {"outside": 1},
        {"wishes": {"music": "none"}},
        {"wishes": {"view": "hills"}},
        {"wishes": {"view": "sea", "chef": "Eve"}},
        {"smoking": False},
    ],
)
def test_doctored_calls(changes: dict[str, Any]) -> None:
    assert not is_right([Call("book.table", {**RIGHT, **changes})], CASE)


def test_number_and_name_of_calls() -> None:
    call = Call("book.table", RIGHT)
    assert not is_right([], CASE)
    assert not is_right([call, call], CASE)
    assert not is_right([Call("book_table", RIGHT)], CASE)
    assert not is_right([Call("book.table", {"place": "Ada's"})], CASE)
    nothing_fits = CASE._replace(right=None)
    assert is_right([], nothing_fits)
    assert not is_right([call], nothing_fits)


CALL = Call("f", {"x": 1, "y": "a{b"})
BODY = json.dumps({"name": "f", "arguments": CALL.arguments})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<tool_call>\n{BODY}\n</tool_call>", [CALL]),
        (f"<think>I could call {BODY}</think> I do: {BODY}", [CALL]),
        (f"<think>not closed {BODY}", []),
        (f"[{BODY}, {BODY}]", [CALL, CALL]),
        ('{"type": "function", "function": {"name": "f", "parameters": {"x": 1}}}', [Call("f", {"x": 1})]),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', [Call("f", {"x": 1})]),
        ('{"name": "f", "arguments": "x=1"}', []),
        ('{"name": 3, "arguments": {}}', []),
        ("[a.f(x=1, y=[1, 'b']), g()]", [Call("a.f", {"x": 1, "y": [1, "b"]}), Call("g", {})]),
        ("```python\nf(x=-1.5)\n```", [Call("f", {"x": -1.5})]),
        ("f(x=open('/etc/passwd'))", []),
        ("f(**{'x': 1})", []),
        ("I would call f(x=1) now.", []),
        ("{" * 3000, []),
        ("", []),
    ],
)
def test_forms_of_calls(text: str, expected: list[Call]) -> None:
    assert calls(text) == expected


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """A wheel with two questions of each kind."""
    with zipfile.ZipFile(tmp_path / "bfcl_eval-2026.3.23-py3-none-any.whl", "w") as archive:
        for name, (questions, answers) in SETS.items():
            asked = [
                {"id": f"{name}_{number}", "question": [[{"role": "user", "content": "Book."}]], "function": [FUNCTION]}
                for number in range(2)
            ]
            archive.writestr(questions.file, "\n".join(map(json.dumps, asked)))
            if answers is not None:
                truths = [{"id": row["id"], "ground_truth": [{"book.table": POSSIBLE}]} for row in asked]
                archive.writestr(answers.file, "\n".join(map(json.dumps, truths)))
    return tmp_path


def measured(answers: Sequence[str] | None, options: SuiteOptions, asked: list[ToolQuestion]) -> dict[str, Measure]:
    """The figures of a model that gives these answers to the questions of each set; None: without a format."""

    def answer(questions: Sequence[ToolQuestion], most: int) -> list[str]:
        asked.extend(questions)
        return list((answers or ())[: len(questions)])

    def generate(prompts: Sequence[str], samples: int, writing: Writing) -> list[list[str]]:
        raise AssertionError("answers to tools are not plain text")

    def likelihoods(pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        raise AssertionError("nothing is compared")

    def text() -> Iterator[str]:
        return iter(())

    subject = Subject("model", generate, text, text, likelihoods, tools=None if answers is None else answer)
    return {measure.name: measure for measure in tools(subject, options, lambda text: None).measures}


def test_suite(sets: Path) -> None:
    options, asked = SuiteOptions(sets=sets), list[ToolQuestion]()
    found = measured(["book.table(place='Ada s', guests=4)".replace(" s", "\\'s"), "No."], options, asked)
    assert {name: (measure.value, measure.count) for name, measure in found.items()} == {
        "simple accuracy": (0.5, 2),
        "multiple accuracy": (0.5, 2),
        "irrelevance accuracy": (0.5, 2),
    }
    assert found["simple accuracy"].low == pytest.approx(0.0945, abs=1e-4)  # Wilson, 1 of 2
    parameters = asked[0].tools[0]["function"]["parameters"]
    assert parameters["type"] == parameters["properties"]["wishes"]["type"] == "object"
    assert parameters["properties"]["price"]["type"] == "number"
    assert len(read_cases("simple", SuiteOptions(sets=sets, limit=1))) == 1


@pytest.mark.usefixtures("no_packages")
def test_what_is_not_measured(sets: Path, tmp_path: Path) -> None:
    without = measured(None, SuiteOptions(sets=sets), [])
    assert all("no chat template that writes tools" in str(measure.problem) for measure in without.values())
    empty = tmp_path / "empty"
    empty.mkdir()
    missing = measured(["", ""], SuiteOptions(sets=empty), [])
    assert all("`pip install --no-deps bfcl-eval==2026.3.23`" in str(each.problem) for each in missing.values())
