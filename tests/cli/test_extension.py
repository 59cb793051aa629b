"""A run that is extended: it is one that was as long from the start, and what would change its steps is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import main
from json_rows import read_metrics

from cdrmix import workflow
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.report.report import write_report
from cdrmix.run_folder import RunFolder
from cdrmix.training.extension import extend

CONSTANT = ("train.schedule=constant", "train.evaluate_every=1000", "train.checkpoint_every=1000")


def test_the_bits_are_those_of_a_run_that_was_as_long_from_the_start(
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Not by a fixture of the module: toy_run, which files share, is a finished run.
    monkeypatch.setattr(workflow, "_after_training", lambda *_: None)
    for name, steps in (("straight", 4), ("short", 2)):
        command = ["train", *arguments(*CONSTANT, f"train.steps={steps}", f"run.root={tmp_path / name}")]
        assert main(command) == 0
    straight, short = (next((tmp_path / name).iterdir()) for name in ("straight", "short"))
    RunFolder(short).update_summary({"finished": True})
    assert main(["train", "--resume", str(short), "--extend", "train.steps=4", "--extend", "train.log_every=2"]) == 0
    assert "Extended after step 2: train.steps: 2 -> 4, train.log_every: 1 -> 2" in capsys.readouterr().out
    assert main(["compare", str(straight), str(short)]) == 0
    assert [row["step"] for row in read_metrics(short / "metrics.jsonl")] == [1, 2, 4]
    (row,) = map(json.loads, (short / "extensions.jsonl").read_text().splitlines())
    assert row["step"] == 2
    assert row["keys"] == {"train.steps": [2, 4], "train.log_every": [1, 2]}
    assert "<h2>Extensions</h2>" in write_report(RunFolder(short)).read_text()
    # It is found under its new configuration, and not begun again under the old one.
    extended = Config.from_yaml(short / "config_snapshot.yaml")
    assert [run.path for run in RunFolder.all_of(extended)] == [short]
    assert main(["train", *command[1:], "--resume", "auto"]) == 2
    assert f"Continue it with --resume {short}" in capsys.readouterr().err
    assert len(list((tmp_path / "short").iterdir())) == 1
    # The same command again changes nothing, and an extended run may be extended again.
    assert extend(short, ["train.steps=4", "train.log_every=2"]) == extended
    assert extend(short, ["train.steps=5"]).train.steps == 5
    assert len((short / "extensions.jsonl").read_text().splitlines()) == 2


REFUSED = {
    "train.steps=6": "the cosine schedule decays",
    "train.steps=3": "at least 4 steps",
    "train.learning_rate=0.5": "train.learning_rate: found 0.5",
    "train.evaluate_rows=1": "--extend may change train.steps, train.evaluate_every, train.checkpoint_every",
    "data.row_length=64": "data.row_length: found 64",
    "run.seed=2": "1, as in the run",
    "model.layers=3": "model.layers: found 3",
}


def test_what_changes_a_step_that_was_made_is_refused(toy_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(toy_run, tmp_path / toy_run.name))
    before = (run / "config_snapshot.yaml").read_text()
    for key, message in REFUSED.items():
        with pytest.raises(ConfigError, match=r"train|data|run|model") as raised:
            extend(run, [key])
        assert message in str(raised.value), key
    assert (run / "config_snapshot.yaml").read_text() == before
    assert RunFolder(run).finished
    shutil.rmtree(run / "checkpoints" / "step-00000004")  # one update of the warmup, and one of the decay
    with pytest.raises(ConfigError, match="learning rate of step 2"):
        extend(run, ["train.steps=6"])
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    assert extend(run, ["train.steps=6", "train.checkpoint_every=3", "logging.tensorboard=true"]).train.steps == 6
    assert not RunFolder(run).finished


@pytest.mark.parametrize(
    ("keys", "done", "steps", "free"),
    [
        (["train.schedule=wsd"], 3, 20, True),  # decays from step 8 of 10 on
        (["train.schedule=wsd"], 9, 20, False),
        (["train.schedule=wsd"], 3, 3, False),
        (["train.schedule=linear"], 1, 20, True),  # a step of the warmup
        (["train.schedule=linear"], 2, 20, False),
        (["train.schedule=constant", "train.groups={expert: {schedule: linear}}"], 2, 20, False),
        (["train.schedule=constant", "model.depth={capacity: 0.5, release: 0.5}"], 2, 20, False),
        (["train.schedule=constant", "data.curriculum=[{until: 0.5}, {until: 1}]"], 4, 20, True),
        (["train.schedule=constant", "data.curriculum=[{until: 0.5}, {until: 1}]"], 6, 20, False),
    ],
)
def test_steps_that_a_step_depends_on(
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: list[str],
    done: int,
    steps: int,
    free: bool,
) -> None:
    _, file, *others = arguments(*keys, "train.steps=10", f"run.root={tmp_path}")
    run = RunFolder.create(Config.from_yaml(file, others))
    checkpoint = run.checkpoints / f"step-{done:08d}"
    monkeypatch.setattr("cdrmix.training.extension.newest_whole_checkpoint", lambda folder: checkpoint)
    if free:
        assert extend(run.path, [f"train.steps={steps}"]).train.steps == steps
        return
    with pytest.raises(ConfigError, match=f"{done} so far"):
        extend(run.path, [f"train.steps={steps}"])


def test_the_command_needs_a_run(tiny: Path, toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--extend", "train.steps=9"],
        ["--extend", "train.steps=9", "--resume", "auto"],
        ["--extend", "train.steps=9", "--resume", str(toy_run), "--config", str(tiny)],
    ):
        assert main(["train", *words]) == 2
        assert "use it with --resume RUN, without --config" in capsys.readouterr().err
    assert main(["train"]) == 2
    assert "--config: needed" in capsys.readouterr().err
    assert main(["train", "--resume", str(toy_run / "checkpoints" / "step-00000004")]) == 2
    assert f"is a checkpoint, not a run folder; the run is {toy_run}" in capsys.readouterr().err
