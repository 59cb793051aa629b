"""Row 9 of the ablations at one seed: lies are rolled back and the truth is committed, which the answers need."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdrmix.reason.experiments.ablation import run

FILE = Path(__file__).parents[3] / "configs" / "ablations" / "accept-head.yaml"


@pytest.mark.gate
@pytest.mark.long
def test_the_head_tells_lies_from_truth(tmp_path: Path) -> None:
    """Trained as in the table, whose demands are of the mean over seeds.

    A seed, and another machine's rounding, give another draw. 15 draws at seeds 1 to 5 gave .71 to 1.00 of answers
    (mean .87, deviation .09), .84 to 1.00 of good chunks (.92, .06) and .00 to .24 of bad ones (.06, .08); trunks of
    two and three times the steps and a head of twice the steps did not narrow that. One draw is held to three
    deviations.
    """
    measured = ["ablation.chunks=[6]", "ablation.episodes=64", "ablation.demands=[]"]
    found = run(FILE, measured, seeds=[1], out=tmp_path, say=lambda _: None).measured["accept"][1]
    assert found["learned@6"] >= 0.6
    assert found["always@6"] <= 0.32  # 0.14 to 0.31 in these draws
    assert found["never@6"] <= 0.046
    assert found["accept_good@6"] >= 0.74
    assert found["accept_bad@6"] <= 0.3
