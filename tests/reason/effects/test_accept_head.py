"""Row 9 of the ablations at one seed: lies are rolled back and the truth is committed, which the answers need."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdrmix.reason.ablation import run

FILE = Path(__file__).parents[3] / "configs" / "ablations" / "accept-head.yaml"


@pytest.mark.gate
def test_the_head_tells_lies_from_truth(tmp_path: Path) -> None:
    """Trained as in the table.

    What the table demands is of the mean over seeds, .963 and .980 of good chunks; a seed deviates from it by .014 and
    .018, and another machine's rounding gives another draw. So one seed is held to three deviations less.
    """
    measured = ["ablation.chunks=[6]", "ablation.episodes=64", "ablation.demands=[]"]
    found = run(FILE, measured, seeds=[1], out=tmp_path, say=lambda _: None).measured["accept"][1]
    assert found["learned@6"] >= 0.92
    assert found["always@6"] <= 0.3
    assert found["never@6"] <= 0.046
    assert found["accept_good@6"] >= 0.926
    assert found["accept_bad@6"] <= 0.05
