"""`cdrmix doctor` passes on this machine, and each check fails where something is wrong."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import main

from cdrmix.doctor import checks as doctor_checks
from cdrmix.doctor import gradients
from cdrmix.doctor.findings import Finding, configuration
from cdrmix.doctor.parallel import work
from cdrmix.run_folder import RunFolder
from cdrmix.training.engine import Engine

NAMES = [
    "packages",
    "kernels against float64",
    "engine against PyTorch",
    "a training repeated",
    "a training resumed",
    "a checkpoint",
    "disk",
]


@pytest.fixture
def failed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Runs the command on short rows and one thread, and returns the names of the checks that failed."""
    monkeypatch.setattr(doctor_checks, "DISK_BYTES", 1 << 25)
    less = ("run.threads=1", "data.row_length=16", "model.d_model=64", "train.steps=4", "train.checkpoint_every=2")
    monkeypatch.setattr(doctor_checks, "configuration", lambda *of_all: configuration(*of_all, *less))

    def run() -> list[str]:
        status = main(["doctor", "--device", "cpu", "--json", "--folder", str(tmp_path / "disk")])
        told = json.loads(capsys.readouterr().out)["checks"]
        assert [row["check"] for row in told] == NAMES
        wrong = [row["check"] for row in told if not row["passed"]]
        assert status == (1 if wrong else 0)
        assert all(row["remedy"] for row in told if not row["passed"])
        assert list((tmp_path / "disk").iterdir()) == []
        return wrong

    return run


def test_this_machine_passes(failed: Callable[[], list[str]]) -> None:
    assert failed() == []


def test_one_check_that_fails_is_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for passed in (True, False):
        findings = [Finding("one", True, "a"), Finding("other", passed, "b", "c"), Finding("last", True, "d")]
        made = [lambda finding=finding: finding for finding in findings]
        monkeypatch.setattr("cdrmix.doctor.report.checks", lambda folder, device, made=made: made)
        assert main(["doctor", "--device", "cpu", "--folder", str(tmp_path)]) == (0 if passed else 1)
        assert f"{2 + passed} of 3 checks passed" in capsys.readouterr().out


def test_a_changed_bit_must_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the checkpoint must be whole before."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    monkeypatch.setattr(doctor_checks, "list_checkpoints", lambda folder: [tmp_path])
    for whole, noticed, passed in (([], ["damage"], True), ([], [], False), (["damage"], ["damage"], False)):
        told = iter([whole, noticed])
        monkeypatch.setattr(doctor_checks, "damages", lambda checkpoint, told=told: next(told))
        assert doctor_checks._checkpoint([RunFolder(tmp_path)]).passed == passed


@pytest.mark.slow
def test_a_wrong_gradient_fails(failed: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 a weight is 1 % larger, and the engine gets a gradient that is 0.1 % too large."""

    def changed(model: torch.nn.Module) -> torch.nn.Module:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.language_model.embedding.weight.mul_(1.01)
        return other

    monkeypatch.setattr(gradients, "deepcopy", changed)
    gradient = Engine.gradient
    monkeypatch.setattr(Engine, "gradient", lambda self, name: 1.001 * gradient(self, name))
    assert failed() == ["kernels against float64", "engine against PyTorch"]


@pytest.mark.long
def test_a_training_that_differs_and_a_damage_that_is_not_noticed_fail(
    failed: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each training clips less than the one before."""
    clip, calls = Engine.clip, []

    def differs(self: Engine) -> torch.Tensor | None:
        calls.append(1)
        self.gradient_clip = 0.01 / len(calls)
        return clip(self)

    monkeypatch.setattr(Engine, "clip", differs)
    monkeypatch.setattr(doctor_checks, "damages", lambda checkpoint: [])
    assert failed() == ["a training repeated", "a training resumed", "a checkpoint"]


@pytest.mark.long
@pytest.mark.usefixtures("own_settings")
def test_modes_fail_where_the_engine_has_other_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, which has the ZeRO stages alone."""
    gradient = Engine.gradient
    for wrong in (False, True):
        if wrong:
            monkeypatch.setattr(Engine, "gradient", lambda self, name: 1.001 * gradient(self, name))
        configuration(tmp_path, "cpu")
        work(tmp_path, "cpu")
        told = json.loads((tmp_path / "findings.json").read_text())
        assert [(check, passed) for check, passed, *_ in told] == [
            ("messages", True),
            *[(f"ZeRO {stage}", not wrong) for stage in (0, 1, 2, 3)],
        ]


@pytest.mark.long
def test_two_processes_pass_in_every_mode(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks, "DISK_BYTES", 1 << 25)
    assert main(["doctor", "--device", "cpu", "--nproc", "2", "--folder", str(tmp_path)]) == 0
    told = capfd.readouterr().out
    modes = ("", ", experts over 2 processes", ", tokens of a row over 2 processes", ", layers over 2 processes")
    rows = [*itertools.product(range(4), modes), (0, ", blocks over 2 processes"), (1, ", blocks over 2 processes")]
    for stage, mode in rows:
        assert re.search(rf"^pass  ZeRO {stage}{mode} ", told, re.MULTILINE), (stage, mode)
    checks = len(NAMES) + 1 + len(rows)
    assert told.count("pass  ") == checks
    assert f"{checks} of {checks} checks passed" in told


def test_a_number_of_processes_that_does_not_divide_the_rows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--nproc", "3", "--folder", str(tmp_path)]) == 2
    assert "--nproc: found 3; allowed: 1, 2, 4, 8" in capsys.readouterr().err
