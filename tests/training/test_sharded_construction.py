"""Under ZeRO-3 a process keeps its share of each part of a model as it is made, with the bits of a whole one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 2])
def test_no_process_holds_a_whole_parameter(work, tmp_path: Path, hybrid: tuple[str, ...], experts: int) -> None:
    where = tmp_path / "told.json"
    more = (*hybrid, f"train.expert_parallel={experts}", "train.micro_batch_rows=4", "model.bigrams={rows: 50}")
    told = work("make", where, *more, "model.tie_embeddings=false", processes=2, script="sharded_worker.py")
    assert [each.returncode for each in told] == [0, 0], "\n".join(each.stdout for each in told)
    facts = json.loads(where.read_text())
    assert facts["wrong"] == []
    assert facts["whole"] == 0, "between the construction and the engine"
    assert 0.49 < facts["share"] < 0.55, "padding adds some elements to small parameters"
    first, second = facts["written"]
    assert abs(first - second) < 0.1 * (first + second), "each process writes its part of a checkpoint"
