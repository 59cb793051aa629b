"""`cdrmix plan`, `cdrmix train --dry-run`, and training that is refused before it writes anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import main

from cdrmix.errors import CorpusError
from cdrmix.plan import machine
from cdrmix.plan.plan import Plan, make_plan

Arguments = Callable[..., list[str]]


def test_the_plan_of_a_card_as_json(arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments("train.zero_stage=auto"), "--gpu", "h100", "--gpus", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["processes"], plan["zero_stage"], plan["machine"]["name"]) == (2, 1, "NVIDIA H100 80GB HBM3")
    memory = plan["memory"]
    assert memory["total"] == sum(part["bytes"] for part in memory["components"]) < memory["limit"]
    assert memory["fits"] is True
    flops, speed = plan["flops_per_token"], plan["speed"]
    assert flops["total"] == sum(flops[part] for part in ("parameters", "attention", "rwkv7", "mamba2"))
    assert plan["tokens"] == 4 * 2 * 32
    assert speed["tokens_per_second"] == pytest.approx(0.35 * 2 * 989.4e12 / flops["total"])
    assert "assumed" in speed["source"]


def test_the_plan_has_the_phases_of_stage_b(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is made once, and printed as JSON and as a table."""
    plans: list[Plan] = []

    def make_once(*arguments: Any, **options: Any) -> Plan:
        if not plans:
            plans.append(make_plan(*arguments, **options))
        return plans[0]

    monkeypatch.setattr("cdrmix.plan.plan.make_plan", make_once)
    config = Path(__file__).parents[2] / "configs" / "cdrmix-reason-tiny.yaml"
    steps = dict.fromkeys(("plasticity", "operations_imitation", "operations"), 0) | {"policy": 4}
    keys = ["model.layers=2", *(f"reasoning.phases.{name}.steps={count}" for name, count in steps.items())]
    assert main(["plan", "--config", str(config), *keys, "--gpu", "h100", "--json"]) == 0
    phases = json.loads(capsys.readouterr().out)["phases"]
    assert [phase["name"] for phase in phases] == ["acceptance", "policy"]
    for phase in phases:
        assert phase["total"] == sum(part["bytes"] for part in phase["components"])
        assert phase["fits"] is True
    most = max(phases, key=lambda phase: phase["total"])
    assert main(["plan", "--config", str(config), *keys, "--gpu", "h100"]) == 0
    shown = capsys.readouterr().out
    assert f"  most: {most['name']}, {most['moment']}" in shown
    assert "Memory of a process in the phases of stage B, GB" in shown


def test_the_plan_counts_the_rows_of_a_batch_warm_up(arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for overrides in ((), ("train.batch_warmup={rows: 1, steps: 3}",)):  # 1, 1, 1, then 2 rows
        command = ["plan", *arguments("train.optimizer=muon", *overrides), "--gpu", "h100", "--json"]
        assert main(command) == 0
        plans.append(json.loads(capsys.readouterr().out))
    constant, grown = plans
    assert (constant["tokens"], grown["tokens"]) == (4 * 2 * 32, 5 * 32)
    assert grown["disk"] == constant["disk"]  # the whole text is prepared, however much of it the steps read
    muon = [plan["flops_per_token"]["muon"] * plan["tokens"] for plan in plans]  # as many updates
    assert muon[1] == pytest.approx(muon[0], rel=1e-3)
    assert grown["memory"]["total"] == constant["memory"]["total"]


def test_a_cpus_speed_is_unknown_and_not_guessed(arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments(), "--gpu", "cpu", "--json"]) == 0
    speed = json.loads(capsys.readouterr().out)["speed"]
    assert speed["tokens_per_second"] is speed["hours"] is None


def test_a_dry_run_prints_the_table_and_makes_nothing(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = arguments(f"run.root={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}")
    assert main(["train", *overrides, "--dry-run"]) == 0
    table = capsys.readouterr().out
    for heading in ("Memory of a process", "Saved for the backward pass", "Operations per token", "Time", "Disk"):
        assert f"\n{heading}" in table
    assert max(len(line) for line in table.splitlines()) <= 100
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_tells_of_text_that_is_not_there(arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *arguments("data.source.paths=[nowhere]"), "--dry-run"]) == CorpusError.exit_code
    printed = capsys.readouterr()
    assert "Memory of a process" in printed.out
    assert "nothing is at 'nowhere'" in printed.err


def test_training_that_cannot_fit_is_refused_before_anything_is_made(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = arguments(f"run.root={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}")
    monkeypatch.setattr(machine, "host_memory", lambda: 10**8)
    assert main(["train", *overrides]) == 2
    assert "has 0.1 GB, of which 90%, 0.1 GB, may be planned with; most take runtime" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["train", *overrides, "--dry-run"]) == 2
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_a_card_without_a_name_in_the_table_has_no_rates(
    arguments: Arguments, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    class Properties:
        total_memory = 10**10

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA GeForce 1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: Properties)
    monkeypatch.setattr("cdrmix.runtime.check_gpu", lambda device, precision: None)
    assert main(["plan", *arguments(), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["machine"]["memory_bytes"] == 10**10
    assert plan["machine"]["flops_per_second"] is plan["speed"]["tokens_per_second"] is None
    assert "the table of GPUs has no rates" in plan["speed"]["source"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_in_one_process_is_refused(stage: int, arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *arguments(f"train.zero_stage={stage}")]) == 2
    assert f"train.zero_stage: {stage} shards nothing with one process" in capsys.readouterr().err
