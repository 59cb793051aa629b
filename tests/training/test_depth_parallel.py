"""Mixture-of-Depths in several processes trains as in one, at every ZeRO stage, and so do its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cdrmix.inference.checkpoints import newest_whole_checkpoint, read_weights

# As in test_engine.py: both sides add the same fp32 terms in another order. A gradient's error of that size is one of
# an update of AdamW, whose epsilon is above the gradients here, and grows in Muon's iteration 500 times
# (test_muon.py). Kept tokens are counted alike: no score is so near to the threshold that its rounding decides.
GRADIENT = 222 * 2**-24
UPDATE = {"adamw": 3 * GRADIENT, "muon": 500 * GRADIENT}  # of three steps; one of Muon hides the errors of the others
TEN_STEPS = 10 * GRADIENT
FEED_FORWARD = "model.depth={capacity: 0.75}"
BOTH = "model.depth={capacity: 0.75, part: both}"
STAGES = [f"train.zero_stage={stage}" for stage in (0, 1, 2, 3)]
MUON = "train.optimizer=muon"
SHARED = "train.expert_parallel=2"
CASES = [
    *([BOTH, stage] for stage in STAGES),
    [FEED_FORWARD, STAGES[0]],
    [FEED_FORWARD, STAGES[0], SHARED],
    [BOTH, STAGES[3], SHARED],
    [BOTH, STAGES[1], MUON],
    [FEED_FORWARD, STAGES[1], MUON, SHARED],
]
RESUMED = [[BOTH, STAGES[3], SHARED], [FEED_FORWARD, STAGES[1]], [BOTH, STAGES[1], MUON]]

# A run in which the branches skip tokens after five steps: their routers' rate is high.
TRAINED = (
    "train.micro_batch_rows=2",
    "train.steps=10",
    "train.evaluate_rows=5",
    "train.ema_decay=0.9",
    "train.epsilon=0.001",
    "train.groups={router: {rate: 300}}",
)


@pytest.mark.long
def test_two_processes_train_as_one(work, tmp_path: Path) -> None:
    """Also where one of them keeps no token; the thresholds are saved, and a resumed run has the same bits."""
    where = tmp_path / "told.json"
    overrides = ("model.layers=3", "model.mixer_layers={mamba2: [2]}", "model.mamba={d_state: 8, head_dim: 8}")
    options = {
        "folder": str(tmp_path),
        "cases": json.dumps(CASES),
        "resumed": json.dumps(RESUMED),
        "trained": json.dumps(TRAINED),
    }
    finished = work("depth", where, *overrides, processes=2, script="depth_worker.py", **options)
    assert [process.returncode for process in finished] == [0, 0], "\n".join(f.stdout for f in finished)
    results: dict[str, Any] = json.loads(where.read_text())
    print(json.dumps(results, indent=1))  # the figures, for who wants them: pytest -rP
    assert len(results) == len(CASES) + len(RESUMED)
    for name, found in results.items():
        if name.startswith("resumed"):
            assert found is True, name
            continue
        assert found["share"] == 0.0, name
        assert found["loss"] < GRADIENT, name
        assert found["norm"] < GRADIENT, name
        assert found["update"] < UPDATE["muon" if MUON in name else "adamw"], name
        assert found["bias"] < GRADIENT, name

    # The trainer itself, in one process.
    (alone,) = work("train", tmp_path / "alone", *overrides, *TRAINED, BOTH)
    assert alone.returncode == 0, alone.stdout
    two = trained(tmp_path / "resumed-0" / "straight")
    (one, shares), (other, other_shares) = trained(tmp_path / "alone"), two
    assert other_shares == shares, "the trainer counts the tokens of the whole batch"
    assert all(0.2 < share < 0.95 for share in shares[-1].values()), shares
    assert one.keys() == other.keys()
    for name, expected in one.items():
        assert (other[name] - expected).abs().max() <= TEN_STEPS * max(expected.abs().max(), 1e-2), name


def trained(folder: Path) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """The weights and biases of a run, and the shares of the tokens that its branches kept, step by step."""
    checkpoint = newest_whole_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return read_weights(checkpoint), [step["depth"] for step in steps if step.get("depth")]
