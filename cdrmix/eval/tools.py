"""The suite `tools`: function calls judged by their syntax tree, and no call when no function fits (BFCL).

simple, multiple: the share of questions that are answered by the one right call; `multiple` offers several functions.
irrelevance: the share of questions without a call, where no function fits. A model that never calls has 1 there.
The judgement is that of the Berkeley Function Calling Leaderboard for Python (ast_checker.py of bfcl-eval): the name,
all required arguments, no unknown ones, each value one of those listed, strings without case and punctuation.
Nothing is measured for a model without a chat template that writes tools. Texts are greedy. Intervals: 95 %, Wilson's.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cdrmix.errors import ConfigError, CorpusError
from cdrmix.eval.data_sets import BFCL, BFCL_VERSION, DataSet, read_set
from cdrmix.eval.intervals import wilson
from cdrmix.eval.suites import SUITES, Measure, Subject, SuiteOptions, SuiteResult, ToolQuestion
from cdrmix.json_text import parse_json

NO_FORMAT = "the model has no chat template that writes tools, so it was trained on no format of calls"
# JSON schema has other names for some types of BFCL.
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_IGNORED = re.compile(r"[ ,./\-_*^]")
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


def _set(name: str) -> DataSet:
    return DataSet(BFCL, BFCL_VERSION, f"bfcl_eval/data/{name}.json")


SETS = {  # questions, and their answers; None: no call is right
    "simple": (_set("BFCL_v4_simple_python"), _set("possible_answer/BFCL_v4_simple_python")),
    "multiple": (_set("BFCL_v4_multiple"), _set("possible_answer/BFCL_v4_multiple")),
    "irrelevance": (_set("BFCL_v4_irrelevance"), None),
}


class Call(NamedTuple):
    """A function call of a model."""

    name: str
    arguments: dict[str, Any]


class Case(NamedTuple):
    """A question, its functions as BFCL describes them, and the right call: {name: {argument: possible values}}.

    right: None if no call is right. An argument with the possible value "" may be left out.
    """

    messages: list[dict[str, Any]]
    functions: list[dict[str, Any]]
    right: dict[str, dict[str, list[Any]]] | None

    def tools(self) -> list[dict[str, Any]]:
        """The functions as chat templates expect them: JSON schemas."""
        return [{"type": "function", "function": _schema(function)} for function in self.functions]


def _schema(value: Any) -> Any:
    """A description with the names of types of JSON schema."""
    if isinstance(value, dict):
        return {
            key: _TYPES.get(item, item) if key == "type" and isinstance(item, str) else _schema(item)
            for key, item in value.items()
        }
    return [_schema(item) for item in value] if isinstance(value, list) else value


def read_cases(name: str, options: SuiteOptions) -> list[Case]:
    """The first `limit` cases of a set. Raises ConfigError if it is missing, CorpusError if it has other records."""
    questions, answers = SETS[name]
    rows = read_set(questions, options.sets)
    truths = {} if answers is None else {row.get("id"): row for row in read_set(answers, options.sets)}
    try:
        return [
            Case(row["question"][0], row["function"], None if answers is None else truths[row["id"]]["ground_truth"][0])
            for row in rows[: options.limit]
        ]
    except (KeyError, TypeError, IndexError) as error:
        raise CorpusError(
            f"{BFCL}: {questions.file} has other records than version {BFCL_VERSION}: {error!r}"
        ) from error


def calls(text: str) -> list[Call]:
    """The calls in a text of a model: JSON objects with a name and arguments or parameters, else Python calls.

    What is between <think> and </think> does not count. Python: a call, or a list of them, and nothing else.
    """
    said = _THOUGHT.sub("", text)
    found, position, decoder = list[Call](), 0, json.JSONDecoder()
    while (position := said.find("{", position)) >= 0:
        try:
            value, position = decoder.raw_decode(said, position)
        except (ValueError, RecursionError):
            position += 1
            continue
        if (call := _json_call(value)) is not None:
            found.append(call)
    return found or _python_calls(said)


def _json_call(value: Any) -> Call | None:
    inner = value.get("function") if isinstance(value.get("function"), dict) else value
    arguments = inner.get("arguments", inner.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return None
    named = isinstance(inner.get("name"), str) and isinstance(arguments, dict)
    return Call(inner["name"], arguments) if named else None


def _python_calls(text: str) -> list[Call]:
    try:
        tree = ast.parse(text.strip().strip("`").removeprefix("python").strip(), mode="eval").body
        each = tree.elts if isinstance(tree, ast.List) else [tree]
        return [
            Call(
                ast.unparse(node.func), {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
            )
            for node in each
            if isinstance(node, ast.Call) and not node.args and all(keyword.arg for keyword in node.keywords)
        ]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return []


def is_right(found: Sequence[Call], case: Case) -> bool:
    """Whether the calls are the one right call of a case; without a right call, whether there are none."""
    if case.right is None:
        return not found
    if len(found) != 1:
        return False
    ((name, possible),) = case.right.items()
    ((called, arguments),) = found
    described = next((function["parameters"] for function in case.functions if function["name"] == name), None)
    if called != name or described is None:
        return False
    if any(required not in arguments for required in described.get("required", ())):
        return False
    if any(key not in arguments and "" not in values for key, values in possible.items()):
        return False
    properties = described["properties"]
    return all(
        key in properties and key in possible and _fits(value, properties[key].get("type"), possible[key])
        for key, value in arguments.items()
    )


def _fits(value: Any, kind: str | None, possible: Sequence[Any]) -> bool:
    """Whether an argument of a described type has one of its possible values. Only `float` takes the other number."""
    value = _lists(value)
    if kind == "integer" and isinstance(value, float):
        return False
    return any(_fits_object(value, each) or _same(value, each) for each in possible)


def _fits_object(value: Any, possible: Any) -> bool:
    """Whether an object has of each key one of the listed values; of lists of objects, each."""
    if isinstance(value, list) and isinstance(possible, list) and value:
        return len(value) == len(possible) and all(map(_fits_object, value, possible))
    if not isinstance(value, dict) or not isinstance(possible, dict):
        return False
    if not all(isinstance(values, list) for values in possible.values()):
        return False
    missing = any(key not in value and "" not in values for key, values in possible.items())
    known = all(key in possible and any(_same(item, each) for each in possible[key]) for key, item in value.items())
    return known and not missing


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def _same(value: Any, other: Any) -> bool:
    """Equality, of strings without case and the characters of _IGNORED; a truth value equals no number."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, str) and isinstance(other, str):
        return _plain(value) == _plain(other)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same, value, other))
    return bool(value == other)


def _plain(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')


@SUITES("tools")
def tools(subject: Subject, options: SuiteOptions, say: Callable[[str], None]) -> SuiteResult:
    """See the docstring of the module."""
    measures: list[Measure] = []
    for name in SETS:
        title = f"{name} accuracy"
        if subject.tools is None:
            measures.append(Measure(title, problem=NO_FORMAT))
            continue
        try:
            cases = read_cases(name, options)
        except (ConfigError, CorpusError) as error:
            measures.append(Measure(title, problem=str(error)))
            continue
        asked = [ToolQuestion(case.messages, case.tools()) for case in cases]
        texts = subject.tools(asked, options.max_new_tokens)
        right = sum(is_right(calls(text), case) for text, case in zip(texts, cases, strict=True))
        say(f"{name}: {right:,} of {len(cases):,} right")
        measures.append(Measure(title, right / len(cases), *wilson(right, len(cases)), len(cases)))
    facts = {"temperature": 0.0, "max_new_tokens": options.max_new_tokens, "trained_format": subject.tools is not None}
    return SuiteResult("tools", tuple(measures), facts)
