"""A run whose machine vanished goes on from its mirror, with the bits of a run that nothing disturbed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import main
from json_rows import read_metrics

import cdrmix
from cdrmix.inference.checkpoints import list_checkpoints

Arguments = Callable[..., list[str]]
TWELVE = ("train.steps=12", "train.evaluate_every=4")


class Vanished(Exception):
    """Stands for a machine that is gone."""


class VanishAt(cdrmix.Callback):
    """Ends a run after a step, without a word."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, step: int) -> None:
        if step == self._step:
            raise Vanished


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def rows(run: Path) -> list[dict[str, object]]:
    """The rows of metrics.jsonl without what depends on the speed of the machine."""
    names = ("step", "loss", "gradient_norm", "tokens", "valid_bits_per_byte")
    return [{name: row[name] for name in names} for row in read_metrics(run / "metrics.jsonl")]


@pytest.mark.slow
def test_the_run_folder_is_gone(arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone, first, second = (f"run.root={tmp_path / name}" for name in ("alone", "first", "second"))
    mirror = tmp_path / "mirror"
    assert main(["train", *arguments(*TWELVE, alone)]) == 0
    _, path, *overrides = arguments(*TWELVE, first, f"run.mirror={mirror}")
    with pytest.raises(Vanished):
        cdrmix.train(cdrmix.Config.from_yaml(path, overrides), callbacks=[VanishAt(9)])
    shutil.rmtree(tmp_path / "first")
    assert [path.name for path in list_checkpoints(only(mirror) / "checkpoints")] == ["step-00000006", "step-00000008"]
    assert main(["train", *arguments(*TWELVE, second), "--resume", str(mirror)]) == 0
    told = capsys.readouterr().out
    assert "step-00000008, verified" in told
    assert "continuing from step-00000008" in told
    assert main(["compare", str(only(tmp_path / "alone")), str(only(tmp_path / "second"))]) == 0
    assert rows(only(tmp_path / "second")) == rows(only(tmp_path / "alone"))
    assert only(tmp_path / "second").name == only(mirror).name


@pytest.mark.long
def test_the_files_of_two_processes(arguments: Arguments, tmp_path: Path) -> None:
    """With ZeRO each process has a part of the optimizer's state; the mirror has both."""
    mirror, more = tmp_path / "mirror", ("train.steps=6", "train.zero_stage=1", "train.evaluate_every=6")

    def train(root: str, *resume: str) -> int:
        where = (f"run.root={tmp_path / root}", f"run.mirror={mirror}")
        return main(["train", "--nproc", "2", *arguments(*more, *where), *resume])

    assert train("first") == 0
    copied = only(mirror) / "checkpoints"
    parts = {"optimizer-rank0.safetensors", "optimizer-rank1.safetensors", "rng-rank0.json", "rng-rank1.json"}
    for checkpoint in list_checkpoints(copied):
        assert parts <= {path.name for path in checkpoint.iterdir()}
    shutil.rmtree(copied / "step-00000006")  # as if the machine had vanished before it
    assert train("second", "--resume", str(only(mirror))) == 0
    assert "continuing from step-00000004" in (only(tmp_path / "second") / "train.log").read_text()
    assert main(["compare", str(only(tmp_path / "first")), str(only(tmp_path / "second"))]) == 0
    # What the second run committed replaces in the mirror what the first had left.
    assert main(["checkpoints", "verify", str(only(mirror))]) == 0
    assert [path.name for path in list_checkpoints(copied)] == ["step-00000004", "step-00000006"]
