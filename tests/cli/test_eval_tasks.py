"""`cdrmix eval --tasks`: a table, JSON and a plot of a trained model's scores; errors before the model runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import main

Arguments = Callable[..., list[str]]


def test_accuracies_by_length_of_run_checkpoint_and_export(
    toy_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tasks", "recall,mqar", "--lengths", "256,1k", "--count", "2", "--seed", "3"]
    found = []
    for model in (toy_run, toy_run / "checkpoints" / "step-00000004", toy_run / "export"):
        capsys.readouterr()
        assert main(["eval", "--model", str(model), *options, "--json", "--plot", str(tmp_path / "a.png")]) == 0
        told = capsys.readouterr()
        found.append(json.loads(told.out))
        assert "recall at 1k tokens: 0.000" in told.err
    assert found[0] == found[1] == found[2]
    assert (found[0]["seed"], found[0]["training_length"]) == (3, 32)
    recall = found[0]["scores"][1]
    assert (recall["name"], recall["tokens"], recall["count"], recall["accuracy"]) == ("recall", 1024, 2, 0.0)
    assert 900 <= recall["mean_tokens"] <= 1024
    assert "256, 1k: longer than the 32 tokens of a row in training" in found[0]["notes"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main(["eval", "--model", str(toy_run), *options]) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[0].split() == ["accuracy", "256", "1k", "tokens"]
    assert "recall        0.000    0.000" in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "recal"], "there is no task 'recal'; did you mean 'recall'?"),
        (
            ["--tasks", "ruler_cwe", "--lengths", "100"],
            "of these lengths; ruler_cwe at 100: its shortest",
        ),
        (["--lengths", "1k"], "--lengths works only with --tasks"),
        (["--plot", "a.png"], "--plot works only with --tasks"),
        (["--tasks", "recall", "train.steps=3"], "--tasks does not use a configuration"),
        (["--tasks", "recall", "--plot", "/no/where/a.png"], "name a file FILE.png in a folder that exists"),
        (["--tasks", "recall", "--plot", "a.jpg"], "name a file FILE.png in a folder that exists"),
    ],
)
def test_what_is_refused(toy_run: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", str(toy_run / "export"), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--lengths", "1x"], ["--lengths", "0k"], ["--tasks", "a,,b"], ["--count", "0"]])
def test_words_that_are_no_lists(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["eval", "--model", "x", *options])
    assert "found" in capsys.readouterr().err
