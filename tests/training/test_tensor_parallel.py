"""Processes that divide the layers train as one process with whole ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

HEADS = ("model.attention.heads=4", "model.attention.kv_heads=4", "model.bigrams={rows: 52}")
SIZES = ("model.d_model=64", "model.attention.qk_norm=true", "model.mamba.groups=4")


def told(work: Any, job: str, folder: Path, processes: int, *overrides: str, **options: str) -> dict[str, float]:
    where = folder / "told.json"
    finished = work(job, where, *overrides, processes=processes, script="tensor_worker.py", **options)
    assert [process.returncode for process in finished] == [0] * processes, "\n".join(f.stdout for f in finished)
    print(where.read_text())  # the figures, for who wants them: pytest -rP
    found: dict[str, float] = json.loads(where.read_text())
    return found


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shares_give_the_gradients_of_whole_layers(
    work, tmp_path: Path, hybrid: tuple[str, ...], processes: int
) -> None:
    parallel = f"train.tensor_parallel={processes}"
    for case, error in told(work, "shares", tmp_path, processes, *hybrid, *HEADS, *SIZES, parallel).items():
        if case.startswith("without"):
            assert error > 1e-6, case
        else:
            # Sums of at most 48 tokens and 64 channels in float64, through four layers and back.
            assert error < 1e-12, case


@pytest.mark.slow
def test_the_engine_trains_shares_as_whole_layers(work, tmp_path: Path, hybrid: tuple[str, ...]) -> None:
    """Two groups of two processes with different rows."""
    sizes = (*hybrid, *HEADS, *SIZES, "train.tensor_parallel=2")
    for case, error in told(work, "engines", tmp_path, 4, *sizes, steps="4", stages="012").items():
        assert error < 1e-5, case
