"""Gradients are summed over processes during the last backward pass, with the same bits as after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def told(work: Any, where: Path, job: str, processes: int, *overrides: str, **options: str) -> list[dict[str, Any]]:
    finished = work(job, where, *overrides, processes=processes, script="reduction_worker.py", **options)
    assert [process.returncode for process in finished] == [0] * processes, "\n".join(f.stdout for f in finished)
    return [json.loads(Path(f"{where}-{rank}").read_text()) for rank in range(processes)]


def test_sums_of_weights_used_twice_in_one_process_or_never(work, tmp_path: Path) -> None:
    for rank, found in enumerate(told(work, tmp_path / "toy", "toy", 3)):
        assert len(found) == 8
        for case, (error, left, buckets) in found.items():
            assert error == 0.0, case
            # 35 elements in buckets of 7; with parts of 12 elements that end there too.
            assert buckets == (5 if case.startswith("None") else 6), case
            # The two last buckets wait for what takes no part: in rank 0 for one of them.
            overlapped = case.endswith("True")
            assert left == (buckets - (1 if rank == 0 else 2) if overlapped else 0), case


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "reduced"), [(2, ("fp32", "bf16")), pytest.param(4, ("fp32",), marks=pytest.mark.long)]
)
def test_messages_leave_before_the_backward_pass_has_ended_and_change_no_bit(
    work, tmp_path: Path, processes: int, reduced: tuple[str, ...]
) -> None:
    ranks = told(work, tmp_path / "engines", "engines", processes, reduced=json.dumps(reduced))
    for found in ranks:
        assert len(found) == 2 * 2 * 2 * len(reduced)
        for case, result in found.items():
            assert result["same"], case
            assert result["none left"] == 0, case
            # The embedding's gradient is the last one.
            assert result["buckets"] // 2 < result["left"] <= result["buckets"], case
