"""Which checkpoint is exported: the best by default, the last, a named one; the messages, and the fallbacks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from in_process import main
from json_rows import read_metrics

from cdrmix.inference.checkpoints import read_weights
from cdrmix.inference.load import load_exported
from cdrmix.run_folder import RunFolder

Arguments = Callable[..., list[str]]


@pytest.fixture
def run(toy_run: Path, tmp_path: Path) -> RunFolder:
    """A run whose best checkpoint is that of step 2 of 4."""
    shutil.copytree(toy_run, tmp_path / toy_run.name)
    (tmp_path / toy_run.name / "checkpoints" / "best").write_text("step-00000002\n")
    return RunFolder.open(tmp_path / toy_run.name)


def export(run: RunFolder, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """The exported step, and the message about it."""
    shutil.rmtree(run.export, ignore_errors=True)
    capsys.readouterr()
    assert main(["export", "--model", str(run.path), *options]) == 0
    told = capsys.readouterr()
    assert told.out.strip() == str(run.export)
    step = json.loads((run.export / "config.json").read_text())["step"]
    expected = read_weights(run.checkpoints / f"step-{step:08d}")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_exported(run.export).weights.items())
    return step, told.err.strip()


def test_the_best_is_exported_and_the_reason_is_said(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    bits = {row["step"]: row.get("valid_bits_per_byte") for row in read_metrics(run.metrics_jsonl)}
    told = f"the best on held-out text ({bits[2]:.4f} bits per byte in its validation); "
    told += f"the last is step 4 ({bits[4]:.4f} bits per byte in its validation)"
    assert export(run, capsys) == (2, f"Exporting step 2, {told}")
    assert export(run, capsys, "--checkpoint", "last") == (4, "Exporting step 4, the last, as requested")
    for name in ("step-00000002", str(run.checkpoints / "step-00000002")):
        assert export(run, capsys, "--checkpoint", name) == (2, "Exporting step 2, as requested")
    # What compare reads of a run is its last checkpoint, whichever was exported.
    assert main(["compare", str(run.path), str(run.checkpoints / "step-00000004")]) == 0


def test_the_last_is_taken_where_there_is_no_best(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    weights = run.checkpoints / "step-00000002" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    step, told = export(run, capsys)
    assert step == 4
    assert "the last, because the best on held-out text cannot be used" in told
    assert "is corrupt" in told
    weights.write_bytes(whole)
    (run.checkpoints / "best").unlink()
    step, told = export(run, capsys)
    assert (step, told) == (4, "Exporting step 4, the last, because none is marked as the best on held-out text")


def test_stage_b_comes_after_the_best(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose stage A ended with step 2: later checkpoints are of stage B's phases."""
    text = run.config_snapshot.read_text()
    run.config_snapshot.write_text(text.replace("  steps: 4\n", "  steps: 2\n"))
    step, told = export(run, capsys)
    assert (step, told) == (
        4,
        "Exporting step 4, the last, because the best on held-out text, step 2, is before stage B",
    )


def test_a_run_exports_what_its_configuration_says(run: RunFolder, arguments: Arguments) -> None:
    of_last = run.summary()["held_out"]["bits_per_byte"]
    root = f"run.root={run.path.parent}"
    assert run.summary()["export"]["step"] == 4
    run.update_summary({"finished": False})
    assert main(["train", *arguments(root), "--resume", "auto"]) == 0
    assert run.summary()["export"]["step"] == 2
    assert "Exporting step 2, the best on held-out text" in run.log.read_text()
    card = (run.export / "README.md").read_text()
    assert "trained by cdrmix for 2 steps" in card
    assert "bits per byte" in card
    assert f"{of_last:.4f}" not in card  # its own figures
    assert run.summary()["held_out"]["bits_per_byte"] == of_last  # the run's are those of its last checkpoint
    run.update_summary({"finished": False})
    assert main(["train", *arguments(root, "export.checkpoint=last"), "--resume", "auto"]) == 0
    assert run.summary()["export"]["step"] == 4


def test_what_is_no_checkpoint_of_the_run(
    run: RunFolder, toy_run: Path, arguments: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = str(toy_run / "checkpoints" / "step-00000004")
    for wanted in ("step-00000003", foreign, "bets"):
        assert main(["export", "--model", str(run.path), "--out", "x", "--checkpoint", wanted]) == 2
        error = capsys.readouterr().err
        assert f"error: {wanted} is no checkpoint of {run.path}, which has step-00000002, step-0" in error
    assert main(["export", "--model", foreign, "--out", "x", "--checkpoint", "best"]) == 2
    assert "--checkpoint selects one of a run folder" in capsys.readouterr().err
    assert main(["train", *arguments("export.checkpoint=/no/where")]) == 2
    assert "export.checkpoint: /no/where does not exist" in capsys.readouterr().err


def test_a_folder_of_runs_or_checkpoints_names_one_of_them(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, inside in ((run.path.parent, run.path), (run.checkpoints, run.checkpoints / "step-00000004")):
        assert main(["generate", "--model", str(folder), "--prompt", "x"]) == 5
        error = capsys.readouterr().err
        assert f"{folder} is not a run folder, a checkpoint or an exported model; name one of those in it" in error
        assert str(inside.parent) in error.partition("such as ")[2]


def test_a_path_that_cannot_be_used_is_refused(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--model", str(run.path), "--out", str(run.config_snapshot / "export")]) == 2
    assert "cannot write the export" in capsys.readouterr().err
    assert main(["export", "--model", str(run.path)]) == 2
    message = capsys.readouterr().err
    assert "an export is never overwritten: name another folder with --out" in message
    assert "Exporting" not in message


def test_the_average_of_the_last_checkpoints_is_exported(
    run: RunFolder, arguments: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    run.update_summary({"finished": False})
    average = ("export.checkpoint=last", "export.average=2")
    assert main(["train", *arguments(f"run.root={run.path.parent}", *average), "--resume", "auto"]) == 0
    told = capsys.readouterr().out
    assert "Exporting step 4, the last, as requested; the weights are the average of the steps 2, 4" in told
    one, other = (read_weights(run.checkpoints / f"step-0000000{step}") for step in (2, 4))
    exported = load_exported(run.export).weights
    assert one.keys() == exported.keys()
    for name, weight in exported.items():
        assert torch.equal(weight, ((one[name].double() + other[name].double()) / 2).float()), name
    assert main(["train", *arguments("export.average=3")]) == 2
    assert "export.average: found 3 (an integer)\n    allowed: at most train.keep_last=2" in capsys.readouterr().err
