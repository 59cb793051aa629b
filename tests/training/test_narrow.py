"""Training in bf16: 16-bit copies of the weights, gradients added up in float32, reduced in either dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BF16 = 2.0**-9  # its unit roundoff


@pytest.mark.parametrize(
    ("processes", "stack", "stages"),
    [
        pytest.param(1, "tiny", (0, 1), marks=pytest.mark.long),
        pytest.param(1, "tiny", (2, 3), marks=pytest.mark.long),
        pytest.param(2, "hybrid", (0, 1), marks=pytest.mark.long),
        pytest.param(2, "tiny", (2, 3), marks=pytest.mark.slow),
        pytest.param(4, "tiny", (1,), marks=pytest.mark.long),
    ],
)
def test_bf16_training_is_autocasts_but_for_the_rounding_of_gradients(
    work, tmp_path: Path, hybrid: tuple[str, ...], processes: int, stack: str, stages: tuple[int, ...]
) -> None:
    where = tmp_path / "errors.json"
    overrides = hybrid if stack == "hybrid" else ()
    order = {"script": "narrow_worker.py", "stages": json.dumps(stages)}
    finished = work("narrow", where, *overrides, processes=processes, **order)
    assert [process.returncode for process in finished] == [0] * processes, finished[0].stdout
    results = json.loads(where.read_text())
    assert len(results) == len(stages) * 2
    for combination, found in results.items():
        stage, reduced = combination.split()
        assert found["same"], f"{combination}: two runs differ"
        # The same products of the same numbers; the float64 sum over micro-batches in another order.
        assert found["first loss"] < 1e-12, combination
        # Relative to the largest sum of absolute values. Autocast rounds every micro-batch's gradient, on a CPU by up
        # to 1.8 units: PyTorch's product of such small bf16 matrices against float64, over random ones of these
        # shapes. A reduction in bf16 rounds every process's share once and each partial sum once.
        roundings = 1 + (processes if reduced == "bf16" and processes > 1 else 0)
        assert found["gradient"] < 2 * roundings * BF16, combination
        # After three updates. Copies that are never refreshed give 5e-3 with one process (tried).
        assert found["loss"] < 5e-4, combination
        assert found["stale"] == 0.0, combination
        assert bool(found["attached"]) == (stage != "3"), combination
        if int(stage) < 2:  # there the sums are added to by the products themselves
            assert found["moved"] == [], combination
        elif stage == "2":
            assert not any("_to_copy" in each for each in found["moved"]), combination
