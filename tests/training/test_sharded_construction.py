"""Under ZeRO-3 a model that is larger than the memory of a process starts, trains, is saved and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdrmix.inference.checkpoints import list_checkpoints, read_weights

LARGE = (
    "train.zero_stage=3",
    "train.batch_rows=8",
    "train.micro_batch_rows=1",
    "train.steps=2",
    "train.warmup_steps=1",
    "train.checkpoint_every=1",
    "train.evaluate_rows=8",
    "model.layers=8",
    "model.d_model=512",
    "model.attention.heads=8",
    "model.feed_forward={hidden: 512, experts: 16}",
)


@pytest.mark.slow
def test_a_model_larger_than_the_memory_of_a_process(work, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for limit in (4000,):
        finished = work(
            "train", run, *LARGE, processes=8, script="limited_worker.py", limit=str(limit << 20)
        )
        assert [process.returncode for process in finished] == [0] * 8, "\n".join(f.stdout for f in finished)
        weights = read_weights(list_checkpoints(run / "checkpoints")[-1])
        print([f.stdout for f in finished])
        print(sum(each.numel() for each in weights.values()) * 4 >> 20, "MiB")
        print((run / "metrics.jsonl").read_text())
