"""Rows 2 and 7 of the ablations at one seed: fast weights remember, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdrmix.reason.experiments.ablation import run

FILE = Path(__file__).parents[3] / "configs" / "ablations" / "delta-recall.yaml"


@pytest.mark.gate
@pytest.mark.long
def test_delta_fast_weights_remember_and_nothing_else_does(tmp_path: Path) -> None:
    """In a quarter more steps, since one seed of twelve had learned nothing by 300 and all by 400. Chance is 1/64.

    64 chunks are 16 times the training's length.
    32 episodes of 8 answers: at chance 256 answers have a deviation of .008, so that .046 is four of them away.
    """
    measured = ["reasoning.phases.plasticity.steps=500", "ablation.chunks=[64]", "ablation.episodes=32"]
    measured += ["ablation.harder_chunks=[]", "ablation.demands=[]"]
    found = run(FILE, measured, seeds=[1], out=tmp_path, arms=["on"], say=lambda _: None).measured["on"][1]
    assert found["accuracy@64"] >= 0.95
    assert found["zeroed@64"] <= 0.046
    assert found["swapped@64"] <= 0.046
