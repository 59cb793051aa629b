"""Mixture-of-Depths in several processes trains as in one, at every ZeRO stage, and so do its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FEED_FORWARD = "model.depth={capacity: 0.75}"
BOTH = "model.depth={capacity: 0.75, part: both}"
STAGES = [f"train.zero_stage={stage}" for stage in (0, 1, 2, 3)]
MUON = "train.optimizer=muon"
SHARED = "train.expert_parallel=2"
CASES = [
    *([part, stage] for part in (FEED_FORWARD, BOTH) for stage in STAGES),
    *([part, stage, SHARED] for part in (FEED_FORWARD, BOTH) for stage in (STAGES[0], STAGES[3])),
    [FEED_FORWARD, STAGES[0], MUON],
    [BOTH, STAGES[1], MUON],
    [FEED_FORWARD, STAGES[1], MUON, SHARED],
]
RESUMED = [[BOTH, STAGES[3], SHARED], [FEED_FORWARD, STAGES[1]], [BOTH, STAGES[1], MUON]]
if __import__("os").environ.get("CASES"):
    CASES = eval(__import__("os").environ["CASES"])
    RESUMED = eval(__import__("os").environ.get("RESUMED", "[]"))


@pytest.mark.slow
def test_two_processes_train_as_one(work, tmp_path: Path) -> None:
    where = tmp_path / "told.json"
    overrides = ("model.layers=3", "model.mixer_layers={mamba2: [2]}", "model.mamba={d_state: 8, head_dim: 8}")
    options = {"folder": str(tmp_path), "cases": json.dumps(CASES), "resumed": json.dumps(RESUMED)}
    finished = work("depth", where, *overrides, processes=2, script="depth_worker.py", **options)
    assert [process.returncode for process in finished] == [0, 0], "\n".join(f.stdout for f in finished)
    results: dict[str, Any] = json.loads(where.read_text())
    print(json.dumps(results, indent=1))
