"""Plans: the memory of a pipeline and of a CPU, both stages, and the disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cdrmix.config.schema import Config
from cdrmix.plan.machine import Machine, machine_for
from cdrmix.plan.memory import memory_of
from cdrmix.plan.parameters import count_parameters
from cdrmix.plan.plan import make_plan
from cdrmix.plan.stage_b import PhaseMemory
from cdrmix.plan.stage_b_fit import PhaseFit

TINY = Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml"
CARD = Machine("a card", "cuda", 10**12, 1e15, "a test", False, None)


def test_a_pipeline_keeps_the_activations_of_several_micro_batches() -> None:
    """The first of two stages has read two micro-batches before the first gradient comes back."""
    kept = []
    for rows in (2, 8):
        overrides = ["train.pipeline_parallel=2", "train.micro_batch_rows=2", f"train.batch_rows={rows}"]
        config = Config.from_yaml(TINY, overrides)
        parts = {part.name: part.bytes for part in memory_of(config, "cuda", 2).components}
        kept.append(parts["activations"])
    assert kept[1] == 2 * kept[0] > 0


def test_processes_share_the_memory_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdrmix.plan.machine.host_memory", lambda: 8 * 10**9)
    found = [machine_for(Config.from_yaml(TINY), "cpu", processes) for processes in (1, 4)]
    assert [(machine.memory_bytes, machine.host_bytes) for machine in found] == [
        (8 * 10**9, 8 * 10**9),
        (2 * 10**9, 8 * 10**9),
    ]


def test_the_disk_holds_the_kept_checkpoints_and_the_one_that_is_written(tmp_path: Path) -> None:
    """Of 12 steps: the last 3, the best, those of steps 5 and 10, and one more; weights and two moments in float32."""
    overrides = ["train.steps=12", "train.warmup_steps=1", "train.keep_last=3", "train.keep_every=5"]
    (tmp_path / "text.txt").write_text("x" * 25_600)
    overrides += ["data.source.kind=text", f"data.source.paths=[{tmp_path}]"]
    config = Config.from_yaml(TINY, overrides)
    disk = make_plan(config, CARD, 1, print).disk
    stored = count_parameters(config.cdrmix_model).total_stored
    assert disk.checkpoint == 12 * stored
    assert disk.checkpoints == (3 + 1 + 2 + 1) * disk.checkpoint
    assert disk.export == 4 * stored
    # Of the whole text, however little of it the steps read; 4,096 tokens have numbers of two bytes.
    assert disk.shards == 25_600 * 2 + 100 * 20


def test_a_plan_fits_if_both_stages_do() -> None:
    plan = make_plan(Config.from_yaml(TINY), CARD, 1, print)
    assert plan.fits
    phase = PhaseMemory("policy", "update", None, plan.fit.memory)
    for fits in (True, False):
        both = dataclasses.replace(
            plan, phases=(PhaseFit(phase, plan.fit.limit, True, ()), PhaseFit(phase, 1, fits, ()))
        )
        assert both.fits is fits
